// An agent and the form that invokes it, made from the schema of its inputs. The service alone judges what
// is entered; its errors are shown at the fields that they point to.

import { get, request } from "./api.js";
import { announce, el, heading, notice, pre } from "./dom.js";

const LIMITS = [
  ["/max_iterations", "Iterations"], ["/max_attempts", "Attempts"], ["/budget/max_tool_calls", "Tool calls"],
  ["/budget/max_total_tokens", "Tokens"], ["/budget/max_duration_seconds", "Seconds"],
];

export async function invoke(main, name, signal) {
  heading(name, el("a", { href: `#/runs?agent=${encodeURIComponent(name)}` }, "Runs"));
  const agent = await get(`agents/${encodeURIComponent(name)}`, signal);
  const fields = [...inputs(agent.inputs), ...options()];
  const trouble = el("div", { role: "alert" });
  const shown = (place) => fields.filter((field) => field.place === place).map((field) => field.node);
  const mode = (value, label, checked) =>
    el("label", { class: "choice" }, el("input", { type: "radio", name: "mode", value, checked }), label);
  const limits = el("fieldset", {}, el("legend", {}, "Limits: of yours and the agent's, the smaller holds"), shown("limits"));
  const single = () => new FormData(form).get("mode") === "invoke";

  async function submit(event) {
    event.preventDefault();
    trouble.replaceChildren();
    for (const field of fields) field.complain(null);
    const body = { inputs: {} };
    let ok = true;
    for (const field of fields) {
      if (field.place === "limits" && single()) continue;
      try {
        const value = field.value();
        if (value !== undefined) place(body, field.pointer, value);
      } catch (error) {
        field.complain(error.message);
        ok = false;
      }
    }
    if (!ok) return first();
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      const route = `agents/${encodeURIComponent(name)}/${new FormData(form).get("mode")}`;
      const answer = await request("POST", route, { body, headers: { Prefer: "respond-async" } });
      location.hash = `#/runs/${answer.headers.get("X-Run-Id")}`;
    } catch (problem) {
      button.disabled = false;
      complain(problem);
    }
  }

  function complain(problem) {
    const prefix = problem.body?.code === "INVALID_INPUTS" ? "/inputs" : "";
    const homeless = (problem.body?.errors ?? []).filter(({ pointer, message }) => {
      const missing = pointer === "" && /^"(.+)" is a required property$/.exec(message);
      const at = prefix + (missing ? `/${missing[1]}` : pointer);
      const field = fields.findLast((field) => at === field.pointer || at.startsWith(`${field.pointer}/`));
      field?.complain(message);
      return !field;
    });
    if (!problem.body?.errors?.length || homeless.length) {
      trouble.replaceChildren(notice(problem), ...homeless.map((e) => el("p", {}, `${e.pointer} ${e.message}`)));
    }
    announce("Not started: please see the errors");
    first();
  }
  const first = () => form.querySelector("[aria-invalid=true]")?.focus();

  const form = el("form", { class: "card invoke", novalidate: true, onsubmit: submit,
    onchange: () => (limits.disabled = single()) },
    el("fieldset", {}, el("legend", {}, "Inputs"), shown("inputs")),
    el("fieldset", { class: "row" }, el("legend", {}, "Mode"),
      mode("invoke-iterative", "Loop with tools", true), mode("invoke", "Single shot")),
    el("details", {}, el("summary", {}, "Limits, session and metadata"), limits, shown("options")),
    trouble, el("button", { class: "main" }, "Start run"));
  main.append(el("p", {}, agent.description),
    el("p", { class: "meta" }, agent.model, agent.tools.map((tool) => el("code", {}, tool)), `version ${agent.version}`),
    form, el("details", {}, el("summary", {}, "Definition"), pre(agent, "Definition")));
}

/** A field for each property, or one for all where the schema has none. */
function inputs(schema) {
  if (!schema?.properties) return [makeField("inputs", "/inputs", "Inputs", { type: "object", default: {} }, false)];
  return Object.entries(schema.properties).map(([name, property]) =>
    makeField("inputs", `/inputs/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`, property.title ?? name, property,
      schema.required?.includes(name)));
}

function options() {
  return [
    ...LIMITS.map(([pointer, label]) => makeField("limits", pointer, label, { type: "integer", minimum: 1 }, false)),
    makeField("options", "/session_id", "Session", { type: "string" }, false),
    makeField("options", "/metadata", "Metadata", { type: "object", description: "Labels to find the run by." }, false),
  ];
}

function makeField(place, pointer, label, schema, required) {
  const id = `field${pointer.replaceAll("/", "-")}`;
  const control = makeControl(schema);
  const error = el("small", { id: `${id}-error`, class: "error" });
  for (const [name, value] of Object.entries({ id, "aria-required": required, "aria-describedby": `${id}-help ${id}-error` })) {
    control.node.setAttribute(name, Boolean(value) && value);
  }
  const node = el("div", { class: "field" },
    el("label", { for: id }, label, required && el("span", { class: "required", title: "required" }, " *")),
    control.node, el("small", { id: `${id}-help` }, schema.description ?? "", control.json && " JSON"), error);
  const complain = (message) => {
    error.textContent = message ?? "";
    control.node.setAttribute("aria-invalid", message !== null);
  };
  const value = () => {
    if (control.node.validity.badInput) throw new Error("This is not a number.");
    return control.node.value === "" ? undefined : control.read(control.node.value);
  };
  return { place, pointer, node, value, complain };
}

/** The control for a schema and how to read it; what has no control of its own is entered as JSON. */
function makeControl(schema) {
  const type = [schema.type].flat().find((type) => type !== "null");
  const given = schema.default;
  if (schema.enum || type === "boolean") {
    const values = schema.enum ?? [true, false];
    const options = values.map((value, index) =>
      el("option", { value: index, selected: value === given }, typeof value === "string" ? value : JSON.stringify(value)));
    return { node: el("select", {}, el("option", { value: "" }, "–"), options), read: (index) => values[index] };
  }
  if (type === "integer" || type === "number") {
    const node = el("input", {
      type: "number", step: type === "integer" ? 1 : "any", min: schema.minimum, max: schema.maximum, value: given,
    });
    return { node, read: Number };
  }
  if (type === "string") {
    const long = (schema.maxLength ?? 0) > 200;
    const node = long ? el("textarea", { rows: 4 }, given) : el("input", { type: "text", value: given });
    return { node, read: (text) => text };
  }
  const read = (text) => {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`This is not JSON: ${error.message}`);
    }
  };
  return { node: el("textarea", { rows: 4, spellcheck: "false" }, given !== undefined && JSON.stringify(given)), json: true, read };
}

/** Puts a value where a pointer says. */
function place(body, pointer, value) {
  const path = pointer.slice(1).split("/").map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
  const last = path.pop();
  path.reduce((object, name) => (object[name] ??= {}), body)[last] = value;
}
