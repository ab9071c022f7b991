// One run: its request, its status, its consumption, and its timeline, live.

import { get, part, post } from "./api.js";
import { announce, el, facts, folded, heading, notice, pre, status, time } from "./dom.js";
import { count, duration, money, plural, short, visible, words } from "./format.js";
import { meters } from "./meters.js";
import { Picture } from "./picture.js";
import { repeatButtons, snippetOf } from "./repeat-run.js";
import { Changes } from "./changes.js";
import { Files } from "./files.js";
import { follow, wasStartedHere } from "./stream.js";
import { Timeline } from "./timeline.js";
import { Waiting } from "./waiting.js";

export const ENDED = ["completed", "failed", "cancelled"];
/** Milliseconds between two loads of the run. */
const REFRESH = 1000;
/** Loads that are waited for at the same time: more than one, as one may hang. */
const MAX_OPEN = 3;

export async function run(main, id, signal) {
  const path = `runs/${part(id)}`;
  const statusBox = el("span");
  const connection = el("span", { class: "meta", role: "status" });
  const cancel = el("button", { class: "danger", hidden: true }, "Cancel run");
  const actions = el("div", { class: "actions" });
  const title = heading(`Run ${short(id)}`, statusBox, connection, actions);
  const waiting = new Waiting(path, (run) => (show(run), title.focus(), refresh()), signal);
  const summary = el("div");
  const request = el("div");
  const timeline = new Timeline(signal);
  const picture = new Picture(id, timeline, signal);
  const changes = new Changes(id, (call) => timeline.revealCall(call), signal);
  const files = new Files(path, signal, (call) => timeline.revealCall(call));
  let last;

  function show(run) {
    const ended = ENDED.includes(run.status);
    if (run.status !== last) statusBox.replaceChildren(status(run.status));
    if (last && run.status !== last) announce(`Run ${words(run.status)}`);
    if (!last) {
      actions.replaceChildren(...repeatButtons(run, main), cancel);
      request.append(...[folded("Inputs", () => pre(run.inputs, "Inputs")), snippetOf(run)].filter(Boolean));
    }
    last = run.status;
    if (ended && document.activeElement === cancel) title.focus();
    cancel.hidden = ended;
    const places = () => [...summary.querySelectorAll("a, summary, pre, button")];
    const focused = places().indexOf(document.activeElement);
    if (waiting.show(run.pending) && timeline.pause()) waiting.node.scrollIntoView({ block: "nearest" });
    picture.limits = run.budget.limits;
    summary.replaceChildren(...about(run, timeline.story));
    places()[focused]?.focus({ preventScroll: true });
  }
  let asked = 0;
  let answered = 0;
  let open = 0;
  /** Loads the run. An answer that comes after that to a later request is not shown. */
  const refresh = async () => {
    const turn = (asked += 1);
    open += 1;
    try {
      const run = await get(path, signal);
      if (turn < answered) return;
      answered = turn;
      show(run);
    } finally {
      open -= 1;
    }
  };
  cancel.addEventListener("click", () => confirmCancel(main, path, (run) => (show(run), refresh())));

  // Events of a run that this page started arrive already, so they do not wait for the first load.
  const firstLoad = refresh();
  if (wasStartedHere(id)) firstLoad.catch(() => {});
  else await firstLoad.catch((problem) => (picture.stop(), Promise.reject(problem)));
  main.append(waiting.node, summary, request, picture.node, changes.node, files.node, el("h2", {}, "Timeline"), timeline.node);
  timeline.live(!ENDED.includes(last));
  if (last && !["queued", "running"].includes(last)) timeline.pause();
  const timer = setInterval(() => document.hidden || open >= MAX_OPEN || refresh().catch(() => {}), REFRESH);
  signal.addEventListener("abort", () => clearInterval(timer));
  const onState = (state) => {
    if (state === "broken") timeline.interrupt();
    connection.textContent = state === "broken" ? "connection lost, trying again …" : "";
  };
  picture.loadChildren();
  try {
    for await (const event of follow(id, signal, onState)) {
      timeline.add(event);
      picture.add(event);
      if (event.data?.changes?.length) changes.scheduleLoad();
    }
  } catch (problem) {
    // A run that cannot be followed any more, e.g. because it was deleted, is not asked for again.
    clearInterval(timer);
    picture.stop();
    connection.textContent = "";
    throw problem;
  }
  clearInterval(timer);
  timeline.live(false);
  await Promise.all([refresh(), picture.loadChildren()]);
  picture.draw();
}

