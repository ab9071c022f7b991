// One call of a tool under an agent's gate: judged, which executes nothing, or called, as a run in which no model is asked.

import { all, get, may, part, post, read, request } from "./api.js";
import { announce, el, heading, notice, pre, status } from "./dom.js";
import { makeField } from "./fields.js";
import { visible, words } from "./format.js";
import { secretWarning, lacksSecret } from "./snippets.js";

const LABELS = [["untrusted", "something that an outsider can write"], ["private", "something that must not leave"]];

/** Whether a name in a definition, which may have `*` in it, means a tool. */
const matches = (pattern, name) =>
  new RegExp(`^${pattern.split("*").map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`).test(name);

/** How long the page waits for a call. After that the call continues, and its run has a page. */
const PREFER_WAIT = "wait=20";

export async function judge(main, name, signal, params = new URLSearchParams()) {
  heading(`Try the gate of ${visible(name)}`, el("a", { href: `#/agents/${part(name)}` }, "Invoke"));
  const from = params.get("from");
  const [agent, tools, earlier] = await Promise.all([
    get(`agents/${part(name)}`, signal), all("tools", signal), from && get(`runs/${part(from)}`, signal),
  ]);
  const offered = tools.filter((tool) => agent.tools.some((pattern) => matches(pattern, tool.name)));
  main.append(el("p", { class: "notice" }, "Judge executes nothing: the tool only says what it would do, in a workspace with empty files, or none. Call executes it, under the same gate, as a run of its own."));
  if (!offered.length) return main.append(el("p", {}, "This agent has no tools that can be judged without a run."));
  const form = new Judge(agent, offered, signal);
  if (earlier) form.fill(earlier);
  if (earlier && lacksSecret([earlier.inputs, earlier.overrides])) main.append(secretWarning());
  main.append(form.node);
}

class Judge {
  constructor(agent, tools, signal) {
    this.agent = agent.name;
    const { properties } = agent.inputs ?? {};
    this.inputs = properties && Object.keys(properties).length
      ? makeField("called-inputs", "Inputs of the agent", { ...agent.inputs, title: undefined }, true, agent.inputs) : null;
    this.session = makeField("called-session", "Session", { type: "string", format: "session-id", description: "Joins it, e.g. for its workspace." });
    this.tools = tools;
    this.signal = signal;
    this.place = el("div");
    this.about = el("p", { class: "meta said" });
    this.result = el("div", { role: "status" });
    this.select = el("select", { id: "judged-tool", "data-filter": true, onchange: () => this.choose() },
      tools.map((tool, index) => el("option", { value: index }, visible(tool.name))));
    const labels = LABELS.map(([label, meaning]) => el("label", { class: "choice" }, el("input", { type: "checkbox", name: "labels", value: label }), `${label}: ${meaning}`));
    this.files = makeField("judged-files", "Existing files", { type: "array", items: { type: "string" } });
    this.node = el("form", { class: "card invoke judge", novalidate: true, onsubmit: (event) => (event.preventDefault(), this.ask()) },
      el("div", { class: "field" }, el("label", { for: "judged-tool" }, "Tool"), this.select, this.about), this.place, this.files.node,
      el("fieldset", {}, el("legend", {}, "What the run has read"), labels),
      el("p", { class: "buttons start" }, el("button", { class: "main" }, "Judge")), may("agents:invoke") && this.caller(), this.result);
    this.choose();
  }

  choose() {
    this.tool = this.tools[Number(this.select.value)];
    const { properties } = this.tool.input_schema ?? {};
    this.field = properties && Object.keys(properties).length
      ? makeField("judged-arguments", "Arguments", { ...this.tool.input_schema, title: undefined, description: undefined }, true, this.tool.input_schema)
      : makeField("judged-arguments", "Arguments", { type: "object" });
    this.about.textContent = visible(this.tool.description.split("\n")[0]);
    this.place.replaceChildren(this.field.node);
    this.result.replaceChildren();
  }

