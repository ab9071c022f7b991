// Fields for a JSON schema: lists and objects are edited part by part; what has no control of its own is entered as JSON.
// Only the service validates the input; here only unreadable input is refused. A value that is filled in stays what
// it is: if its control would give it back changed, it is edited as JSON.

import { el } from "./dom.js";
import { escaped, visible } from "./format.js";
import { number, parse, same, stringify } from "./json.js";

/** Beyond this depth a value is entered as JSON. */
const DEPTH = 5;
/** Fields that are made of one schema, which can lead to itself. Objects beyond are entered as JSON. */
const FIELDS = 2000;
/** Entries of a list that have fields of their own. */
const ENTRIES = 200;
/** Lines of a text that are seen at once. */
const LINES = 12;
/** Texts with a format have one line; for these there are controls. */
const TYPES = { date: "date", email: "email", uri: "url", password: "password", time: "time" };

/** How many fields were made of a schema. */
const fieldCounts = new WeakMap();

/** Whether there is room for so many more fields; they are counted then. */
function hasRoom(count, root) {
  const all = fieldCounts.get(root) + count;
  if (all > FIELDS) return false;
  fieldCounts.set(root, all);
  return true;
}

/**
 * A field: `read(errors)` gives its value or `undefined`, `set(value)` fills it in, `find(path)` is the part that a
 * pointer's steps lead to, `complain(message)` says what is wrong with it, or nothing with null.
 */
export function makeField(id, label, schema, required = false, root = schema, depth = 0) {
  if (depth === 0) fieldCounts.set(root, 0);
  const known = resolved(schema, root);
  const more = { id, label: visible(label), schema: known, required, root, depth };
  const own = bySchema(more);
  let field = own;
  const show = (next) => {
    field.node.replaceWith(next.node);
    field = next;
  };
  return {
    get node() {
      return field.node;
    },
    read: (errors) => field.read(errors), find: (path) => field.find(path), complain: (message) => field.complain(message), clear: () => field.clear(),
    set(value) {
      own.set(value);
      const isRepresentable = value === undefined || same(own.read([]), value);
      show(isRepresentable ? own : leaf(more, json()));
      if (!isRepresentable) field.set(value);
    },
  };
}

function bySchema(more) {
  const { schema, depth, root } = more;
  if ("const" in schema) return fixed(more);
  const type = [schema.type].flat().find((name) => name !== "null");
  const names = Object.keys(schema.properties ?? {});
  if (depth < DEPTH && type === "object" && names.length && hasRoom(names.length, root)) return group(more);
  if (depth < DEPTH && type === "array" && isSchema(schema.items)) return list(more);
  return leaf(more, control(schema, type));
}

const isSchema = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Follows references within the document, a few at most. */
function resolved(schema, root) {
  let found = schema;
  for (let steps = 0; steps < 10 && typeof found?.$ref === "string" && found.$ref.startsWith("#/"); steps += 1) {
    const { $ref, ...beside } = found;
    const target = $ref.slice(2).split("/").reduce((value, key) => value?.[key.replaceAll("~1", "/").replaceAll("~0", "~")], root);
    found = { ...(isSchema(target) ? target : {}), ...beside };
  }
  return isSchema(found) ? found : {};
}

const description = (schema) => visible(schema.description ?? "");

const requiredMark = (isShown) => isShown && el("span", { class: "required", title: "required" }, " *");

/** The element of an error message, and `complain`, which shows one and marks the node as invalid. */
function errorMessage(id, marked) {
  const error = el("small", { id: `${id}-error`, class: "error" });
  const complain = (message) => {
    error.textContent = message ?? "";
    marked.setAttribute("aria-invalid", message !== null);
  };
  return { error, complain };
}

function fixed({ id, label, schema, required }) {
  const node = el("div", { class: "field" }, el("span", { class: "name" }, label), " ", el("code", { id }, visible(stringify(schema.const))));
  let isPresent = required;
  const self = { node, read: () => (isPresent ? schema.const : undefined), complain: () => {}, clear: () => {} };
  self.set = (value) => {
    isPresent = required || value !== undefined;
  };
  self.find = () => self;
  return self;
}

function leaf({ id, label, schema, required }, { node: input, read, write, isJson }) {
  const { error, complain } = errorMessage(id, input);
  const about = { id, "aria-required": required, "aria-describedby": `${id}-help ${id}-empty ${id}-error` };
  for (const [name, value] of Object.entries(about)) if (value) input.setAttribute(name, value);
  const help = el("small", { id: `${id}-help` }, description(schema), isJson && " JSON");
  const hint = el("small", { id: `${id}-empty` });
  const node = el("div", { class: "field" }, el("label", { for: id }, label, requiredMark(required && label)), input, help, hint, error);
  const self = { node, complain, clear: () => complain(null), find: () => self };
  let empty;
  const setEmptyValue = (value) => {
    empty = value;
    hint.textContent = value === undefined ? "" : ` Left empty, it is ${stringify(value)}.`;
  };
  input.addEventListener("input", () => setEmptyValue(undefined));
  self.set = (value) => {
    input.value = value === undefined ? "" : write(value);
    setEmptyValue(input.value === "" && (value === null || value === "") ? value : undefined);
  };
  self.read = (errors) => {
    try {
      if (input.validity.badInput) throw new Error("This cannot be read.");
      return input.value === "" ? empty : read(input.value);
    } catch (problem) {
      complain(problem.message);
      errors.push(self);
      return undefined;
    }
  };
  if (!["", null, undefined].includes(schema.default)) self.set(schema.default);
  return self;
}

