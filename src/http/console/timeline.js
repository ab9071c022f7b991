// The journal as a story: attempts, the iterations in them, what the model said, what its calls did.
// Each event changes only what it is about, so that a reader keeps their place while the run goes on.

import { count, duration, el, money, pre, status, time, visible, words } from "./dom.js";

export class Timeline {
  constructor() {
    this.node = el("ol", { class: "timeline" });
    /** Where the next step goes: the newest attempt's list, before the first the whole. */
    this.steps = this.node;
    this.iteration = null;
    this.calls = new Map();
    this.began = null;
  }

  /** The next event. */
  add(event) {
    this.began ??= new Date(event.at);
    this.at = event.at;
    const tell = STORY[event.type] ?? ((timeline, data) => timeline.note(words(event.type), hasMore(data) && pre(data)));
    tell(this, event.data ?? {});
  }

  /** A step of its own. */
  step(kind, ...children) {
    const since = el("time", { datetime: this.at, title: this.at }, `+${duration(new Date(this.at) - this.began)}`);
    const node = el("li", { class: `step ${kind}` }, el("div", { class: "line" }, children.shift(), since), children);
    this.steps.append(node);
    return node;
  }

  /** A step that needs a line and perhaps something to open. */
  note(text, ...more) {
    return this.step("note", el("span", {}, text), ...more);
  }

  attempt(number) {
    this.steps = this.node;
    const steps = el("ol");
    this.step("attempt", el("h3", {}, `Attempt ${number}`), steps);
    this.steps = steps;
  }

  open(number) {
    const meta = el("span", { class: "meta" }, "waiting for the model …");
    const body = el("div", { class: "body" });
    this.step("iteration", el("h4", {}, `Iteration ${number}`, meta), body);
    this.iteration = { meta, body };
  }

  answered(data) {
    if (!this.iteration) this.open(data.iteration);
    const { meta, body } = this.iteration;
    this.iteration = null;
    const { usage, message } = data;
    meta.replaceChildren(...[
      `${data.provider}/${data.model}`, duration(data.latency_ms),
      `${count(usage.input_tokens)} in, ${count(usage.output_tokens)} out`,
      usage.cost_usd !== null && money(usage.cost_usd), words(data.finish_reason),
      data.retries > 0 && `${data.retries} retries`, data.fallback && "fallback",
    ].filter(Boolean).map((part) => el("span", {}, part)));
    if (message.thinking) body.append(folded("Thinking", message.thinking));
    if (message.text) body.append(el("p", { class: "said" }, message.text));
    for (const call of message.tool_calls ?? []) body.append(this.call(call));
  }

  call({ id, name, arguments: given, target }) {
    const state = el("span", {}, status("proposed"));
    const took = el("span", { class: "meta" });
    const facts = el("p", { class: "meta" });
    const result = el("div");
    const node = el("details", { class: "call", "data-call": id },
      el("summary", {}, el("code", {}, name), el("span", { class: "preview" }, visible(given)), state, took),
      el("h5", {}, "Arguments"), pre(given, `Arguments of ${name}`), facts, result);
    this.calls.set(id, { node, state, took, facts, result, target });
    return node;
  }

  settle(id, what, changes) {
    const call = this.calls.get(id);
    if (!call) return this.note(words(what));
    call.state.replaceChildren(status(what));
    if (changes.took !== undefined) call.took.textContent = duration(changes.took);
    call.facts.append(...(changes.facts ?? []).filter(Boolean).map((fact) => el("span", {}, fact)));
    if (changes.result !== undefined) {
      call.result.replaceChildren(el("h5", {}, "Result"), pre(changes.result, "Result of the call"));
    }
    if (["failed", "blocked", "escalated"].includes(what)) call.node.open = true;
  }

  undecided(title, { error, feedback }) {
    this.step("note bad", el("span", {}, title), el("p", {}, error), folded("Sent to the model", feedback));
  }

  end(kind, { output, error, raw_response, partial }) {
    this.iteration?.meta.replaceChildren("no answer");
    this.steps = this.node;
    const node = this.step(`end ${kind}`, el("h3", {}, `Run ${kind}${partial ? ", partial output" : ""}`));
    if (error) node.append(el("p", {}, el("strong", {}, error.code), " ", error.message));
    if (output !== undefined) node.append(pre(output, "Output"));
    else if (raw_response) node.append(folded("The model's last words", raw_response));
  }
}

