// How much of each limit is used, as bars.

import { el } from "./dom.js";
import { count, duration, money, words } from "./format.js";

const NAMES = {
  iterations: "Iterations", duration_seconds: "Time", tool_calls: "Tool calls", total_tokens: "Tokens", cost_usd: "Cost", files_read: "Files read", files_written: "Files written",
  commands: "Commands", network_requests: "Requests",
  files_modified: "Files modified", lines_changed: "Lines changed",
};
const FORMATS = { duration_seconds: (seconds) => duration(seconds * 1000), cost_usd: money };

/** The budget of a run, and what of its loop's limits is less. */
export function meters({ budget: { used, limits: allowed }, limits: loop }) {
  const iterations = [allowed?.max_iterations, loop?.max_iterations].filter(Number.isFinite);
  const limits = { ...allowed, max_iterations: iterations.length ? Math.min(...iterations) : null };
  const rows = Object.entries(used).map(([name, amount]) => ({ name, amount, limit: limits?.[`max_${name}`] })).filter(({ amount, limit }) => amount > 0 || (limit !== undefined && limit !== null));
  return el("ul", { class: "meters", "aria-label": "Budget" }, rows.map(({ name, amount, limit }) => {
    const format = FORMATS[name] ?? count;
    const part = limit ? Math.min(1, (amount ?? 0) / limit) : 0;
    const bar = el("span", { class: part > 0.8 ? "bar-fill near" : "bar-fill" });
    bar.style.width = `${part * 100}%`;
    return el("li", {},
      el("span", {}, NAMES[name] ?? words(name)), " ",
      el("span", { class: "amount" }, format(amount), limit ? el("small", {}, ` of ${format(limit)}`) : ""),
      limit ? el("span", { class: "bar-back", "aria-hidden": "true" }, bar) : "");
  }));
}
