// What there is to work with: agents and tools.

import { all, part } from "./api.js";
import { el, folded, heading, pre } from "./dom.js";

export async function agents(main, _, signal) {
  heading("Agents");
  const rows = await all("agents", signal);
  main.append(rows.length ? el("ul", { class: "cards" }, rows.map(agentCard)) : el("p", {}, "There are no agents."));
}

function agentCard(agent) {
  const path = part(agent.name);
  return el("li", { class: "card" },
    el("h2", {}, el("a", { href: `#/agents/${path}` }, agent.name), agent.version !== "0.0.0" && el("small", {}, agent.version)),
    el("p", {}, agent.description),
    el("p", { class: "meta" }, agent.model, agent.tools.map((tool) => el("code", {}, tool))),
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
    el("h2", {}, tool.name, el("small", {}, tool.source)),
    el("p", { class: "said" }, tool.description),
    el("p", { class: "meta" }, el("span", {}, `Effect: ${tool.effect}`),
      el("span", {}, tool.allowed ? "Your runs may call it" : "Your key does not let runs call it")),
    folded("Arguments", () => pre(tool.input_schema, `Schema of ${tool.name}`)));
}
