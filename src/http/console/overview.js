// How the service is doing: runs a minute, failures by reason, pending approvals, spend, latency.

import { all, get } from "./api.js";
import { el, heading, notice, svg } from "./dom.js";
import { brief, count, duration, money, plural, share, short, visible, words } from "./format.js";

/** Milliseconds between two refreshes, and the minutes that are shown. */
const REFRESH = 10_000;
const MINUTES = 60;
/** Runs that are counted at most. */
const MAX_RUNS = 2000;

export async function overview(main, params, signal) {
  heading("Overview");
  const now = el("div", { class: "tiles" });
  const latest = el("div", { class: "panels" });
  const spent = el("div", { class: "panels" });
  const errorBox = el("div");
  const called = el("div");
  main.append(errorBox, now, latest, spent, called);

  async function load() {
    const since = new Date(Date.now() - MINUTES * 60_000).toISOString();
    const [runs, pending, usage, tools] = await Promise.all([
      all(`runs?created_after=${since}&limit=200`, signal, MAX_RUNS),
      get("approvals?status=pending&limit=100", signal).catch(() => null),
      all("stats/usage?limit=200", signal, 2000), get("stats/tools", signal),
    ]);
    errorBox.replaceChildren();
    now.replaceChildren(...tiles(runs, pending));
    latest.replaceChildren(minutes(runs), failures(runs));
    spent.replaceChildren(spend(usage, "agent", "Agents"), spend(usage, "model", "Models"));
    called.replaceChildren(calls(tools.data));
  }
  const attempt = () => load().catch((problem) => signal.aborted || errorBox.replaceChildren(notice(problem)));
  await attempt();
  const timer = setInterval(() => document.hidden || attempt(), REFRESH);
  signal.addEventListener("abort", () => clearInterval(timer));
}

const percentile = (sorted, part) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))];
const tile = (label, value, more, href) => el(href ? "a" : "div", { class: "tile", href }, el("span", {}, label), el("strong", {}, value), more && el("small", {}, more));
const panel = (title, ...content) => el("section", { class: "card", "aria-label": title }, el("h2", {}, title), content);

/** The agent whose request has waited longest; null where there are older ones than those that were read. */
function oldest({ data, next_cursor: more }) {
  if (!data.length) return "nothing waits";
  return more ? null : `oldest: ${visible(data.at(-1).agent)}`;
}

function tiles(runs, pending) {
  const ended = runs.filter((run) => run.finished_at);
  const durations = ended.map((run) => run.latency_ms).filter((ms) => ms !== null).sort((a, b) => a - b);
  const failed = ended.filter((run) => run.status === "failed").length;
  const spent = runs.reduce((sum, run) => sum + (run.usage.cost_usd ?? 0), 0);
  return [
    tile("Runs in the last hour", `${count(runs.length)}${runs.length >= MAX_RUNS ? "+" : ""}`, `${count(runs.length - ended.length)} of them in progress`, "#/runs"),
    tile("Failed", count(failed), share(failed, ended.length), "#/runs?status=failed"),
    pending && tile("Waiting for a decision", `${count(pending.data.length)}${pending.next_cursor ? "+" : ""}`, oldest(pending), "#/approvals"),
    tile("Duration, median", durations.length ? duration(percentile(durations, 0.5)) : "–", durations.length ? `95 % below ${duration(percentile(durations, 0.95))}` : null),
    tile("Spent in the last hour", money(spent || (runs.some((run) => run.usage.cost_usd !== null) ? 0 : null)), `${brief(runs.reduce((sum, run) => sum + run.tokens_used, 0))} tokens`),
  ].filter(Boolean);
}

/** Bars of runs that were accepted in each minute, failed ones below. */
function minutes(runs) {
  const end = Math.ceil(Date.now() / 60_000);
  const slots = Array.from({ length: MINUTES }, () => ({ all: 0, failed: 0 }));
  for (const run of runs) {
    const slot = slots[MINUTES - (end - Math.floor(Date.parse(run.created_at) / 60_000))];
    if (!slot) continue;
    slot.all += 1;
    if (run.status === "failed") slot.failed += 1;
  }
  const highest = Math.max(1, ...slots.map((slot) => slot.all));
  const bar = (index, from, to) => (to > from ? `M${index * 10 + 1} ${100 - (from / highest) * 96}V${100 - (to / highest) * 96}h8V${100 - (from / highest) * 96}z` : "");
  const drawing = svg("svg", { viewBox: `0 0 ${MINUTES * 10} 100`, preserveAspectRatio: "none", role: "img", "aria-label": `${runs.length} runs in the last hour, at most ${highest} in a minute` },
    svg("path", { class: "model", d: slots.map((slot, index) => bar(index, slot.failed, slot.all)).join("") }),
    svg("path", { class: "bad", d: slots.map((slot, index) => bar(index, 0, slot.failed)).join("") }));
  return panel("Runs a minute", el("figure", { class: "chart" }, drawing,
    el("p", { class: "meta ends" }, el("span", {}, "an hour ago"), el("span", {}, `most: ${highest} a minute`), el("span", {}, "now"))));
}

