// What there is to work with: agents and tools.

import { all, part } from "./api.js";
import { el, folded, heading, pre } from "./dom.js";
import { visible } from "./format.js";

export async function agents(main, _, signal) {
  heading("Agents");
  const rows = await all("agents", signal);
  main.append(rows.length ? el("ul", { class: "cards" }, rows.map(agentCard)) : el("p", {}, "There are no agents."));
}

function agentCard(agent) {
  const path = part(agent.name);
  return el("li", { class: "card" },
    el("h2", {}, el("a", { href: `#/agents/${path}` }, visible(agent.name)), agent.version !== "0.0.0" && el("small", {}, visible(agent.version))),
    el("p", {}, visible(agent.description)),
    el("p", { class: "meta" }, visible(agent.model), agent.tools.map((tool) => el("code", {}, visible(tool)))),
    el("p", {}, el("a", { href: `#/agents/${path}` }, "Invoke"), " · ",
      el("a", { href: `#/runs?agent=${path}` }, "Runs")));
}

export async function tools(main, _, signal) {
  heading("Tools");
  const rows = await all("tools", signal);
  main.append(rows.length ? el("ul", { class: "cards wide" }, rows.map(toolCard)) : el("p", {}, "There are no tools."));
}

function toolCard(tool) {
  return el("li", { class: "card" },
    el("h2", {}, visible(tool.name), el("small", {}, visible(tool.source))),
    el("p", { class: "said" }, visible(tool.description)),
    el("p", { class: "meta" }, el("span", {}, `Effect: ${tool.effect}`),
      el("span", {}, tool.allowed ? "Your runs may call it" : "Your key does not let runs call it")),
    folded("Arguments", () => pre(tool.input_schema, `Schema of ${visible(tool.name)}`)));
}
