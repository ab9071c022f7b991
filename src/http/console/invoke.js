// An agent and the form that starts it, made from the schema of its inputs. Only the service validates the input; its
// errors are shown at the fields that they point to.

import { get, part, post } from "./api.js";
import { announce, el, folded, heading, notice, pre } from "./dom.js";
import { dryRun } from "./dry-run.js";
import { makeField } from "./fields.js";
import { short, visible } from "./format.js";
import { secretWarning, lacksSecret, snippets } from "./snippets.js";
import { start } from "./stream.js";

const LIMITS = [
  ["max_iterations", "Iterations"], ["max_attempts", "Attempts"], ["budget/max_tool_calls", "Tool calls"],
  ["budget/max_total_tokens", "Tokens"], ["budget/max_cost_usd", "Dollars", "number"], ["budget/max_duration_seconds", "Seconds"],
];
const OPTIONS = [
  ["session_id", "Session", { type: "string", format: "session-id" }],
  ["priority", "Priority", { type: "integer", minimum: -100, maximum: 100, description: "Of queued runs, higher ones first." }],
  ["available_at", "Not before", { type: "string", format: "date-time", description: "A time such as 2030-01-31T08:00:00Z." }],
  ["metadata", "Metadata", { type: "object", description: "Labels to find the run by." }],
];

export async function invoke(main, name, signal, params = new URLSearchParams()) {
  heading(visible(name), el("a", { href: `#/judge/${part(name)}` }, "Try its tools"), el("a", { href: `#/runs?agent=${part(name)}` }, "Runs"));
  const model = params.get("from");
  const [agent, earlier] = await Promise.all([
    get(`agents/${part(name)}`, signal), model && get(`runs/${part(model)}`, signal),
  ]);
  const form = new Form(agent);
  if (earlier) form.fill(earlier);
  if (params.has("session")) form.join(params.get("session"));
  const version = agent.version === "0.0.0" ? null : visible(`version ${agent.version}`);
  main.append(el("p", {}, visible(agent.description)),
    el("p", { class: "meta" }, [agent.model, ...agent.tools].map((name) => el("code", {}, visible(name))), version),
    earlier && el("p", { class: "notice" }, "With the inputs of ", el("a", { href: `#/runs/${part(model)}` }, `run ${short(model)}`)) || "",
    earlier && lacksSecret([earlier.inputs, earlier.overrides, earlier.metadata]) ? secretWarning() : "",
    form.node, folded("Definition", () => pre(agent, "Definition")));
}

class Form {
  constructor(agent) {
    this.agent = agent;
    const inputs = agent.inputs?.properties && Object.keys(agent.inputs.properties).length
      ? makeField("field-inputs", "Inputs", { ...agent.inputs, title: undefined }, true, agent.inputs)
      : makeField("field-inputs", "Inputs", { type: "object" });
    const field = ([pointer, label, schema]) => [pointer, makeField(`field-${pointer.replaceAll("/", "-")}`, label, schema)];
    this.limits = LIMITS.map(([pointer, label, type = "integer"]) => field([pointer, label, { type, minimum: type === "integer" ? 1 : 0 }]));
    const more = makeField("field-more", "Other options", { type: "object", description: "Any other field of the request." });
    this.fields = new Map([["inputs", inputs], ...this.limits, ...OPTIONS.map(field), ["", more]]);
    this.errorBox = el("div", { role: "alert" });
    this.result = el("div");
    const nodes = (pairs) => pairs.map(([, one]) => one.node);
    const caps = el("fieldset", {}, el("legend", {}, "Limits: the smaller of yours and the agent's applies"),
      el("div", { class: "columns" }, nodes(this.limits)));
    const choice = (value, label, checked) => el("label", { class: "choice" }, el("input", { type: "radio", name: "mode", value, checked }), label);
    this.options = el("details", {}, el("summary", {}, "Limits, session and metadata"), caps,
      OPTIONS.map(([pointer]) => this.fields.get(pointer).node), more.node);
    this.button = el("button", { class: "main" }, "Start run");
    this.node = el("form", {
      class: "card invoke", novalidate: true, onchange: () => (caps.disabled = this.mode() === "invoke"),
      onsubmit: (event) => (event.preventDefault(), this.attempt((body) => this.start(body))),
    },
    inputs.node,
    el("fieldset", { class: "row" }, el("legend", {}, "Mode"), choice("invoke-iterative", "Loop with tools", true), choice("invoke", "Single shot")),
    this.options, this.errorBox,
    el("p", { class: "buttons start" }, this.button,
      el("button", { type: "button", onclick: () => this.attempt((body) => this.tryOut(body)) }, "Dry run"),
      el("button", { type: "button", onclick: () => this.attempt(async (body) => this.showResult(snippets(this.route(), body))) }, "Copy as …")),
    this.result);
  }

