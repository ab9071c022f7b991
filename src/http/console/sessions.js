// Sessions: the list, and one as a chat that can be continued.

import { get, last, part } from "./api.js";
import { Files } from "./files.js";
import { announce, el, folded, grow, heading, long, notice, pre, status, time } from "./dom.js";
import { count, plural, short, visible } from "./format.js";
import { follow, start } from "./stream.js";

/** How many of the last messages are shown. */
const MAX_MESSAGES = 400;

export async function sessions(main, params, signal) {
  heading("Sessions");
  const agent = params.get("agent");
  const cursor = params.get("cursor");
  const page = await get(`sessions?limit=50${agent ? `&agent=${part(agent)}` : ""}${cursor ? `&cursor=${part(cursor)}` : ""}`, signal);
  const rows = page.data.map((row) => el("tr", {},
    el("td", {}, el("a", { href: `#/sessions/${part(row.session_id)}` }, visible(row.session_id))), el("td", {}, visible(row.agent)),
    el("td", { class: "number" }, count(row.run_count)), el("td", { class: "number minor" }, time(row.created_at)),
    el("td", { class: "number" }, time(row.last_run_at))));
  const columns = [["Session"], ["Agent"], ["Runs", "number"], ["Began", "number minor"], ["Last run", "number"]];
  if (!rows.length) rows.push(el("tr", {}, el("td", { colspan: columns.length }, "There are no sessions. A run joins one that its request names.")));
  main.append(el("div", { class: "scroll" }, el("table", {}, el("caption", { class: "unseen" }, "Sessions, newest first"),
    el("thead", {}, el("tr", {}, columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)))), el("tbody", {}, rows))));
  if (page.next_cursor) {
    const older = new URLSearchParams({ ...(agent && { agent }), cursor: page.next_cursor });
    main.append(el("p", { class: "pager" }, el("a", { href: `#/sessions?${older}` }, "Older →")));
  }
}

export async function session(main, id, signal) {
  heading(`Session ${visible(id)}`, el("a", { href: `#/runs?${new URLSearchParams({ session_id: id })}` }, "Its runs"));
  const path = `sessions/${part(id)}`;
  const about = await get(path, signal);
  const agent = await get(`agents/${part(about.agent)}`, signal).catch(() => null);
  const chat = el("ol", { class: "chat", "aria-label": "Conversation" });
  const runs = new Map(about.runs.map((run) => [run.run_id, run]));
  const cut = el("p", { class: "meta", hidden: true }, `Only the last ${MAX_MESSAGES} messages are shown.`);

  async function load() {
    const { rows, more } = await last(`${path}/messages?limit=200`, signal, MAX_MESSAGES);
    cut.hidden = !more;
    chat.replaceChildren(...turns(rows, runs));
    scrollTo(0, document.documentElement.scrollHeight);
  }

  main.append(el("p", { class: "meta" }, el("span", {}, "with ", el("a", { href: `#/agents/${part(about.agent)}` }, visible(about.agent))),
    el("span", {}, plural(about.run_count, "run")), el("span", {}, "since ", time(about.created_at))), cut, chat);
  await load();
  // A run with a later start blocks no other run.
  const isLater = (run) => run.status === "queued" && run.available_at;
  const busy = about.runs.findLast((run) => !isLater(run));
  const next = composer(agent, id, about, chat, async () => {
    for (const run of (await get(path, signal)).runs) runs.set(run.run_id, run);
    await load();
  }, signal);
  main.append(next.node, new Files(path, signal).node);
  if (busy && !busy.finished_at) next.watch(busy.run_id);
}

/** Messages, with the run that they are of wherever it changes. */
function turns(messages, runs) {
  let last = null;
  return messages.filter((message) => message.role !== "tool").flatMap((message) => {
    const head = message.run_id !== last && el("li", { class: "of-run" }, el("a", { href: `#/runs/${part(message.run_id)}` }, `Run ${short(message.run_id)}`),
      " ", runs.has(message.run_id) && status(runs.get(message.run_id).status), " ", time(message.at));
    last = message.run_id;
    const results = new Map(messages.filter((m) => m.role === "tool" && m.run_id === message.run_id).map((m) => [m.tool_call_id, m.content]));
    return [head, bubble(message, results)].filter(Boolean);
  });
}

function bubble(message, results) {
  const calls = (message.tool_calls ?? []).map((call) => folded(el("code", {}, visible(call.name)), () => el("div", {},
    pre(call.arguments, `Arguments of ${visible(call.name)}`), results.has(call.id) && pre(results.get(call.id), "Result"))));
  const inputs = message.role === "user" && message.content.startsWith("{");
  return el("li", { class: `bubble ${message.role}` }, el("span", { class: "unseen" }, `${message.role}: `),
    message.content && (inputs ? pre(message.content, "Inputs") : long(message.content, "p", { class: "said" })), calls);
}

/** The name of the agent's only text input, as which a message can be sent; null if there is none. */
function messageInput(agent) {
  const properties = Object.entries(agent?.inputs?.properties ?? {});
  const needed = agent?.inputs?.required ?? [];
  const texts = properties.filter(([name, schema]) => schema?.type === "string" && !schema.enum && (needed.length ? needed.includes(name) : true));
  return texts.length === 1 && needed.length <= 1 ? texts[0][0] : null;
}

function composer(agent, id, about, chat, onEnded, signal) {
  const input = agent && messageInput(agent);
  const errorBox = el("div", { role: "alert" });
  const field = el("textarea", { id: "message", rows: 3, class: "prose" });
  const send = el("button", { class: "main" }, "Send");
  const form = el("form", { class: "composer" }, el("label", { for: "message" }, `Message to ${visible(about.agent)}`), field, errorBox, el("p", { class: "buttons start" }, send));
  const node = input ? form : agent
    ? el("p", {}, el("a", { class: "button", href: `#/agents/${part(about.agent)}?session=${part(id)}` }, "Continue in the agent's form"))
    : el("p", { class: "meta" }, "Its agent is not there any more.");

  async function watch(run) {
    send.disabled = true;
    const text = el("p", { class: "said live" });
    chat.append(el("li", { class: "bubble assistant" }, text, el("a", { href: `#/runs/${part(run)}` }, "the run")));
    let written = "";
    for await (const event of follow(run, signal)) {
      if (event.type === "model.responded") written = "";
      if (event.type === "model.delta" && event.data.restarted) text.textContent = written = "";
      if (event.type === "model.delta" && event.data.text) {
        written += event.data.text;
        grow(text, written);
        chat.lastElementChild.scrollIntoView({ block: "end" });
      }
      if (["approval.requested", "tool_call.awaiting_client", "tool_call.awaiting_child"].includes(event.type)) text.textContent = "waits for an answer: see the run";
    }
    await onEnded();
    announce("Answered");
    send.disabled = false;
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!field.value.trim() || send.disabled) return;
    send.disabled = true;
    errorBox.replaceChildren();
    try {
      const run = await start(about.agent, "invoke-iterative", { inputs: { [input]: field.value }, session_id: id });
      chat.append(el("li", { class: "bubble user" }, el("p", { class: "said" }, visible(field.value))));
      field.value = "";
      await watch(run);
    } catch (problem) {
      send.disabled = false;
      if (!signal.aborted) errorBox.replaceChildren(notice(problem));
    }
  });
  field.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
  const failed = (problem) => {
    send.disabled = false;
    if (!signal.aborted) errorBox.replaceChildren(notice(problem));
  };
  return { node, watch: (run) => watch(run).catch(failed) };
}
