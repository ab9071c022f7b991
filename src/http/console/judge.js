// A call that is not made: what an agent's gate would decide on it, and what the call would do. Nothing is executed.

import { all, get, part, post } from "./api.js";
import { announce, el, heading, notice, pre, status } from "./dom.js";
import { makeField } from "./fields.js";
import { visible } from "./format.js";

const LABELS = [["untrusted", "something that an outsider can write"], ["private", "something that must not leave"]];

/** Whether a name in a definition, which may have `*` in it, means a tool. */
const means = (pattern, name) =>
  new RegExp(`^${pattern.split("*").map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`).test(name);

export async function judge(main, name, signal) {
  heading(`Try the gate of ${visible(name)}`, el("a", { href: `#/agents/${part(name)}` }, "Invoke"));
  const [agent, tools] = await Promise.all([get(`agents/${part(name)}`, signal), all("tools", signal)]);
  const offered = tools.filter((tool) => agent.tools.some((pattern) => means(pattern, tool.name)));
  main.append(el("p", { class: "notice" }, "Calls are judged here, not executed: the tool only tells what it would do, in a workspace with empty files, or none."));
  if (!offered.length) return main.append(el("p", {}, "This agent has no tools that can be judged without a run."));
  main.append(new Judge(name, offered, signal).node);
}

class Judge {
  constructor(agent, tools, signal) {
    this.agent = agent;
    this.tools = tools;
    this.signal = signal;
    this.place = el("div");
    this.about = el("p", { class: "meta said" });
    this.result = el("div", { role: "status" });
    this.select = el("select", { id: "judged-tool", "data-filter": true, onchange: () => this.choose() },
      tools.map((tool, index) => el("option", { value: index }, visible(tool.name))));
    const labels = LABELS.map(([label, means]) => el("label", { class: "choice" }, el("input", { type: "checkbox", name: "labels", value: label }), `${label}: ${means}`));
    this.files = makeField("judged-files", "Files that are there already", { type: "array", items: { type: "string" } });
    this.node = el("form", { class: "card invoke judge", novalidate: true, onsubmit: (event) => (event.preventDefault(), this.ask()) },
      el("div", { class: "field" }, el("label", { for: "judged-tool" }, "Tool"), this.select, this.about), this.place, this.files.node,
      el("fieldset", {}, el("legend", {}, "What the run has read"), labels),
      el("p", { class: "buttons start" }, el("button", { class: "main" }, "Judge")), this.result);
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

function answer({ decision, rule, reason, actions }) {
  return [
    el("section", { class: "result", "aria-label": "What the gate decides" },
      el("p", {}, status(decision), " ", MEANING[decision] ?? "", " Judged, not executed."),
      el("p", { class: "meta" }, el("span", {}, rule === "none" ? "No rule objects." : `Rule: ${visible(rule)}`)),
      reason && el("p", {}, visible(reason)),
      actions.length ? [el("p", { class: "sub" }, "What the call would do"), pre(actions, "Actions")] : el("p", { class: "meta" }, "It would touch nothing that rules are about.")),
  ];
}