function failures(runs) {
  const failed = runs.filter((run) => run.status === "failed");
  const reasons = Map.groupBy ? Map.groupBy(failed, (run) => run.termination_reason) : grouped(failed);
  const rows = [...reasons].sort((a, b) => b[1].length - a[1].length).map(([reason, of]) => ({
    name: [el("a", { href: `#/runs?status=failed&termination_reason=${encodeURIComponent(reason)}` }, words(reason)),
      " ", el("a", { class: "small", href: `#/runs/${encodeURIComponent(of[0].run_id)}` }, `last: ${short(of[0].run_id)}`)],
    value: of.length, amount: count(of.length),
  }));
  return panel("Failures by reason", rows.length ? barList(rows, "bad") : el("p", { class: "meta" }, "None in the last hour."));
}

const grouped = (runs) => runs.reduce((map, run) => map.set(run.termination_reason, [...(map.get(run.termination_reason) ?? []), run]), new Map());

/** Cost where prices are known, else tokens. */
function spend(usage, by, title) {
  const sums = new Map();
  for (const row of usage) {
    const sum = sums.get(row[by]) ?? { cost: 0, tokens: 0, runs: 0 };
    sum.cost += row.cost_usd ?? 0;
    sum.tokens += row.total_tokens;
    sum.runs += row.runs;
    sums.set(row[by], sum);
  }
  const hasCost = [...sums.values()].some((sum) => sum.cost > 0);
  const rows = [...sums].map(([name, sum]) => ({
    name: by === "agent" ? el("a", { href: `#/agents/${encodeURIComponent(name)}` }, visible(name)) : visible(name),
    value: hasCost ? sum.cost : sum.tokens, amount: `${sum.cost > 0 ? `${money(sum.cost)} · ` : ""}${brief(sum.tokens)} tokens · ${plural(sum.runs, "run")}`,
  })).sort((a, b) => b.value - a.value).slice(0, 8);
  return panel(`${title}: ${hasCost ? "spend" : "tokens"} in 30 days`, rows.length ? barList(rows, "model") : el("p", { class: "meta" }, "Nothing yet."));
}

function barList(rows, tone) {
  const highest = Math.max(...rows.map(({ value }) => value), Number.MIN_VALUE);
  return el("ul", { class: "bars" }, rows.map(({ name, value, amount }) => {
    const fill = el("span", { class: `bar-fill ${tone}` });
    fill.style.width = `${(100 * value) / highest}%`;
    return el("li", {}, el("span", { class: "name" }, name), el("span", { class: "amount" }, amount), el("span", { class: "bar-back", "aria-hidden": "true" }, fill));
  }));
}

function calls(tools) {
  const rows = [...tools].sort((a, b) => b.calls - a.calls).slice(0, 8).map((tool) => el("tr", {},
    el("td", {}, visible(tool.tool)), el("td", { class: "number" }, count(tool.calls)), el("td", { class: "number" }, share(tool.errors, tool.calls)),
    el("td", { class: "number" }, count(tool.blocked)), el("td", { class: "number" }, duration(tool.p50_ms)), el("td", { class: "number" }, duration(tool.p95_ms))));
  const heads = ["Tool", "Calls", "Failed", "Blocked", "Median", "95 %"];
  return panel("Tools: latency and failures in 30 days", rows.length
    ? el("div", { class: "inner", tabindex: 0, role: "group", "aria-label": "Table of tools" }, el("table", {}, el("caption", { class: "unseen" }, "Tools"), el("thead", {}, el("tr", {}, heads.map((name, index) => el("th", { scope: "col", class: index && "number" }, name)))), el("tbody", {}, rows)))
    : el("p", { class: "meta" }, "No calls yet."));
}
