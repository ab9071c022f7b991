// Where the time went: model calls, tool calls, waits and child runs on one axis. A lane is one drawing whatever the number
// of its bars, so that long runs stay small pages.

import { el, status, svg } from "./dom.js";
import { brief, duration, money, short, visible } from "./format.js";
import { covered, lanes } from "./spans.js";

/** The width of a drawing in its own units, and the least width of a bar. */
const WIDTH = 1000;
const MIN_BAR = 1.5;
const HEIGHT = 12;

export class Waterfall {
  /** `reveal` shows a row of the timeline. */
  constructor(reveal) {
    this.reveal = reveal;
    this.caption = el("p", { class: "meta", "aria-hidden": "true" });
    this.rows = el("div", { class: "rows" });
    this.node = el("section", { class: "waterfall card", "aria-label": "Where the time went", hidden: true },
      el("h2", {}, "Where the time went"), this.rows, this.caption);
  }

  /** `tree` are the children as children.js gives them. */
  show(spans, tree) {
    if (spans.from === null) return;
    const ends = tree.map((child) => child.to ?? 0);
    this.from = spans.from;
    this.to = Math.max(spans.now(), ...ends, spans.from + 1);
    const now = spans.now();
    const tools = lanes(spans.tools, now);
    const focused = [...this.rows.querySelectorAll("a")].indexOf(document.activeElement);
    this.rows.replaceChildren(
      this.axis(),
      this.row("Model", [[spans.model, "model"]], sum(spans.model, now), now),
      ...tools.map((lane, index) => this.row(index ? "" : "Tools", [[lane, "tool"]], index ? "" : sum(spans.tools, now), now)),
      ...(spans.waits.length ? [this.row("Waiting", [[spans.waits, "wait"]], sum(spans.waits, now), now)] : []),
      ...tree.map((child) => this.child(child, now)));
    if (focused >= 0) this.rows.querySelectorAll("a")[focused]?.focus({ preventScroll: true });
    this.node.hidden = false;
  }

  axis() {
    const whole = this.to - this.from;
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => {
      const tick = el("span", {}, duration(whole * part));
      tick.style.left = `${part * 100}%`;
      return tick;
    });
    return el("div", { class: "lane axis", "aria-hidden": "true" }, el("span"), el("div", { class: "ticks" }, ticks), el("span"));
  }

  row(label, layers, amount, now, depth = 0) {
    const name = el("span", { class: "name" }, label);
    if (depth) name.style.paddingLeft = `${Math.min(depth, 5)}rem`;
    const bars = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${layers.reduce((count, [spans]) => count + spans.length, 0)} bars` });
    layers.forEach(([spans, tone, top = 0, bottom = HEIGHT]) => {
      for (const bad of [false, true]) {
        const path = this.path(spans.filter((span) => (span.tone === "bad") === bad), now, top, bottom);
        if (path) bars.append(svg("path", { class: bad ? "bad" : tone, d: path }));
      }
    });
    const all = layers.flatMap(([spans]) => spans);
    bars.addEventListener("mousemove", (event) => {
      const span = this.near(all, bars, event, now);
      this.caption.textContent = span ? `${visible(span.label)} · ${duration((span.to ?? now) - span.from)} · from +${duration(span.from - this.from)}` : "";
    });
    bars.addEventListener("click", (event) => {
      const span = this.near(all, bars, event, now);
      if (span?.row !== undefined) this.reveal(span.row);
    });
    return el("div", { class: "lane" }, name, bars, el("span", { class: "amount" }, amount));
  }

  child({ run, depth, from, to, model, tools }, now) {
    const name = [el("span", { "aria-hidden": "true" }, "↳ "), el("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, `${visible(run.agent)} ${short(run.run_id)}`), " ", status(run.status)];
    const whole = { from, to: to ?? now, label: `${run.agent} ${short(run.run_id)}` };
    const amount = [run.latency_ms !== null && duration(run.latency_ms), `${brief(run.tokens_used)} tokens`,
      run.usage.cost_usd !== null && money(run.usage.cost_usd)].filter(Boolean).join(" · ");
    const row = this.row(name, [[[whole], "whole"], [model, "model", 1, HEIGHT / 2], [tools, "tool", HEIGHT / 2, HEIGHT - 1]], amount, now, depth);
    row.classList.add("child");
    return row;
  }

  /** All bars as one path; those that touch become one. */
  path(spans, now, top, bottom) {
    const scale = WIDTH / (this.to - this.from);
    const sorted = [...spans].sort((a, b) => a.from - b.from);
    const parts = [];
    let left = null;
    let right = null;
    const flush = () => left !== null && parts.push(`M${left.toFixed(2)} ${top}H${right.toFixed(2)}V${bottom}H${left.toFixed(2)}z`);
    for (const span of sorted) {
      const start = (span.from - this.from) * scale;
      const end = Math.max(start + MIN_BAR, ((span.to ?? now) - this.from) * scale - 0.4);
      if (left !== null && start <= right + 0.3) {
        right = Math.max(right, end);
      } else {
        flush();
        left = start;
        right = end;
      }
    }
    flush();
    return parts.join("");
  }

  near(spans, bars, event, now) {
    const box = bars.getBoundingClientRect();
    const at = this.from + ((event.clientX - box.left) / box.width) * (this.to - this.from);
    const slack = ((this.to - this.from) / box.width) * 4;
    let best = null;
    for (const span of spans) {
      const off = Math.max(span.from - at, at - (span.to ?? now), 0);
      if (off <= slack && (!best || off <= best.off)) best = { span, off };
    }
    return best?.span;
  }
}

const sum = (spans, now) => duration(covered(spans, now));
