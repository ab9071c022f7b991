// A list of the calls that wait for an answer. Each element is created once, so typed text survives a refresh of the page. A
// call that is asked about again gets a new element, since an answer is for what the person saw.

import { announce } from "./dom.js";

/** Identifies a question: one call can ask several, one after the other. */
const questionKey = ({ call_id: call, seq }) => `${call} ${seq}`;

export class PendingCalls {
  /** `list` is the element that holds the elements which `make` creates for calls. */
  constructor(list, make) {
    this.list = list;
    this.make = make;
    this.shown = new Map();
  }

  /** Shows these calls, and returns whether one of them is new. */
  show(calls) {
    const pending = new Set(calls.map(questionKey));
    const gone = new Map();
    for (const [key, { call, node }] of this.shown) {
      if (pending.has(key)) continue;
      gone.set(call, node);
      this.shown.delete(key);
    }
    const added = calls.filter((call) => !this.shown.has(questionKey(call)));
    for (const call of added) {
      const node = this.make(call);
      const before = gone.get(call.call_id);
      gone.delete(call.call_id);
      if (before) replace(before, node);
      else this.list.append(node);
      this.shown.set(questionKey(call), { call: call.call_id, node });
    }
    for (const node of gone.values()) node.remove();
    return added.length > 0;
  }
}

/** Keeps the focus of a person who was about to answer. */
function replace(before, node) {
  const isFocused = before.contains(document.activeElement);
  before.replaceWith(node);
  announce("Asked again");
  if (!isFocused) return;
  node.tabIndex = -1;
  node.focus({ preventScroll: true });
}
