// What waits for an answer, each made once: typed text is kept while the page is refreshed. A call that is asked about anew
// is made anew, since an answer is for what the person saw.

import { announce } from "./dom.js";

/** What is asked: a call can ask again, in other words. */
const asking = ({ call_id: call, seq }) => `${call} ${seq}`;

export class Asked {
  /** `list` holds what `make` makes of a call. */
  constructor(list, make) {
    this.list = list;
    this.make = make;
    this.shown = new Map();
  }

  /** Whether there is something new to answer. */
  show(calls) {
    const asked = new Set(calls.map(asking));
    const gone = new Map();
    for (const [key, { call, node }] of this.shown) {
      if (asked.has(key)) continue;
      gone.set(call, node);
      this.shown.delete(key);
    }
    const added = calls.filter((call) => !this.shown.has(asking(call)));
    for (const call of added) {
      const node = this.make(call);
      const before = gone.get(call.call_id);
      gone.delete(call.call_id);
      if (before) replace(before, node);
      else this.list.append(node);
      this.shown.set(asking(call), { call: call.call_id, node });
    }
    for (const node of gone.values()) node.remove();
    return added.length > 0;
  }
}

/** A person who was about to answer goes on at what is asked now. */
function replace(before, node) {
  const isFocused = before.contains(document.activeElement);
  before.replaceWith(node);
  announce("Asked anew");
  if (!isFocused) return;
  node.tabIndex = -1;
  node.focus({ preventScroll: true });
}
