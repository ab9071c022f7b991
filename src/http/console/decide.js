// The form that answers what a run waits for. It answers only the question for which it was made.

import { get, part, post } from "./api.js";
import { compared } from "./diff.js";
import { announce, el, notice } from "./dom.js";
import { escaped, pretty, visible } from "./format.js";
import { parse } from "./json.js";
import { preview } from "./preview.js";

const QUESTIONS = {
  approval: {
    label: "Reason (optional)", isEditable: true,
    answers: [["Approve", "approve", "reason"], ["Deny", "deny", "reason", "danger"]],
  },
  escalation: { label: "Reason (optional)", answers: [["Continue", "approve", "reason"], ["End the run", "deny", "reason", "danger"]] },
  review: {
    label: "Its result, if you know it",
    answers: [["It happened", "resolve", "result", "", { outcome: "happened" }],
      ["It did not happen: execute it now", "resolve", null, "danger", { outcome: "did_not_happen" }]],
  },
  client: {
    label: "What the tool answers", isOpen: true,
    answers: [["Send the result", "result", "content"], ["It failed", "result", "content", "danger", { is_error: true }]],
  },
};

/** Milliseconds before a failed check of permission is repeated. */
const RETRY_PAUSE = 2000;

/** Milliseconds after the last keystroke before the effect of the arguments is shown, for which the file is read. */
const TYPING_PAUSE = 250;

/** Whether the key may decide; known once it is answered, until another person signs in. */
let allowed = null;
const isAllowed = () => get("approvals?limit=1").then(() => true, (problem) => {
  if (problem.status === 403) return false;
  throw problem;
});
async function mayDecide(signal) {
  while (!signal.aborted) {
    try {
      return await (allowed ??= isAllowed());
    } catch {
      allowed = null;
      await new Promise((resolve) => setTimeout(resolve, RETRY_PAUSE));
    }
  }
  return false;
}
export const forget = () => {
  allowed = null;
};

/** A form, hidden where there is nothing to answer or the key does not permit it; `onAnswered` gets the run after it. */
export function decision(call, onAnswered, signal) {
  const form = el("form", { class: "decision", hidden: true, onsubmit: (event) => event.preventDefault() });
  const question = QUESTIONS[call.kind];
  if (call.input) askForInput(form, call, onAnswered);
  else if (question?.isOpen) ask(form, call, question, onAnswered, signal);
  else if (question) mayDecide(signal).then((may) => may && ask(form, call, question, onAnswered, signal));
  return form;
}

function ask(form, call, { label, answers, isEditable, isOpen }, onAnswered, signal) {
  const id = `answer-${call.call_id}`;
  const input = isOpen ? el("textarea", { id, rows: 3 }) : el("input", { id, maxlength: 1000, autocomplete: "off" });
  const errorBox = el("div", { role: "alert" });
  const editor = isEditable && new ArgumentsEditor(call, signal);
  const send = async (verb, field, fixed) => {
    errorBox.replaceChildren();
    const text = input.value.trim();
    const body = { ...fixed, ...(!isOpen && { seq: call.seq }), ...(field && (text || field === "content") && { [field]: text }) };
    try {
      const edited = verb === "approve" && editor?.value();
      if (edited) body.arguments = edited;
      const run = await post(`runs/${part(call.run_id)}/tool-calls/${part(call.call_id)}/${verb}`, body);
      announce("Answered");
      await onAnswered(run);
    } catch (problem) {
      errorBox.replaceChildren(notice(problem), ...(problem.body?.errors ?? []).slice(0, 10).map((e) => el("p", {}, visible(`${e.pointer} ${e.message}`))));
    }
  };
  const buttons = answers.map(([text, verb, field, kind, fixed]) =>
    el("button", { type: "button", class: kind, onclick: () => send(verb, field, fixed) }, text));
  form.append(el("label", { for: id }, label), input, errorBox, el("p", { class: "buttons" }, buttons, editor && editor.button), ...(editor ? [editor.node] : []));
  form.hidden = false;
}

/** What was entered for a form. */
function entered({ name, text }) {
  try {
    return parse(text.value);
  } catch (problem) {
    throw new Error(`The answer to ${JSON.stringify(name)} is not JSON: ${problem.message}`);
  }
}