const hasMore = (data) => Object.keys(data).length > 0;
const folded = (title, content) => el("details", {}, el("summary", {}, title), pre(content, title));
const wrong = (errors) => el("ul", {}, errors.map((e) => el("li", {}, e.pointer && el("code", {}, e.pointer), " ", e.message)));
const said = (turn) => (turn.user === undefined ? turn : turn.user);

const STORY = {
  "run.queued": (t) => t.note("Queued"),
  "run.started": (t, d) => t.note("Started", d.system && folded("System prompt", d.system),
    d.turns.map((turn) => folded(turn.user === undefined ? "Earlier turn" : "User message", said(turn))),
    d.warnings.map((warning) => el("p", { class: "notice wait" }, warning))),
  "run.resumed": (t) => t.note("Went on"),
  "attempt.started": (t, d) => t.attempt(d.attempt),
  "iteration.started": (t, d) => t.open(d.iteration),
  "model.responded": (t, d) => t.answered(d),
  "tool_call.started": (t, d) =>
    t.settle(d.call_id, "running", { facts: [`Gate: ${d.decision}`, d.reason, `effect: ${d.effect}`] }),
  "tool_call.completed": (t, d) => t.settle(d.call_id, d.failure ? "failed" : "succeeded", {
    took: d.target === "tool" ? d.duration_ms : undefined,
    facts: [d.failure && words(d.failure), d.cached && "from cache"],
    result: d.content,
  }),
  "tool_call.blocked": (t, d) =>
    t.settle(d.call_id, d.decision, { facts: [`Gate: ${d.decision} by ${d.rule}`, d.reason], result: d.content }),
  "tool_call.awaiting_client": (t, d) => t.settle(d.call_id, "awaiting_client", {}),
  "tool_call.awaiting_child": (t, d) => t.settle(d.call_id, "awaiting_child", { facts: [d.reason] }),
  "approval.requested": (t, d) => t.settle(d.call_id, "escalated", { facts: [d.reason] }),
  "approval.resolved": (t, d) => t.note(`${words(d.resolution)}${d.decided_by ? ` by ${d.decided_by}` : ""}${d.reason ? `: ${d.reason}` : ""}`),
  "scan.warned": (t, d) => t.note(
    `${d.withheld ? "Withheld" : "Suspicious"}: ${words(d.source)} ${d.tool ?? d.pointer ?? ""}`.trim(),
    el("p", { class: "notice wait" }, `Looks like a prompt injection: ${d.kinds.map(words).join(", ")}`,
      d.hidden_in && `; hidden in ${d.hidden_in.map(words).join(", ")}`)),
  "labels.changed": (t, d) => t.note(`Has read what is ${d.labels.join(" and ")}${d.tool ? `: ${d.tool}` : ""}`),
  "output.proposed": (t, d) => t.note("Output proposed", d.problem && el("p", {}, d.problem), folded("Proposal", d.output)),
  "validation.failed": (t, d) => t.step("note bad", el("span", {}, "Validation failed"), wrong(d.errors), folded("Sent to the model", d.feedback)),
  "decision.extraction_failed": (t, d) => t.undecided("No decision found", d),
  "decision.validation_failed": (t, d) => t.undecided("Decision not valid", d),
  "confirmation.requested": (t, d) => t.note("Asked to confirm", folded("Prompt", d.prompt)),
  "context.compacted": (t, d) => t.note(
    `Conversation made smaller: ${count(d.tokens_before)} to ${count(d.tokens_after)} tokens, ${d.cleared.length} results cleared`,
    d.summary && folded(`Summary of ${d.summary.turns} turns`, d.summary.text)),
  "run.cancel_requested": (t, d) => t.note(`Cancel requested${d.reason ? `: ${d.reason}` : ""}`),
  "run.completed": (t, d) => t.end("completed", d),
  "run.failed": (t, d) => t.end("failed", d),
  "run.cancelled": (t, d) => t.end("cancelled", d),
};
