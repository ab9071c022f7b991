// When things began and ended, from the journal: model calls, tool calls, waits; and what each model call consumed.

import { serviceNow } from "./api.js";

export class Spans {
  constructor() {
    this.model = [];
    this.tools = [];
    this.waits = [];
    /** One entry for each model call: tokens, cost, and whether the conversation was made smaller before it. */
    this.usage = [];
    this.from = null;
    this.to = null;
    this.ended = false;
    this.open = new Map();
    this.compacted = false;
  }

  /** `row` is the row of the story that shows the event. */
  add(event, row) {
    const at = Date.parse(event.at);
    this.from ??= at;
    this.to = Math.max(this.to ?? at, at);
    HANDLERS[event.type]?.(this, event.data, at, row);
  }

  begin(list, key, at, label, row) {
    const span = { from: at, to: null, label, row };
    this.finish(key, at);
    list.push(span);
    this.open.set(key, span);
  }

  finish(key, at, tone) {
    const span = this.open.get(key);
    if (!span) return;
    span.to = at;
    if (tone) span.tone = tone;
    this.open.delete(key);
  }

  /** The end of what is known: of a run that goes on, now. */
  now() {
    return this.ended ? this.to : Math.max(this.to, serviceNow());
  }
}

const wait = (label) => (spans, d, at, row) => spans.begin(spans.waits, `wait ${d.call_id}`, at, label, row);

const HANDLERS = {
  "run.queued": (spans, d, at, row) => spans.begin(spans.waits, "queue", at, "queued", row),
  "run.started": (spans, d, at) => spans.finish("queue", at),
  "iteration.started": (spans, d, at, row) => spans.begin(spans.model, "model", at, `Iteration ${d.iteration}`, row),
  "context.compacted": (spans) => {
    spans.compacted = true;
  },
  "model.responded": (spans, d, at) => {
    spans.finish("model", at);
    spans.usage.push({ ...d.usage, window: d.window, compacted: spans.compacted });
    spans.compacted = false;
  },
  "tool_call.started": (spans, d, at, row) => spans.begin(spans.tools, d.call_id, at, d.tool, row),
  "tool_call.completed": (spans, d, at) => spans.finish(d.call_id, at, d.failure && "bad"),
  "approval.requested": wait("waits for approval"),
  "tool_call.awaiting_client": wait("waits for the caller"),
  "tool_call.awaiting_child": wait("waits for a child"),
  "approval.resolved": (spans, d, at) => spans.finish(`wait ${d.call_id}`, at),
  "run.completed": (spans, d, at) => end(spans, at),
  "run.failed": (spans, d, at) => end(spans, at, "bad"),
  "run.cancelled": (spans, d, at) => end(spans, at, "bad"),
};

function end(spans, at, tone) {
  spans.ended = true;
  for (const key of [...spans.open.keys()]) spans.finish(key, at, tone);
}

/** Spans that overlap go to lanes of their own; what does not fit goes to the last. */
export function lanes(spans, now, most = 6) {
  const ends = [];
  const found = [];
  for (const span of spans) {
    let lane = ends.findIndex((end) => end <= span.from);
    if (lane < 0) lane = Math.min(ends.length, most - 1);
    ends[lane] = Math.max(ends[lane] ?? 0, span.to ?? now);
    (found[lane] ??= []).push(span);
  }
  return found;
}

/** Milliseconds in which there was at least one of them: calls that wait together wait once. */
export function covered(spans, now) {
  let sum = 0;
  let until = -Infinity;
  for (const { from, to } of [...spans].sort((a, b) => a.from - b.from)) {
    const end = to ?? now;
    sum += Math.max(0, end - Math.max(from, until));
    until = Math.max(until, end);
  }
  return sum;
}
