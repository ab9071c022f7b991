// A long list of which only what can be seen is on the page. Rows have the heights that they are drawn with; those that
// were never drawn are estimated. What the reader looks at stays where it is when rows above it change.

import { el } from "./dom.js";

/** Up to this many rows all are drawn, so that the browser's own search finds everything. */
const MAX_WHOLE = 60;
/** Pixels above and below the window that are drawn ahead. */
const DRAWN_AHEAD = 700;
const ESTIMATED_HEIGHT = 44;
/** Milliseconds between two drawings. */
const PAUSE = 60;

export class VirtualList {
  /** `draw` makes a row's `{node, update}`. */
  constructor(draw, label) {
    this.draw = draw;
    this.node = el("ol", { class: "timeline", "aria-label": label });
    this.rows = [];
    this.heights = [];
    this.tops = [0];
    this.valid = 0;
    this.shown = new Map();
    this.stale = new Set();
    this.isScheduled = false;
    this.keepsEnd = false;
    this.isResized = false;
    this.drawnAt = 0;
    this.observer = new ResizeObserver((entries) => {
      if (entries.some(({ target }) => target.isConnected && this.heights[target.dataset.index] !== target.offsetHeight)) {
        this.isResized = true;
        this.scheduleDraw();
      }
    });
  }

  /** Listens to the window until the signal. */
  watch(signal) {
    addEventListener("scroll", () => this.scheduleDraw(true), { signal, passive: true });
    addEventListener("resize", () => this.scheduleDraw(), { signal });
    signal.addEventListener("abort", () => this.observer.disconnect());
  }

  /** Replaces the rows; those in `changed` are drawn again. */
  set(rows, changed) {
    this.rows = rows;
    for (const row of changed) this.stale.add(row);
    this.scheduleDraw();
  }

  /** Schedules one drawing: events come faster than they can be seen. A hidden page draws no frames, so it uses a timer. */
  scheduleDraw(isUrgent = false) {
    if (this.isScheduled) return;
    this.isScheduled = true;
    const go = () => {
      this.isScheduled = false;
      this.show();
      this.drawnAt = performance.now();
    };
    const rest = this.drawnAt + PAUSE - performance.now();
    if (document.hidden) setTimeout(go, 200);
    else if (isUrgent || rest <= 0) requestAnimationFrame(go);
    else setTimeout(() => requestAnimationFrame(go), rest);
  }

  top(index) {
    for (; this.valid < index; this.valid += 1) {
      this.tops[this.valid + 1] = this.tops[this.valid] + (this.heights[this.valid] ?? ESTIMATED_HEIGHT);
    }
    return this.tops[index];
  }

  /** The index of the row at a pixel of the list. */
  at(pixel) {
    this.top(this.rows.length);
    let low = 0;
    let high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tops[middle + 1] <= pixel) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  show() {
    if (!this.node.isConnected) return;
    const before = this.node.getBoundingClientRect().top;
    const anchor = this.keepsEnd ? null : this.anchor(before);
    for (let again = 0; again < 4; again += 1) {
      const isDrawn = this.place(this.range());
      if (!isDrawn && !this.isResized) {
        this.stretch();
        break;
      }
      this.isResized = false;
      if (!this.measure()) break;
    }
    if (this.keepsEnd) {
      this.toEnd();
    } else if (anchor) {
      const moved = this.top(anchor.index) - anchor.top;
      if (Math.abs(moved) >= 1) scrollBy(0, moved);
    }
    this.onshown?.();
  }

  /** The first row that is seen, if the list begins above the window. */
  anchor(top) {
    if (top >= 0 || this.rows.length === 0) return null;
    const index = Math.min(this.at(-top), this.rows.length - 1);
    return { index, top: this.top(index) };
  }

  range() {
    if (this.rows.length <= MAX_WHOLE) return [0, this.rows.length];
    const top = -this.node.getBoundingClientRect().top;
    return this.keepsEnd
      ? [this.at(this.top(this.rows.length) - innerHeight - DRAWN_AHEAD), this.rows.length]
      : [this.at(Math.max(0, top - DRAWN_AHEAD)), Math.min(this.rows.length, this.at(Math.max(0, top + innerHeight + DRAWN_AHEAD)) + 1)];
  }

  /** Puts the rows of a range on the page, in order, and takes away the others unless they have the focus; returns whether any were drawn. */
  place([first, last]) {
    let isDrawn = false;
    for (const [index, { node }] of this.shown) {
      if ((index < first || index >= last) && !node.contains(document.activeElement)) {
        this.observer.unobserve(node);
        node.remove();
        this.shown.delete(index);
      }
    }
    const behind = [...this.shown.keys()].sort((a, b) => a - b);
    for (let index = first; index < last; index += 1) {
      const row = this.rows[index];
      const there = this.shown.get(index);
      const isStale = this.stale.delete(row);
      isDrawn ||= isStale || !there;
      if (there && (!isStale || there.update?.())) continue;
      const made = this.draw(row);
      made.node.dataset.index = index;
      made.node.setAttribute("aria-setsize", this.rows.length);
      made.node.setAttribute("aria-posinset", index + 1);
      if (there) {
        this.replace(there.node, made.node);
      } else {
        const next = behind.find((other) => other > index);
        this.node.insertBefore(made.node, next === undefined ? null : this.shown.get(next).node);
      }
      this.observer.observe(made.node);
      this.shown.set(index, made);
    }
    return isDrawn;
  }

  /** Makes the list as high as all its rows. */
  stretch() {
    const height = `${this.top(this.rows.length)}px`;
    if (this.node.style.height !== height) this.node.style.height = height;
  }

  /** Replaces the element of a row, and keeps the focus at the same place in it. */
  replace(old, node) {
    this.observer.unobserve(old);
    const places = (of) => [...of.querySelectorAll("a, button, summary, pre")];
    const focused = places(old).indexOf(document.activeElement);
    old.replaceWith(node);
    places(node)[focused]?.focus({ preventScroll: true });
  }

  /** Measures the heights of the drawn rows; returns whether one of them has changed. */
  measure() {
    let moved = false;
    for (const [index, { node }] of this.shown) {
      const height = node.offsetHeight;
      if (this.heights[index] === height) continue;
      this.heights[index] = height;
      this.valid = Math.min(this.valid, index);
      moved = true;
    }
    this.stretch();
    for (const [index, { node }] of this.shown) node.style.top = `${this.tops[index]}px`;
    return moved && this.rows.length > MAX_WHOLE;
  }

  /** Brings a row into the window. */
  reveal(index) {
    this.stretch();
    scrollTo(0, scrollY + this.node.getBoundingClientRect().top + this.top(index) - innerHeight / 3);
    this.show();
    this.shown.get(index)?.node.querySelector("summary, h4, h3, .line")?.scrollIntoView({ block: "center" });
  }

  toEnd() {
    scrollTo(0, document.documentElement.scrollHeight);
  }
}