/** The forms of a tool that asks for input, each filled in as JSON. */
function askForInput(form, call, onAnswered) {
  const errorBox = el("div", { role: "alert" });
  const fields = Object.entries(call.input.requests).map(([name, { message, display }], place) => {
    const id = `input-${call.call_id}-${place}`;
    const text = el("textarea", { id, rows: 4, spellcheck: "false" });
    text.value = "{}";
    const node = el("div", {}, el("p", {}, visible(`${call.input.server} asks: ${message}`)),
      el("label", { for: id }, "Answer, as JSON of this schema"), el("pre", {}, visible(display)), text);
    return { name, text, node };
  });
  const send = async (action) => {
    errorBox.replaceChildren();
    try {
      const given = (field) => [field.name, action === "accept" ? { action, content: entered(field) } : { action }];
      const body = { round: call.input.round, responses: Object.fromEntries(fields.map(given)) };
      const run = await post(`runs/${part(call.run_id)}/tool-calls/${part(call.call_id)}/result`, body);
      announce("Answered");
      await onAnswered(run);
    } catch (problem) {
      errorBox.replaceChildren(notice(problem), ...(problem.body?.errors ?? []).slice(0, 10).map((e) => el("p", {}, visible(`${e.pointer} ${e.message}`))));
    }
  };
  const button = ([text, action, kind]) => el("button", { type: "button", class: kind, onclick: () => send(action) }, text);
  const buttons = [["Send the answers", "accept", ""], ["Decline", "decline", "danger"], ["Dismiss", "cancel", ""]].map(button);
  form.append(...fields.map(({ node }) => node), errorBox, el("p", { class: "buttons" }, buttons));
  form.hidden = false;
}

/** Arguments as a text that can be edited, in which nothing is hidden either. */
const editable = (value) => escaped(pretty(value));

/** Other arguments than the model's, as JSON, with what is changed and what they would do. */
class ArgumentsEditor {
  constructor(call, signal) {
    this.before = editable(call.arguments);
    this.call = call;
    this.signal = signal;
    this.timer = null;
    const id = `arguments-${call.call_id}`;
    this.text = el("textarea", { id, rows: 10, spellcheck: "false", "aria-describedby": `${id}-error`, oninput: () => this.look() });
    this.error = el("small", { id: `${id}-error`, class: "error" });
    this.shown = el("div");
    this.node = el("div", { class: "editor", hidden: true },
      el("label", { for: id }, "Arguments to approve instead, as JSON"), this.text, this.error, this.shown);
    this.button = el("button", { type: "button", "aria-expanded": "false", onclick: () => this.toggle() }, "Edit arguments");
  }

  toggle() {
    this.node.hidden = !this.node.hidden;
    this.button.setAttribute("aria-expanded", !this.node.hidden);
    this.button.textContent = this.node.hidden ? "Edit arguments" : "Keep the arguments";
    this.text.value = this.before;
    this.look();
    if (!this.node.hidden) this.text.focus();
  }

  parsed() {
    const value = parse(this.text.value);
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("It is not an object.");
    return value;
  }

  look() {
    clearTimeout(this.timer);
    try {
      const value = this.parsed();
      const after = editable(value);
      this.complain(null);
      if (after === this.before) this.shown.replaceChildren();
      else this.timer = setTimeout(() => this.show(value, after), TYPING_PAUSE);
    } catch (problem) {
      this.complain(`This is not a JSON object: ${problem.message}`);
    }
  }

  show(value, after) {
    this.shown.replaceChildren(el("p", { class: "sub" }, "Changed arguments"), compared(this.before, after),
      preview(this.call, value, this.signal));
  }

  complain(message) {
    this.error.textContent = message ?? "";
    this.text.setAttribute("aria-invalid", message !== null);
  }

  /** The edited arguments; nothing where they are as they were. */
  value() {
    if (this.node.hidden) return null;
    try {
      const value = this.parsed();
      return editable(value) === this.before ? null : value;
    } catch (problem) {
      this.text.focus();
      throw new Error(`The arguments are not a JSON object: ${problem.message}`);
    }
  }
}
