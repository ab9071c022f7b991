// The requests of all runs that wait for a person, and the decisions.

import { first, get, part } from "./api.js";
import { PendingCalls } from "./pending-calls.js";
import { decision } from "./decide.js";
import { el, folded, heading, notice, status, time } from "./dom.js";
import { plural, short, visible, words } from "./format.js";
import { who } from "./people.js";
import { argumentsWithPreview } from "./preview.js";

/** Milliseconds between two refreshes. */
const REFRESH = 3000;
/** Requests that are shown, and requests that are searched for those of an agent. */
const SHOWN = 100;
const SEARCHED = 1000;
const STATUSES = ["pending", "approved", "denied", "expired", "answered", "resolved", "void"];

export async function approvals(main, params, signal) {
  const wanted = params.get("status") ?? "pending";
  const agent = params.get("agent") ?? "";
  heading("Approvals");
  const list = el("ul", { class: "cards wide inbox" });
  const count = el("p", { class: "meta", role: "status" });
  const errorBox = el("div");
  const pending = new PendingCalls(list, (row) => request(row, load, signal));

  async function load() {
    const read = await first(`approvals?status=${part(wanted)}&limit=${SHOWN}`, signal, agent ? SEARCHED : SHOWN);
    const matching = read.rows.filter((row) => row.agent.includes(agent));
    const rows = matching.slice(0, SHOWN);
    errorBox.replaceChildren();
    count.textContent = summary(rows.length, { ...read, more: read.more || rows.length < matching.length }, wanted);
    pending.show(rows);
    document.dispatchEvent(new CustomEvent("waiting"));
  }
  const attempt = () => load().catch((problem) => signal.aborted || errorBox.replaceChildren(notice(problem)));
  main.append(filters(wanted, agent), count, errorBox, list);
  await attempt();
  const timer = setInterval(() => document.hidden || attempt(), REFRESH);
  signal.addEventListener("abort", () => clearInterval(timer));
}

/** Tells how many requests are shown, and whether there are more. */
function summary(shown, read, wanted) {
  if (read.more) return `${plural(shown, "request")} among the newest ${read.rows.length}; there are older ones.`;
  if (shown) return plural(shown, "request");
  return wanted === "pending" ? "Nothing waits for a decision." : "There are none.";
}

function filters(wanted, agent) {
  const apply = () => {
    const params = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    location.hash = `#/approvals?${params}`;
  };
  const form = el("form", { class: "filters", role: "search", "aria-label": "Filter requests", onchange: apply, onsubmit: (event) => (event.preventDefault(), apply()) },
    el("label", {}, el("span", {}, "Status"), el("select", { name: "status" },
      STATUSES.map((value) => el("option", { value, selected: value === wanted }, words(value))))),
    el("label", {}, el("span", {}, "Agent"), el("input", { name: "agent", value: agent, "data-filter": true })));
  return form;
}

function request(row, onAnswered, signal) {
  const isOpen = row.status === "pending";
  const about = row.decided_by || row.decided_at
    ? el("p", { class: "meta" }, status(row.status), row.decided_by && el("span", {}, "by ", who(row.decided_by)), time(row.decided_at), row.decision_reason && el("span", {}, visible(row.decision_reason)))
    : row.expires_at && el("p", { class: "meta" }, "until ", time(row.expires_at));
  return el("li", { class: "card", "data-call": row.call_id },
    el("h2", {}, row.tool ? el("code", {}, visible(row.tool)) : words(row.kind), el("small", {}, visible(row.agent)),
      el("a", { class: "run", href: `#/runs/${part(row.run_id)}` }, `run ${short(row.run_id)}`)),
    el("p", {}, visible(row.reason)), about || "",
    row.tool && (isOpen ? argumentsWithPreview(row, signal) : folded("Arguments", () => el("div", {}, argumentsWithPreview(row, signal)))),
    isOpen && decision(row, onAnswered, signal));
}

/** Shows the number of pending requests beside the link; hidden from callers who may not decide. */
export function badge(link) {
  const number = el("span", { class: "badge", hidden: true });
  link.append(number);
  const look = async () => {
    if (link.parentElement.hidden || document.hidden) return;
    try {
      const { data, next_cursor: more } = await get("approvals?status=pending&limit=50");
      number.textContent = more ? `${data.length}+` : String(data.length);
      number.hidden = data.length === 0;
      number.append(el("span", { class: "unseen" }, " waiting"));
      link.hidden = false;
    } catch (problem) {
      if (problem.status === 403) link.hidden = true;
    }
  };
  setInterval(() => link.hidden || look(), 5000);
  document.addEventListener("waiting", look);
  return look;
}