function group({ id, label, schema, required, root, depth }) {
  const parts = Object.entries(schema.properties).map(([name, property]) => [
    name,
    makeField(`${id}-${name}`, property?.title ?? name, property, schema.required?.includes(name), root, depth + 1),
  ]);
  const node = el("fieldset", { id, class: "group", tabindex: -1 });
  const { error, complain } = errorMessage(id, node);
  node.append(el("legend", {}, label, requiredMark(required && label)), schema.description ? el("small", {}, description(schema)) : "",
    ...parts.map(([, field]) => field.node), error);
  const self = { node, complain, parts };
  self.find = ([step, ...rest]) => parts.find(([name]) => name === step)?.[1].find(rest) ?? self;
  self.clear = () => (complain(null), parts.forEach(([, field]) => field.clear()));
  let isPresent = required;
  self.set = (value) => {
    isPresent = required || value !== undefined;
    for (const [name, field] of parts) field.set(isSchema(value) && Object.hasOwn(value, name) ? value[name] : undefined);
  };
  self.read = (errors) => {
    const values = parts.map(([name, field]) => [name, field.read(errors)]).filter(([, value]) => value !== undefined);
    return values.length || isPresent ? Object.fromEntries(values) : undefined;
  };
  return self;
}

function list({ id, label, schema, required, root, depth }) {
  let isPresent = required;
  let made = 0;
  let items = [];
  const rows = el("ol");
  const node = el("fieldset", { id, class: "group", tabindex: -1 });
  const { error, complain } = errorMessage(id, node);
  const number = () => items.forEach(({ legend }, index) => (legend.textContent = `${index + 1}`));
  const add = (value) => {
    const field = makeField(`${id}-${made}`, "", schema.items, true, root, depth + 1);
    const legend = el("span", { class: "number" });
    const item = { field, legend };
    const remove = el("button", { type: "button", class: "quiet", "aria-label": `Remove an entry of ${label}`, onclick: () => {
      items = items.filter((other) => other !== item);
      item.row.remove();
      number();
      adder.focus();
    } }, "Remove");
    item.row = el("li", { class: "entry" }, legend, field.node, remove);
    made += 1;
    items.push(item);
    rows.append(item.row);
    if (value !== undefined) field.set(value);
    field.node.querySelector("input, select, textarea")?.setAttribute("aria-label", `Entry of ${label}`);
    number();
    return field;
  };
  const adder = el("button", { type: "button", class: "add", onclick: () =>
    add().node.querySelector("input, select, textarea, button")?.focus() }, `Add to ${label}`);
  node.append(el("legend", {}, label, requiredMark(required && label)), schema.description ? el("small", {}, description(schema)) : "", rows, adder, error);
  const self = { node, complain };
  self.find = ([step, ...rest]) => items[Number(step)]?.field.find(rest) ?? self;
  self.clear = () => (complain(null), items.forEach(({ field }) => field.clear()));
  self.set = (value) => {
    isPresent = required || value !== undefined;
    for (const { row } of items) row.remove();
    items = [];
    for (const entry of Array.isArray(value) ? value.slice(0, ENTRIES) : []) {
      if (!hasRoom(1, root)) break;
      add(entry);
    }
  };
  self.read = (errors) => {
    const isText = [schema.items.type].flat().includes("string");
    const values = items.map(({ field }) => field.read(errors)).map((value) => (value === undefined ? (isText ? "" : null) : value));
    return values.length || isPresent ? values : undefined;
  };
  if (schema.default !== undefined) self.set(schema.default);
  return self;
}

/** The control for a value without parts: how it is read, and how a value is written into it, empty where it cannot be. */
function control(schema, type) {
  if (Array.isArray(schema.enum) || type === "boolean") {
    const values = schema.enum ?? [true, false];
    const names = schema.enum ? values.map((value) => (typeof value === "string" ? value : stringify(value))) : ["yes", "no"];
    const options = names.map((name, index) => el("option", { value: index }, visible(name)));
    return {
      node: el("select", {}, el("option", { value: "" }, "–"), options), read: (index) => values[index],
      write: (value) => {
        const index = values.findIndex((other) => same(other, value));
        return index < 0 ? "" : index;
      },
    };
  }
  if (type === "integer" || type === "number") {
    const node = el("input", { type: "number", step: type === "integer" ? 1 : "any", min: schema.minimum, max: schema.maximum });
    return { node, read: number, write: (value) => value ?? "" };
  }
  if (type === "string") {
    const write = (value) => (typeof value === "string" ? value : "");
    if (!schema.format && !schema.writeOnly) return text((schema.maxLength ?? 0) > 200 ? 4 : 1, write);
    const node = el("input", { type: schema.writeOnly ? "password" : TYPES[schema.format] ?? "text", autocomplete: "off" });
    return { node, read: (line) => line, write };
  }
  return json();
}

/** A text may have lines: it is as high as they need, and Enter with a control key sends the form. */
function text(least, write) {
  const grow = (value) => {
    node.rows = Math.min(LINES, Math.max(least, value.split("\n").length));
    return value;
  };
  const send = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && node.form.requestSubmit();
  const node = el("textarea", { rows: least, class: "prose", oninput: () => grow(node.value), onkeydown: send });
  return { node, read: (value) => value, write: (value) => grow(write(value)) };
}

function json() {
  const read = (value) => {
    try {
      return parse(value);
    } catch (error) {
      throw new Error(`This is not JSON: ${error.message}`);
    }
  };
  return { node: el("textarea", { rows: 4, spellcheck: "false" }), read, write: (value) => escaped(stringify(value, 2)), isJson: true };
}
