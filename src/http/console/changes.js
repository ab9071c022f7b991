// The files that a run changed, in order, each with its difference.

import { all, part } from "./api.js";
import { changed } from "./diff.js";
import { el } from "./dom.js";
import { plural } from "./format.js";

/** How many are open at first. */
const OPEN = 3;
const MAX_CHANGES = 200;

export class Changes {
  /** `reveal` shows the call that made a change in the timeline. */
  constructor(run, reveal, signal) {
    this.run = run;
    this.reveal = reveal;
    this.signal = signal;
    this.list = el("div");
    this.title = el("h2", {}, "Changed files");
    this.node = el("section", { class: "changes card", "aria-label": "Changed files", hidden: true }, this.title, this.list);
    this.shown = 0;
    this.timer = null;
    signal.addEventListener("abort", () => clearTimeout(this.timer));
  }

  /** Loads soon, once for many calls that end together. */
  scheduleLoad() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.load().catch(() => {});
    }, 500);
  }

  async load() {
    const rows = await all(`runs/${part(this.run)}/changes?limit=${MAX_CHANGES}`, this.signal, MAX_CHANGES);
    if (!rows.length) return;
    this.node.hidden = false;
    this.title.textContent = `Changed files: ${plural(rows.length, "change")}`;
    for (const row of rows.slice(this.shown)) {
      const show = el("button", { type: "button", class: "more", onclick: () => this.reveal(row.call_id) }, "Show the call");
      this.list.append(changed(row, this.shown < OPEN, show));
      this.shown += 1;
    }
  }
}