  mode() {
    return new FormData(this.node).get("mode");
  }

  route() {
    return `agents/${part(this.agent.name)}/${this.mode()}`;
  }

  /** Fills in the request of an earlier run. */
  fill(run) {
    if (run.kind === "single") this.node.querySelector("[value=invoke]").click();
    const { budget, ...others } = run.overrides ?? {};
    const left = { ...others };
    const remainingBudget = { ...budget };
    for (const [pointer, field] of this.limits) {
      const [group, name] = pointer.includes("/") ? [remainingBudget, pointer.split("/")[1]] : [left, pointer];
      field.set(group[name] ?? undefined);
      delete group[name];
    }
    if (Object.keys(remainingBudget).length) left.budget = remainingBudget;
    this.fields.get("inputs").set(run.inputs);
    this.fields.get("session_id").set(run.session_id ?? undefined);
    this.fields.get("priority").set(run.priority || undefined);
    const { metadata } = run;
    this.fields.get("metadata").set(metadata && Object.keys(metadata).length ? metadata : undefined);
    const kept = Object.entries(left).filter(([, value]) => value !== null);
    this.fields.get("").set(kept.length ? Object.fromEntries(kept) : undefined);
    this.options.open = Boolean(run.session_id || kept.length || Object.keys(budget ?? {}).length);
  }

  /** Fills in the session that the run is to join. */
  join(session) {
    this.fields.get("session_id").set(session);
    this.options.open = true;
  }

  /** The request, or nothing where a field cannot be read. */
  body() {
    const errors = [];
    const { ...body } = this.fields.get("").read(errors) ?? {};
    for (const [pointer, field] of this.fields) {
      if (pointer === "" || (this.mode() === "invoke" && this.limits.some(([limit]) => limit === pointer))) continue;
      const value = field.read(errors);
      if (value === undefined) continue;
      const [group, name] = pointer.split("/");
      if (name) body[group] = { ...body[group], [name]: value };
      else body[group] = value;
    }
    body.inputs ??= {};
    return errors.length ? null : body;
  }

  async attempt(action) {
    if (this.button.disabled) return; // a held Enter key sends the form again, although its button is disabled
    this.errorBox.replaceChildren();
    for (const field of this.fields.values()) field.clear();
    const body = this.body();
    if (!body) return this.focusFirstError();
    this.button.disabled = true;
    try {
      await action(body);
    } catch (problem) {
      this.complain(problem);
    }
    this.button.disabled = false;
  }

  async start(body) {
    location.hash = `#/runs/${await start(this.agent.name, this.mode(), body)}`;
  }

  async tryOut(body) {
    const isSingle = this.mode() === "invoke";
    const answer = await post(isSingle ? this.route() : `agents/${part(this.agent.name)}/dry-run`, isSingle ? { ...body, dry_run: true } : body);
    this.showResult(dryRun(answer));
    announce("Dry run done");
  }

  showResult(node) {
    this.result.replaceChildren(node);
    node.querySelector("h2, h3, button")?.focus();
  }

  complain(problem) {
    const steps = (pointer) => pointer.split("/").slice(1).map((step) => step.replaceAll("~1", "/").replaceAll("~0", "~"));
    const unplaced = (problem.body?.errors ?? []).filter(({ pointer, message }) => {
      const missing = /^"(.+)" is a required property$/.exec(message);
      const path = [...steps(pointer), ...(missing ? [missing[1]] : [])];
      const field = this.fields.get(path.slice(0, 2).join("/"));
      const found = field ?? this.fields.get(path[0])?.find(path.slice(1));
      found?.complain(message);
      return !found;
    });
    if (!problem.body?.errors?.length || unplaced.length) {
      this.errorBox.replaceChildren(notice(problem), ...unplaced.map((e) => el("p", {}, visible(`${e.pointer} ${e.message}`))));
    }
    announce("Not started: please see the errors");
    this.focusFirstError();
  }

  focusFirstError() {
    const wrong = this.node.querySelector("[aria-invalid=true]");
    if (wrong && this.options.contains(wrong)) this.options.open = true;
    wrong?.focus();
  }
}
