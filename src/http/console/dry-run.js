// What a run would be given, without starting one.

import { el, folded, pre } from "./dom.js";
import { visible, words } from "./format.js";
import { Exact } from "./json.js";

export function dryRun(answer) {
  const max_iterations = Math.min(answer.limits.max_iterations, answer.budget.max_iterations);
  const limits = Object.entries({ ...answer.budget, ...answer.limits, max_iterations })
    .filter(([, value]) => value !== null && (typeof value !== "object" || value instanceof Exact))
    .map(([name, value]) => el("span", {}, `${words(name)} ${value}`));
  return el("section", { class: "result", "aria-label": "Dry run" },
    el("h3", { tabindex: -1 }, "Dry run: nothing was started, no model was called"),
    answer.warnings.map((warning) => el("p", { class: "notice wait" }, visible(warning))),
    el("p", { class: "meta" }, el("span", {}, visible(`models: ${answer.models.join(", ")}`)), el("span", {}, `autonomy: ${answer.policy.governance.autonomy}`)),
    el("p", { class: "meta" }, limits),
    el("h4", {}, `Messages of the first model call`),
    answer.messages.map((message, index) =>
      folded(`${message.role}${index === answer.messages.length - 1 ? " (last)" : ""}`, () => pre(message.content, message.role), index === answer.messages.length - 1)),
    el("h4", {}, "Tools that the model is offered"),
    answer.tools.length ? answer.tools.map((tool) => folded(el("code", {}, visible(tool.name)), () => pre(tool.input_schema, visible(tool.name)))) : el("p", {}, "None"),
    folded("Policy", () => pre(answer.policy, "Policy")));
}