  /** The other fields of a call, and its button. */
  caller() {
    this.button = el("button", { type: "button", class: "call", onclick: () => this.call() }, "Call");
    return el("fieldset", {}, el("legend", {}, "For a call that is executed"), this.inputs?.node, this.session.node,
      el("p", { class: "buttons start" }, this.button));
  }

  /** Fills in an earlier call. */
  fill({ overrides, inputs, session_id }) {
    const { tool, arguments: values } = overrides?.call ?? {};
    const index = this.tools.findIndex((known) => known.name === tool);
    if (index < 0) return;
    this.select.value = String(index);
    this.choose();
    this.field.set(values);
    this.inputs?.set(inputs);
    this.session.set(session_id ?? undefined);
  }

  async call() {
    const fields = [this.field, this.inputs, this.session].filter(Boolean);
    for (const field of fields) field.clear();
    const errors = [];
    const body = { tool: this.tool.name, arguments: this.field.read(errors) ?? {} };
    const inputs = this.inputs?.read(errors);
    const session = this.session.read(errors);
    if (errors.length) return errors[0].node.querySelector("input, select, textarea")?.focus();
    if (inputs) body.inputs = inputs;
    if (session) body.session_id = session;
    this.button.disabled = true;
    this.result.replaceChildren(el("p", {}, "Calling …"));
    try {
      const headers = { Prefer: PREFER_WAIT };
      const answer = await request("POST", `agents/${part(this.agent)}/call`, { body, headers, signal: this.signal });
      const run = await read(answer);
      this.result.replaceChildren(called(run));
      announce(`Called: ${run.status}`);
    } catch (problem) {
      if (!this.signal.aborted) this.result.replaceChildren(notice(problem));
    }
    this.button.disabled = false;
  }

  async ask() {
    this.field.clear();
    const errors = [];
    const values = this.field.read(errors) ?? {};
    const files = this.files.read(errors) ?? [];
    if (errors.length) return errors[0].node.querySelector("input, select, textarea")?.focus();
    const labels = new FormData(this.node).getAll("labels");
    try {
      const judged = await post(`agents/${part(this.agent)}/policy/judge`, { tool: this.tool.name, arguments: values, labels, files }, this.signal);
      this.result.replaceChildren(...answer(judged));
      announce(`Judged: ${judged.decision}`);
    } catch (problem) {
      if (!this.signal.aborted) this.result.replaceChildren(notice(problem));
    }
  }
}

const MEANING = {
  allowed: "It would be executed.", warned: "It would be executed, with a warning.",
  escalated: "A person would have to approve it.", blocked: "It would not be executed.",
};

/** The run that a call was: its result where it has one. */
function called(run) {
  const waits = (run.pending ?? []).map((call) => el("p", {}, `Waits for ${words(call.kind)}: `, visible(call.reason)));
  return el("section", { class: "result", "aria-label": "What the call returned" },
    el("p", {}, status(run.status), " ", el("a", { href: `#/runs/${part(run.run_id)}` }, "Open the run")),
    waits, run.error && [el("p", {}, visible(run.error.message)), run.error.context?.result && pre(run.error.context.result, "Result")],
    run.output && pre(run.output, "Result"));
}

function answer({ decision, rule, reason, actions }) {
  return [
    el("section", { class: "result", "aria-label": "What the gate decides" },
      el("p", {}, status(decision), " ", MEANING[decision] ?? "", " Judged, not executed."),
      el("p", { class: "meta" }, el("span", {}, rule === "none" ? "No rule objects." : `Rule: ${visible(rule)}`)),
      reason && el("p", {}, visible(reason)),
      actions.length ? [el("p", { class: "sub" }, "What the call would do"), pre(actions, "Actions")] : el("p", { class: "meta" }, "It would do nothing that the rules cover.")),
  ];
}
