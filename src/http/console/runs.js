// The history: filters that live in the address, pages, and rows that keep themselves fresh.

import { all, get } from "./api.js";
import { announce, el, heading, notice, status, time } from "./dom.js";
import { count, duration, money, plural, short, visible, words } from "./format.js";
import { stringify } from "./json.js";

/** Milliseconds between two refreshes. */
const REFRESH = 3000;
/** Agents that a part of a name selects, at most. */
const MAX_AGENTS = 8;
const STATUSES = [
  "queued", "running", "awaiting_approval", "awaiting_tool_results", "needs_review", "completed", "failed", "cancelled",
];
const REASONS = [
  "completed", "max_iterations", "validation_failed", "invalid_response", "submit_before_output", "error",
  "tool_failure", "stuck", "budget_exceeded", "duration_exceeded", "model_error", "model_refused",
  "context_overflow", "cancelled", "interrupted",
];
const COLUMNS = [
  ["Status", (run) => status(run.status)],
  ["Run", (run) => el("a", { href: `#/runs/${run.run_id}`, "data-run": run.run_id, title: run.run_id }, short(run.run_id))],
  ["Agent", (run) => el("span", { class: "clip", title: run.agent }, visible(run.agent))],
  ["Reason", (run) => (run.termination_reason === run.status ? "" : words(run.termination_reason ?? "")), "minor"],
  ["Model", (run) => el("span", { class: "clip", title: run.model ?? "" }, visible(run.model ?? "–")), "minor"],
  ["Iterations", (run) => count(run.iterations), "number minor"],
  ["Calls", (run) => count(run.tool_calls_made), "number minor"],
  ["Tokens", (run) => count(run.tokens_used), "number minor"],
  ["Cost", (run) => money(run.usage.cost_usd), "number minor"],
  ["Duration", (run) => duration(run.latency_ms), "number minor"],
  ["Created", (run) => time(run.created_at), "number"],
];

export async function runs(main, params, signal) {
  heading("Runs");
  const rows = el("tbody");
  const pager = el("p", { class: "pager" });
  const errorBox = el("div");
  const head = COLUMNS.map(([name, , kind]) => el("th", { scope: "col", class: kind }, name));
  let shown = "";

  async function load(requested) {
    const page = await loadPage(requested, signal);
    if (requested !== params) return; // the filters have changed in the meantime
    errorBox.replaceChildren();
    const now = stringify(page);
    if (now === shown) return;
    shown = now;
    const focused = document.activeElement?.dataset.run;
    rows.replaceChildren(...page.data.map(row));
    if (!page.data.length) rows.append(el("tr", {}, el("td", { colspan: COLUMNS.length }, page.next_cursor ? "No runs match so far." : "No runs match.")));
    rows.querySelector(`[data-run="${focused}"]`)?.focus();
    const newest = new URLSearchParams(params);
    newest.delete("cursor");
    const older = new URLSearchParams(newest);
    older.set("cursor", page.next_cursor);
    pager.replaceChildren(
      params.has("cursor") ? el("a", { href: `#/runs?${newest}` }, "← Newest") : "",
      page.searched === undefined ? "" : el("span", { class: "meta" }, `Looked through ${plural(page.searched, "run")}`),
      page.next_cursor ? el("a", { href: `#/runs?${older}` }, page.searched === undefined ? "Older →" : "Search older ones →") : "");
  }
  const attempt = (requested = params) => load(requested).catch((problem) => signal.aborted || requested !== params || errorBox.replaceChildren(notice(problem)));
  const refilter = async (wanted) => {
    params = wanted;
    history.pushState(null, "", `#/runs?${params}`);
    await attempt();
    announce(`${rows.querySelectorAll("a").length} runs`);
  };

  main.append(filters(params, refilter, signal), errorBox,
    el("div", { class: "scroll" },
      el("table", {}, el("caption", { class: "unseen" }, "Runs, newest first"), el("thead", {}, el("tr", {}, head)), rows)),
    pager);
  await attempt();
  const timer = setInterval(() => document.hidden || params.has("cursor") || params.has("q") || attempt(), REFRESH);
  signal.addEventListener("abort", () => clearInterval(timer));
}