function about(run, story) {
  const link = (href, text) => el("a", { href }, visible(text));
  const labels = Object.entries(run.metadata ?? {}).slice(0, 50).map(([name, value]) =>
    el("a", { class: "label", href: `#/runs?${new URLSearchParams({ [`metadata.${name}`]: value })}` }, visible(`${name}=${value}`)));
  const waited = story.waited();
  // The budget does not count the waiting, the latency does.
  const took = run.latency_ms ?? run.budget.used.duration_seconds * 1000 + waited;
  return [
    run.error && el("section", { class: "notice bad", "aria-label": "Error" },
      el("p", {}, el("strong", {}, run.error.code), " ", visible(run.error.message)), context(run.error.context)),
    run.warnings.length && el("ul", { class: "notice wait", "aria-label": "Warnings" },
      run.warnings.slice(0, 20).map((w) => el("li", {}, visible(w))), run.warnings.length > 20 && el("li", {}, `and ${run.warnings.length - 20} more`)),
    facts({
      Agent: [link(`#/agents/${part(run.agent)}`, run.agent), run.agent_version !== "0.0.0" && el("small", {}, visible(` ${run.agent_version}`))],
      Kind: words(run.kind),
      Model: run.model && visible(run.model),
      Duration: waited > 0 ? [duration(took), el("small", {}, `, of which ${duration(Math.min(waited, took))} waiting`)] : duration(took),
      Tokens: `${count(run.usage.input_tokens)} in, ${count(run.usage.output_tokens)} out`,
      Cost: run.tree_usage?.cost_usd ? [money(run.usage.cost_usd), el("small", {}, `, with its children ${money(run.tree_usage.cost_usd)}`)] : money(run.usage.cost_usd),
      Reason: run.termination_reason && run.termination_reason !== run.status && words(run.termination_reason),
      Created: time(run.created_at),
      Session: run.session_id && link(`#/sessions/${part(run.session_id)}`, run.session_id),
      "Delegated by": run.parent_run_id && link(`#/runs/${part(run.parent_run_id)}`, short(run.parent_run_id)),
      "Has read": run.labels?.length ? run.labels.map(words).join(", ") : null,
      "Not delivered": run.callback_errors?.length ? `${plural(run.callback_errors.length, "event")} to the webhook` : null,
      Metadata: labels.length ? labels : null,
      Id: el("code", {}, run.run_id),
    }),
    meters(run),
  ].filter(Boolean);
}

function context(context) {
  const known = context && Object.keys(context).length > 0;
  return known && pre(context, "Context of the error");
}

/** Asks for a confirmation; Escape and the other button keep the run. */
function confirmCancel(main, path, done) {
  const reason = el("input", { id: "reason", maxlength: 1000, autocomplete: "off" });
  const errorBox = el("div");
  const send = async (event) => {
    event.preventDefault();
    try {
      const run = await post(`${path}/cancel`, reason.value.trim() ? { reason: reason.value.trim() } : {});
      dialog.close();
      await done(run);
    } catch (problem) {
      errorBox.replaceChildren(notice(problem));
    }
  };
  const dialog = el("dialog", { "aria-labelledby": "cancel-title", onclose: () => dialog.remove() },
    el("form", { onsubmit: send },
      el("h2", { id: "cancel-title" }, "Cancel this run?"),
      el("p", {}, "What its tools have done already is not undone."),
      el("label", { for: "reason" }, "Reason (optional)"), reason, errorBox,
      el("p", { class: "buttons" },
        el("button", { type: "button", onclick: () => dialog.close() }, "Keep it running"),
        el("button", { class: "danger" }, "Cancel run"))));
  main.append(dialog);
  dialog.showModal();
}
