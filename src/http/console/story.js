// The journal as rows, without any drawing: attempts, iterations with the answers of the model, its calls,
// and everything else as notes. Each event adds a row or changes the one that it is about.

import { serviceNow } from "./api.js";
import { NOTES } from "./pictures.js";

export class Story {
  constructor() {
    this.rows = [];
    /** Rows that have changed since they were last drawn. */
    this.changed = new Set();
    this.began = null;
    this.at = null;
    this.iteration = null;
    this.calls = new Map();
    this.waits = { open: new Set(), since: null, sum: 0 };
  }

  add(event) {
    this.began ??= Date.parse(event.at);
    this.at = event.at;
    const data = event.data ?? {};
    const handle = HANDLERS[event.type];
    if (handle) handle(this, data, event);
    else this.push("note", { type: event.type, data });
    this.count(event.type, data);
    if (NOTES[event.type] && data.call_id) this.updateCall(event.type, data);
  }

  push(kind, more) {
    const row = { kind, at: this.at, since: Date.parse(this.at) - this.began, index: this.rows.length, open: new Set(), ...more };
    this.rows.push(row);
    this.changed.add(row);
    return row;
  }

  change(row, more) {
    Object.assign(row, more);
    this.changed.add(row);
  }

  /** The stream was broken: pieces of an answer may be missing. */
  interrupt() {
    if (this.iteration?.live) this.iteration.live.gap = true;
  }

  begin(data) {
    this.iteration = this.push("iteration", { number: data.iteration, attempt: data.attempt, started: data, answer: null, live: null });
  }

  /** A piece of an answer; one that arrives after the complete answer is ignored. */
  piece(data) {
    const row = this.iteration;
    if (!row || row.number !== data.iteration || row.attempt !== data.attempt) return;
    if (data.restarted) row.live = null;
    const live = row.live ??= { text: "", thinking: "", calls: [], gap: false };
    const more = (text) => (live.gap ? (live.gap = false, ` … ${text}`) : text);
    if (data.text) live.text += more(data.text);
    if (data.thinking) live.thinking += more(data.thinking);
    if (data.tool_call) {
      const call = live.calls[data.tool_call.index] ??= { name: "", arguments: "" };
      if (data.tool_call.name) call.name = data.tool_call.name;
      call.arguments += data.tool_call.arguments;
    }
    this.changed.add(row);
  }

  answered(data) {
    if (!this.iteration) this.begin(data);
    this.change(this.iteration, { answer: data, live: null });
    this.iteration = null;
    this.propose(data.message);
  }

  propose(message) {
    for (const call of message.tool_calls ?? []) {
      this.calls.set(call.id, this.push("call", { call, status: "proposed", facts: [] }));
    }
  }

  settle(id, status, more) {
    const row = this.calls.get(id);
    if (!row) return;
    const facts = [...row.facts, ...(more.facts ?? []).filter(Boolean)];
    if (["failed", "blocked"].includes(status)) row.open.add("call");
    this.change(row, { ...more, status, facts });
  }

  /** Milliseconds that it has waited for others, which no limit counts. */
  waited() {
    const { sum, since } = this.waits;
    return sum + (since === null ? 0 : Math.max(0, serviceNow() - since));
  }

  /** Counts the requests that have no answer; while there is one, the run waits. */
  count(type, data) {
    const { waits } = this;
    const now = Date.parse(this.at);
    if (["approval.requested", "tool_call.awaiting_client", "tool_call.awaiting_child"].includes(type)) {
      waits.open.add(data.call_id);
      waits.since ??= now;
    } else if (type === "approval.resolved" && waits.open.delete(data.call_id) && waits.open.size === 0) {
      waits.sum += now - waits.since;
      waits.since = null;
    }
  }

  /** Updates the call that a note is about. */
  updateCall(type, data) {
    const status = {
      "approval.requested": "awaiting_approval", "tool_call.awaiting_client": "awaiting_client",
      "tool_call.awaiting_child": "awaiting_child", "output.proposed": "proposed", "output.reflected": "shown",
      "validation.failed": "refused",
    }[type];
    if (type === "approval.resolved") {
      const answer = { denied: "denied", expired: "expired" }[data.resolution] ?? "running";
      this.settle(data.call_id, answer, data.arguments ? { edited: data.arguments } : {});
    } else if (type === "output.proposed") {
      this.settle(data.call_id, data.problem ? "failed" : "taken", {});
    } else if (status) {
      this.settle(data.call_id, status, data.child_run_id ? { child: data.child_run_id } : {});
    }
  }

  end(kind, data) {
    if (this.iteration) this.change(this.iteration, { over: true });
    for (const row of this.calls.values()) {
      if (["proposed", "running"].includes(row.status)) this.change(row, { status: row.call.target === "tool" ? "not_executed" : "taken" });
    }
    this.iteration = null;
    this.push("end", { status: kind, data });
  }
}

// The answer of a tool that was asked, after a crash, whether a call took effect.
const RECONCILED = {
  happened: "asked after a crash: it took effect",
  did_not_happen: "asked after a crash: it had not happened",
};

const HANDLERS = {
  "run.resumed": (story, d) => story.push("note", { type: "run.resumed", data: { ...d, was_waiting: story.waits.open.size > 0 && !d.deaths } }),
  "attempt.started": (story, d) => story.push("attempt", { number: d.attempt }),
  "iteration.started": (story, d) => story.begin(d),
  "model.delta": (story, d) => story.piece(d),
  "model.responded": (story, d) => story.answered(d),
  "call.given": (story, d) => {
    story.propose(d.message);
  },
  "tool_call.started": (story, d) => story.settle(d.call_id, "running", {
    facts: [`Gate: ${d.decision}`, d.reason, `effect: ${d.effect}`], ran: story.at,
  }),
  "tool_call.progress": (story, d) => {
    const row = story.calls.get(d.call_id);
    if (row) story.change(row, { progress: d.progress });
  },
  "tool_call.completed": (story, d, event) => story.settle(d.call_id, d.failure ? "failed" : "succeeded", {
    took: d.target === "tool" ? d.duration_ms : undefined,
    facts: [d.failure && d.failure.replaceAll("_", " "), d.cached && "from cache", d.reconciled && RECONCILED[d.reconciled]],
    result: d.content, note: d.note, changes: d.changes, run: event.run_id, progress: undefined,
  }),
  "tool_call.blocked": (story, d) => story.settle(d.call_id, d.decision, {
    facts: [`Gate: ${d.decision} by ${d.rule}`, d.reason], result: d.content,
  }),
  "run.completed": (story, d) => story.end("completed", d),
  "run.failed": (story, d) => story.end("failed", d),
  "run.cancelled": (story, d) => story.end("cancelled", d),
};
