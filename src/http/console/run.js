// One run: what it was asked, how it stands, what it consumed, and its timeline, live.

import { follow, get, request } from "./api.js";
import { announce, count, duration, el, facts, heading, money, notice, pre, short, status, time, words } from "./dom.js";
import { Timeline } from "./timeline.js";
import { Waiting } from "./waiting.js";

const ENDED = ["completed", "failed", "cancelled"];
/** Milliseconds between two looks at the run's numbers. */
const REFRESH = 1000;

export async function run(main, id, signal) {
  const path = `runs/${encodeURIComponent(id)}`;
  const standing = el("span");
  const cancel = el("button", { class: "danger", hidden: true }, "Cancel run");
  const title = heading(`Run ${short(id)}`, standing, cancel);
  const waiting = new Waiting(path, (run) => (show(run), title.focus(), refresh()));
  const summary = el("div");
  const timeline = new Timeline();
  let last;

  function show(run) {
    const ended = ENDED.includes(run.status);
    if (run.status !== last) standing.replaceChildren(status(run.status));
    if (last && run.status !== last) announce(`Run ${words(run.status)}`);
    last = run.status;
    if (ended && document.activeElement === cancel) title.focus();
    cancel.hidden = ended;
    const places = () => [...summary.querySelectorAll("a, summary, pre")];
    const focused = places().indexOf(document.activeElement);
    const open = summary.querySelector(":scope > details")?.open;
    waiting.show(run.pending);
    summary.replaceChildren(...about(run, open));
    places()[focused]?.focus({ preventScroll: true });
  }
  const refresh = async () => show(await get(path, signal));
  cancel.addEventListener("click", () => confirmCancel(main, path, (run) => (show(run), refresh())));

  await refresh();
  main.append(waiting.node, summary, el("h2", {}, "Timeline"), timeline.node);
  const again = setInterval(() => document.hidden || refresh().catch(() => {}), REFRESH);
  signal.addEventListener("abort", () => clearInterval(again));
  for await (const event of follow(id, signal)) timeline.add(event);
  clearInterval(again);
  await refresh();
}

function about(run, open) {
  const { used, limits } = run.budget;
  const caps = Object.entries(used).map(([name, value]) => {
    const limit = limits?.[`max_${name}`];
    const unit = name.endsWith("_seconds") ? " s" : "";
    const what = words(name.replace(/_seconds$/, ""));
    return `${what} ${count(value)}${unit}${limit === undefined ? "" : ` of ${count(limit)}${unit}`}`;
  });
  const link = (href, text) => el("a", { href }, text);
  const labels = Object.entries(run.metadata ?? {}).map(([name, value]) =>
    el("a", { class: "label", href: `#/runs?${new URLSearchParams({ [`metadata.${name}`]: value })}` }, `${name}=${value}`));
  return [
    run.error && el("section", { class: "notice bad", "aria-label": "Error" },
      el("p", {}, el("strong", {}, run.error.code), " ", run.error.message), context(run.error.context)),
    run.warnings.length && el("ul", { class: "notice wait", "aria-label": "Warnings" }, run.warnings.map((w) => el("li", {}, w))),
    facts({
      Agent: [link(`#/agents/${encodeURIComponent(run.agent)}`, run.agent), el("small", {}, ` ${run.agent_version}`)],
      Kind: words(run.kind),
      Model: run.model,
      Duration: duration(run.latency_ms ?? used.duration_seconds * 1000),
      Tokens: `${count(run.usage.input_tokens)} in, ${count(run.usage.output_tokens)} out`,
      Cost: money(run.usage.cost_usd),
      Reason: run.termination_reason && words(run.termination_reason),
      Created: time(run.created_at),
      Session: run.session_id && link(`#/runs?${new URLSearchParams({ session_id: run.session_id })}`, run.session_id),
      "Delegated by": run.parent_run_id && link(`#/runs/${run.parent_run_id}`, short(run.parent_run_id)),
      Metadata: labels.length ? labels : null,
      Budget: caps.join(" · "),
      Id: el("code", {}, run.run_id),
    }),
    el("details", { open }, el("summary", {}, "Inputs"), pre(run.inputs, "Inputs")),
  ].filter(Boolean);
}

function context(context) {
  const known = context && Object.keys(context).length > 0;
  return known && pre(context, "Context of the error");
}

/** Asks once more; Escape and the other button keep the run. */
function confirmCancel(main, path, done) {
  const reason = el("input", { id: "reason", maxlength: 1000, autocomplete: "off" });
  const trouble = el("div");
  const send = async (event) => {
    event.preventDefault();
    try {
      const body = reason.value.trim() ? { reason: reason.value.trim() } : {};
      const run = await (await request("POST", `${path}/cancel`, { body })).json();
      dialog.close();
      await done(run);
    } catch (problem) {
      trouble.replaceChildren(notice(problem));
    }
  };
  const dialog = el("dialog", { "aria-labelledby": "cancel-title", onclose: () => dialog.remove() },
    el("form", { onsubmit: send },
      el("h2", { id: "cancel-title" }, "Cancel this run?"),
      el("p", {}, "What its tools have done already is not undone."),
      el("label", { for: "reason" }, "Reason, if you like"), reason, trouble,
      el("p", { class: "buttons" },
        el("button", { type: "button", onclick: () => dialog.close() }, "Keep it running"),
        el("button", { class: "danger" }, "Cancel run"))));
  main.append(dialog);
  dialog.showModal();
}
