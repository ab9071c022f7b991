// How a row of the story is drawn. A row is bounded: what can be long is cut or made when it is opened.

import { who } from "./people.js";
import { count, duration, money, pretty, short, visible, words } from "./format.js";
import { el, folded, grow, long, pre, status } from "./dom.js";
import { changed } from "./diff.js";
import { icon } from "./icons.js";
import { stringify } from "./json.js";
import { NOTES, unknown } from "./pictures.js";
import { screenshots } from "./screenshot.js";

const PREVIEW = 200;

/** A list item; `update` changes it in place where that is enough. */
export function drawn(row) {
  const { node, update } = DRAWERS[row.kind](row);
  node.append(el("time", { class: "since", datetime: row.at, title: row.at }, `+${duration(row.since)}`));
  return { node, update };
}

const DRAWERS = {
  attempt: (row) => ({ node: step("attempt", el("h3", {}, `Attempt ${row.number}`)) }),
  note: (row) => ({ node: note(row) }),
  iteration: (row) => (row.answer || row.over ? { node: answeredIteration(row) } : liveIteration(row)),
  call: (row) => ({ node: call(row) }),
  end: (row) => ({ node: end(row) }),
};

const step = (kind, ...children) => el("li", { class: `step ${kind}` }, children);
const spans = (parts) => parts.filter(Boolean).map((part) => el("span", {}, part));
const head = (row, parts) => el("h4", {}, `Iteration ${row.number}`, el("span", { class: "meta" }, spans(parts)));

function note(row) {
  const draw = NOTES[row.type];
  const { icon: picture, tone, title, meta, body, run, agent, by } = draw ? draw(row.data) : unknown(row.type, row.data);
  const details = (meta ?? []).filter(Boolean);
  return step(`note ${tone || ""}`,
    el("div", { class: "line" }, icon(picture), el("span", {}, title),
      by && el("span", { class: "meta" }, "by ", who(by)),
      run && el("a", { href: `#/runs/${encodeURIComponent(run)}` }, "open it"),
      agent && el("a", { href: `#/agents/${encodeURIComponent(agent)}` }, "its definition"),
      details.length > 0 && el("span", { class: "meta" }, spans(details))),
    body);
}

/** An iteration whose answer is being written: each piece is added to the same element. */
function liveIteration(row) {
  const meta = el("span", { class: "meta", "aria-live": "off" });
  const thinking = el("p", { class: "said thinking", hidden: true });
  const text = el("p", { class: "said live" });
  const calls = el("div", { class: "calls" });
  const node = step("iteration live", el("h4", {}, `Iteration ${row.number}`, meta), thinking, text, calls);
  const update = () => {
    if (row.answer || row.over) return false;
    const { live } = row;
    meta.textContent = live ? "the model is writing …" : "waiting for the model …";
    thinking.hidden = !live?.thinking;
    grow(thinking, live?.thinking ?? "");
    grow(text, live?.text ?? "");
    calls.replaceChildren(...(live?.calls ?? []).filter(Boolean).slice(0, 20).map((call) =>
      el("p", { class: "meta" }, icon("tool"), el("code", {}, visible(call.name)), el("code", { class: "tail" }, visible(call.arguments.slice(-PREVIEW))))));
    return true;
  };
  update();
  return { node, update };
}

function answeredIteration(row) {
  const { answer } = row;
  if (!answer) return step("iteration", head(row, ["no answer"]));
  const { usage, message } = answer;
  return step("iteration",
    head(row, [
      visible(`${answer.provider}/${answer.model}`), duration(answer.latency_ms),
      `${count(usage.input_tokens)} in, ${count(usage.output_tokens)} out`,
      usage.cached_input_tokens > 0 && `${count(usage.cached_input_tokens)} from the cache`,
      usage.cost_usd !== null && money(usage.cost_usd), words(answer.finish_reason),
      answer.retries > 0 && `${answer.retries} retries`, answer.fallback && "fallback", answer.repeated && "asked again",
      row.started.answer_only && "only the answer", row.started.limit && `last one: ${words(row.started.limit.termination_reason)}`,
    ]),
    message.thinking && folded("Thinking", () => pre(message.thinking, "Thinking")),
    message.text && long(message.text, "p", { class: "said" }),
    (answer.warnings ?? []).slice(0, 10).map((warning) => el("p", { class: "notice wait" }, visible(warning))));
}

function call(row) {
  const { name, arguments: given } = row.call;
  const facts = row.facts.map((fact) => el("span", {}, visible(fact)));
  const inside = () => [
    el("p", { class: "sub" }, "Arguments"), pre(given, `Arguments of ${visible(name)}`),
    row.edited && [el("p", { class: "sub" }, "Arguments after the approval"), pre(row.edited, "Arguments after the approval")],
    facts.length > 0 && el("p", { class: "meta" }, facts),
    row.result !== undefined && [el("p", { class: "sub" }, "Result"), pre(row.result, "Result of the call")],
    name === "browser" && screenshots(row),
    row.note && el("p", { class: "notice wait" }, visible(row.note)),
    row.changes?.length > 0 && [el("p", { class: "sub" }, "Files"), row.changes.slice(0, 20).map((change, index) => changed(change, index < 3))],
  ].flat(3).filter(Boolean);
  const node = el("details", { class: "call", "data-call": row.call.id },
    el("summary", {}, icon("tool"), el("code", {}, visible(name)),
      el("span", { class: "preview" }, visible((row.edited ? stringify(row.edited) : given).slice(0, PREVIEW))),
      row.progress !== undefined && el("span", { class: "meta progress" }, visible(pretty(row.progress).slice(0, PREVIEW))),
      row.changes?.length > 0 && el("span", { class: "meta" }, `${row.changes.length} file${row.changes.length > 1 ? "s" : ""}`),
      status(row.status), row.took !== undefined && el("span", { class: "meta" }, duration(row.took))));
  const fill = () => node.children.length === 1 && node.append(...inside());
  node.addEventListener("toggle", () => {
    if (node.open) fill();
    row.open[node.open ? "add" : "delete"]("call");
  });
  if (row.open.has("call")) {
    fill();
    node.open = true;
  }
  return step("of-call", node,
    row.child && el("p", { class: "of-child" }, "↳ ", el("a", { href: `#/runs/${encodeURIComponent(row.child)}` }, `child run ${short(row.child)}`)));
}

function end(row) {
  const { output, error, raw_response: last, partial, latency_ms: took } = row.data;
  return step(`end ${row.status}`,
    el("h3", {}, icon({ completed: "check", failed: "cross" }[row.status] ?? "stop"), ` Run ${row.status}${partial ? ", partial output" : ""}`,
      el("span", { class: "meta" }, duration(took))),
    error && el("p", {}, el("strong", {}, error.code), " ", visible(error.message)),
    output !== undefined ? pre(output, "Output") : last && folded("The model's last words", () => pre(last, "The model's last words")));
}
