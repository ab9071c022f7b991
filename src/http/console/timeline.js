// The story of a run on its page: drawn as events come, followed to its end until the reader scrolls up.

import { el } from "./dom.js";
import { drawn } from "./rows.js";
import { Story } from "./story.js";
import { VirtualList } from "./virtual.js";

/** Pixels from the end of the page that count as the end. */
const END_PIXELS = 60;
/** From this number of rows on, an ended run has a button that shows its end. */
const BUTTON_ROWS = 60;

export class Timeline {
  constructor(signal) {
    this.story = new Story();
    this.list = new VirtualList((row) => drawn(row), "Timeline");
    this.list.watch(signal);
    this.list.onshown = () => this.updateButton();
    this.isLive = false;
    /** Whether the reader wants to see the end, which may not have arrived yet. */
    this.wantsEnd = false;
    this.last = 0;
    this.button = el("button", { type: "button", class: "follow", hidden: true, onclick: () => this.follow(true) });
    this.node = el("div", {}, this.list.node, this.button);
    addEventListener("scroll", () => this.onScroll(), { signal, passive: true });
    for (const kind of ["wheel", "touchmove"]) addEventListener(kind, (event) => this.onPull(event), { signal, passive: true });
  }

  /** The next event. */
  add(event) {
    this.story.add(event);
    this.redraw();
  }

  /** Pieces of an answer may be missing from here on. */
  interrupt() {
    this.story.interrupt();
  }

  redraw() {
    this.list.set(this.story.rows, this.story.changed);
    this.story.changed.clear();
  }

  /** The index of the row that shows an event. */
  rowOf({ data }) {
    return this.story.calls.get(data?.call_id)?.index ?? this.story.rows.length - 1;
  }

  reveal(index) {
    this.list.keepsEnd = false;
    this.list.reveal(index);
  }

  revealCall(id) {
    const row = this.story.calls.get(id);
    if (row) this.reveal(row.index);
  }

  /** Sets whether more events are to come. */
  live(isLive) {
    if (isLive && !this.isLive) this.list.keepsEnd = true;
    this.isLive = isLive;
    if (!isLive) this.list.keepsEnd = false;
    if (!isLive && this.wantsEnd) this.list.reveal(this.story.rows.length - 1);
    this.updateButton();
  }

  /** Stops following the end; returns whether it was followed until now. */
  pause() {
    const wasFollowing = this.list.keepsEnd;
    this.list.keepsEnd = false;
    this.updateButton();
    return wasFollowing;
  }

  follow(isWanted) {
    this.list.keepsEnd = isWanted && this.isLive;
    this.wantsEnd = isWanted;
    if (this.list.keepsEnd) this.list.toEnd();
    else if (isWanted) this.list.reveal(this.story.rows.length - 1);
    this.list.scheduleDraw();
    this.updateButton();
  }

  onPull(event) {
    this.wantsEnd = false;
    if (event.deltaY < 0 && this.list.keepsEnd && scrollY > 0) this.follow(false);
  }

  onScroll() {
    const below = document.documentElement.scrollHeight - innerHeight - scrollY;
    if (this.isLive && below <= END_PIXELS) this.list.keepsEnd = true;
    else if (scrollY < this.last - 1 && below > END_PIXELS) this.list.keepsEnd = false;
    this.last = scrollY;
    this.updateButton();
  }

  updateButton() {
    const below = document.documentElement.scrollHeight - innerHeight - scrollY;
    const hidden = this.isLive ? this.list.keepsEnd || below <= END_PIXELS : this.story.rows.length < BUTTON_ROWS || below < innerHeight;
    if (this.button.hidden !== hidden) this.button.hidden = hidden;
    const label = this.isLive ? "↓ Follow" : "↓ To the end";
    if (this.button.textContent !== label) this.button.textContent = label;
  }
}
