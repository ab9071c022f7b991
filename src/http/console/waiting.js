// What a run waits for, at the top of its page.

import { get } from "./api.js";
import { PendingCalls } from "./pending-calls.js";
import { decision } from "./decide.js";
import { el, time } from "./dom.js";
import { visible, words } from "./format.js";
import { argumentsWithPreview } from "./preview.js";

export class Waiting {
  /** `answered` is called with the run as it is after an answer. */
  constructor(path, answered, signal) {
    this.path = path;
    this.answered = answered;
    this.signal = signal;
    this.node = el("section", { class: "notice wait", "aria-label": "Waiting for", hidden: true });
    this.calls = new PendingCalls(this.node, (call) => this.about(call));
  }

  /** Shows these calls, and returns whether one of them is new. */
  show(pending) {
    this.node.hidden = pending.length === 0;
    return this.calls.show(pending);
  }

  about(call) {
    const done = async (run) => this.answered(this.path.endsWith(run.run_id) ? run : await get(this.path));
    return el("div", { "data-call": call.call_id },
      el("p", {}, el("strong", {}, `Waits for ${words(call.kind)}: `), call.tool && el("code", {}, visible(call.tool)), " ", visible(call.reason),
        call.expires_at && [" Until ", time(call.expires_at), "."]),
      call.tool && argumentsWithPreview(call, this.signal), decision(call, done, this.signal));
  }
}
