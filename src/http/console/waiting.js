// What a run waits for, with forms to answer if the key permits it. The forms are kept while the run is refreshed, so that
// typed text is not lost.

import { get, request } from "./api.js";
import { announce, el, notice, pre, time, visible, words } from "./dom.js";

const QUESTIONS = {
  approval: { label: "Reason, if you like", answers: [["Approve", "approve", "reason"], ["Deny", "deny", "reason", "danger"]] },
  escalation: { label: "Reason, if you like", answers: [["Go on", "approve", "reason"], ["End the run", "deny", "reason", "danger"]] },
  review: {
    label: "What it brought, if you know",
    answers: [["It happened", "resolve", "result", "", { outcome: "happened" }],
      ["It did not happen: execute it now", "resolve", null, "danger", { outcome: "did_not_happen" }]],
  },
};

export class Waiting {
  /** `answered` is called with the run as it is after an answer. */
  constructor(path, answered) {
    this.path = path;
    this.answered = answered;
    this.shown = "";
    this.node = el("section", { class: "notice wait", "aria-label": "Waiting for", hidden: true });
  }

  show(pending) {
    const ids = pending.map((call) => `${call.kind} ${call.call_id}`).join();
    if (ids === this.shown) return;
    this.shown = ids;
    this.node.hidden = pending.length === 0;
    this.node.replaceChildren(...pending.map((call) => this.about(call)));
  }

  about(call) {
    const form = el("form", { hidden: true });
    const question = QUESTIONS[call.kind];
    if (question) {
      this.allowed ??= get("approvals?limit=1").then(() => true, () => false);
      this.allowed.then((may) => may && this.ask(form, call, question));
    }
    return el("div", { "data-call": call.call_id },
      el("p", {}, el("strong", {}, `Waits for ${words(call.kind)}: `), call.tool && el("code", {}, visible(call.tool)), " ", visible(call.reason),
        call.expires_at && [" Until ", time(call.expires_at), "."]),
      call.tool && pre(call.arguments, `Arguments of ${call.tool}`), form);
  }

  ask(form, call, { label, answers }) {
    const id = `answer-${call.call_id}`;
    const said = el("input", { id, maxlength: 1000, autocomplete: "off" });
    const trouble = el("div");
    const send = async (verb, field, fixed) => {
      const text = said.value.trim();
      const body = { ...fixed, ...(field && text && { [field]: text }) };
      try {
        const run = await (await request("POST", `runs/${call.run_id}/tool-calls/${call.call_id}/${verb}`, { body })).json();
        announce("Answered");
        await this.answered(this.path.endsWith(run.run_id) ? run : await get(this.path));
      } catch (problem) {
        trouble.replaceChildren(notice(problem));
      }
    };
    const buttons = answers.map(([text, verb, field, kind, fixed]) =>
      el("button", { type: "button", class: kind, onclick: () => send(verb, field, fixed) }, text));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.append(el("label", { for: id }, label), said, trouble, el("p", { class: "buttons" }, buttons));
    form.hidden = false;
  }
}
