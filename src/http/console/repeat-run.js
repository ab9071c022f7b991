// Starting a run again: with the same request at once, with changes in the form, or from a program.

import { part } from "./api.js";
import { announce, el, folded, notice } from "./dom.js";
import { lacksSecret, snippets } from "./snippets.js";
import { start } from "./stream.js";

const MODES = { single: "invoke", iterative: "invoke-iterative", call: "call" };
const mode = (run) => MODES[run.kind];

/** The request that started a run, without its id and the like. */
function requestBody(run) {
  const overrides = Object.entries(run.overrides ?? {}).filter(([, value]) => value !== null);
  const { call, ...body } = { inputs: run.inputs ?? {}, ...Object.fromEntries(overrides) };
  Object.assign(body, call);
  if (run.session_id) body.session_id = run.session_id;
  if (run.priority) body.priority = run.priority;
  if (run.metadata && Object.keys(run.metadata).length) body.metadata = run.metadata;
  return body;
}

/** Buttons for the head of a run's page: none for a child run, and no repetition of a request whose secrets are redacted. */
export function repeatButtons(run, main) {
  if (run.parent_run_id) return [];
  const form = run.kind === "call" ? "judge" : "agents";
  const change = el("a", { class: "button", href: `#/${form}/${part(run.agent)}?from=${part(run.run_id)}` }, "With changes …");
  if (lacksSecret(requestBody(run))) return [change];
  const repeat = el("button", { type: "button", onclick: async () => {
    repeat.disabled = true;
    try {
      location.hash = `#/runs/${await start(run.agent, mode(run), requestBody(run))}`;
      announce("Started again");
    } catch (problem) {
      main.prepend(notice(problem));
    }
    repeat.disabled = false;
  } }, "Run again");
  return [repeat, change];
}

export const snippetOf = (run) =>
  (run.parent_run_id ? null : folded("Copy as curl, TypeScript or Python", () => snippets(`agents/${part(run.agent)}/${mode(run)}`, requestBody(run))));
