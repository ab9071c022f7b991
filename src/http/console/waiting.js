// What a run waits for, at the top of its page.

import { get } from "./api.js";
import { Asked } from "./asked.js";
import { decision } from "./decide.js";
import { el, time } from "./dom.js";
import { visible, words } from "./format.js";
import { argued } from "./preview.js";

export class Waiting {
  /** `answered` is called with the run as it is after an answer. */
  constructor(path, answered, signal) {
    this.path = path;
    this.answered = answered;
    this.signal = signal;
    this.node = el("section", { class: "notice wait", "aria-label": "Waiting for", hidden: true });
    this.asked = new Asked(this.node, (call) => this.about(call));
  }

  /** Whether there is something new to answer. */
  show(pending) {
    this.node.hidden = pending.length === 0;
    return this.asked.show(pending);
  }

  about(call) {
    const done = async (run) => this.answered(this.path.endsWith(run.run_id) ? run : await get(this.path));
    return el("div", { "data-call": call.call_id },
      el("p", {}, el("strong", {}, `Waits for ${words(call.kind)}: `), call.tool && el("code", {}, visible(call.tool)), " ", visible(call.reason),
        call.expires_at && [" Until ", time(call.expires_at), "."]),
      call.tool && argued(call, this.signal), decision(call, done, this.signal));
  }
}
