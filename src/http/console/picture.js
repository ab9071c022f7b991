// The picture of a run beside its timeline: where the time went, with its children, and what its model calls consumed.

import { el } from "./dom.js";
import { Children } from "./children.js";
import { Spans } from "./spans.js";
import { usageCharts } from "./usage.js";
import { Waterfall } from "./waterfall.js";

/** Milliseconds between two drawings, and between two loads of the children. */
const REDRAW = 500;
const CHILDREN_REFRESH = 2500;

export class Picture {
  constructor(run, timeline, signal) {
    this.timeline = timeline;
    this.spans = new Spans();
    this.children = new Children(run, signal);
    this.waterfall = new Waterfall((row) => timeline.reveal(row));
    this.charts = el("section", { class: "charts card", "aria-label": "Consumption", hidden: true });
    this.node = el("div", { class: "picture" }, this.waterfall.node, this.charts);
    this.isStale = false;
    this.limits = null;
    const redraw = setInterval(() => (this.isStale || !this.spans.ended) && !document.hidden && this.draw(), REDRAW);
    const timer = setInterval(() => !this.spans.ended && !document.hidden && this.loadChildren(), CHILDREN_REFRESH);
    /** From now on it is drawn only on demand. */
    this.stop = () => (clearInterval(redraw), clearInterval(timer));
    signal.addEventListener("abort", this.stop);
  }

  add(event) {
    this.spans.add(event, this.timeline.rowOf(event));
    this.isStale = true;
  }

  async loadChildren() {
    try {
      await this.children.load();
      this.children.match(this.timeline.story);
      this.timeline.redraw();
      this.isStale = true;
    } catch {
      // The next attempt may succeed.
    }
  }

  draw() {
    if (this.spans.from === null) return;
    const { usage } = this.spans;
    this.waterfall.show(this.spans, this.children.tree);
    if (this.isStale && usage.length > 0) {
      this.charts.replaceChildren(...usageCharts(usage, this.limits));
      this.charts.hidden = false;
    }
    this.isStale = false;
  }
}
