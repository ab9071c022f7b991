// A run once more: the same request at once, with changes in the form, or from a program.

import { part } from "./api.js";
import { announce, el, folded, notice } from "./dom.js";
import { lacksSecret, snippets } from "./snippets.js";
import { start } from "./stream.js";

const MODES = { single: "invoke", iterative: "invoke-iterative", call: "call" };
const mode = (run) => MODES[run.kind];

/** What the run was asked, without what belongs to it alone. */
function asked(run) {
  const overrides = Object.entries(run.overrides ?? {}).filter(([, value]) => value !== null);
  const { call, ...body } = { inputs: run.inputs ?? {}, ...Object.fromEntries(overrides) };
  Object.assign(body, call);
  if (run.session_id) body.session_id = run.session_id;
  if (run.priority) body.priority = run.priority;
  if (run.metadata && Object.keys(run.metadata).length) body.metadata = run.metadata;
  return body;
}

/** Buttons for the head of its page. A child is its parent's to start, and what lacks a secret cannot be sent as it is. */
export function again(run, main) {
  if (run.parent_run_id) return [];
  const form = run.kind === "call" ? "judge" : "agents";
  const change = el("a", { class: "button", href: `#/${form}/${part(run.agent)}?from=${part(run.run_id)}` }, "With changes …");
  if (lacksSecret(asked(run))) return [change];
  const repeat = el("button", { type: "button", onclick: async () => {
    repeat.disabled = true;
    try {
      location.hash = `#/runs/${await start(run.agent, mode(run), asked(run))}`;
      announce("Started again");
    } catch (problem) {
      main.prepend(notice(problem));
    }
    repeat.disabled = false;
  } }, "Run again");
  return [repeat, change];
}

export const snippetOf = (run) =>
  (run.parent_run_id ? null : folded("Copy as curl, TypeScript or Python", () => snippets(`agents/${part(run.agent)}/${mode(run)}`, asked(run))));