/** A page of runs; a part of an agent's name selects all agents whose names contain it. */
async function loadPage(params, signal) {
  const wanted = params.get("agent");
  if (!wanted) return get(`runs?${params}`, signal);
  const names = (await all("agents", signal).catch(() => [])).map((agent) => agent.name);
  const matching = names.includes(wanted) ? [] : names.filter((name) => name.toLowerCase().includes(wanted.toLowerCase())).slice(0, MAX_AGENTS);
  if (matching.length === 0) return get(`runs?${params}`, signal);
  const pages = await Promise.all(matching.map((name) => {
    const one = new URLSearchParams(params);
    one.set("agent", name);
    if (matching.length > 1) one.delete("cursor");
    return get(`runs?${one}`, signal);
  }));
  const data = pages.flatMap((page) => page.data).sort((a, b) => b.created_at.localeCompare(a.created_at));
  const searched = params.has("q") ? pages.reduce((sum, page) => sum + page.searched, 0) : undefined;
  return { data: data.slice(0, 50), next_cursor: matching.length === 1 ? pages[0].next_cursor : null, searched };
}

function row(run) {
  return el("tr", {}, COLUMNS.map(([, cell, kind]) => el("td", { class: kind }, cell(run))));
}

/** Filters by the names that the API has for them. */
function filters(params, change, signal) {
  const choice = (name, label, values) =>
    field(label, el("select", { name }, el("option", { value: "" }, "any"),
      values.map((value) => el("option", { value, selected: params.get(name) === value }, words(value)))));
  const moment = (name, label) =>
    field(label, el("input", { type: "datetime-local", name, value: params.has(name) && local(params.get(name)) }));
  const agent = el("input", { name: "agent", value: params.get("agent"), list: "agent-names" });
  const search = el("input", { name: "q", type: "search", value: params.get("q"), "data-filter": true, placeholder: "words of inputs, outputs, metadata; or an id" });
  const labels = el("input", {
    name: "labels", placeholder: "key=value", pattern: "\\s*([^=\\s]+=\\S*\\s*)*", title: "key=value, several apart by spaces",
    value: [...params].filter(([name]) => name.startsWith("metadata.")).map(([name, v]) => `${name.slice(9)}=${v}`).join(" "),
  });
  const names = el("datalist", { id: "agent-names" });
  all("agents", signal).then((rows) => names.append(...rows.map((a) => el("option", { value: a.name })))).catch(() => {});
  const apply = () => form.reportValidity() && change(paramsOf(new FormData(form)));
  const form = el("form", { class: "filters", role: "search", "aria-label": "Filter runs", onchange: apply },
    el("label", { class: "whole" }, el("span", {}, "Search"), search), field("Agent", agent, names), choice("status", "Status", STATUSES), choice("termination_reason", "Reason", REASONS),
    field("Session", el("input", { name: "session_id", value: params.get("session_id") })),
    field("Metadata", labels), moment("created_after", "Since"), moment("created_before", "Until"),
    el("a", { href: "#/runs", class: "clear" }, "Clear"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    apply();
  });
  return form;
}

const field = (label, ...control) => el("label", {}, el("span", {}, label), control);

function paramsOf(form) {
  const params = new URLSearchParams();
  for (const [name, value] of form) {
    if (value.trim() === "") continue;
    if (name === "labels") {
      for (const label of value.trim().split(/\s+/)) {
        const at = label.indexOf("=");
        params.set(`metadata.${label.slice(0, at)}`, label.slice(at + 1));
      }
    } else if (name.startsWith("created_")) {
      params.set(name, new Date(value).toISOString());
    } else {
      params.set(name, value.trim());
    }
  }
  return params;
}

/** A time in the format of its input element: local, without a zone. */
function local(iso) {
  const at = new Date(iso);
  return new Date(at - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
