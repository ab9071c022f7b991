// Elements. Whatever a model, a tool or a caller wrote becomes a text node or an attribute's value, never markup.

import { pretty, visible, words } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
/** Characters of a long text that are shown at first, and how many more at a time. */
const INITIAL_CHARACTERS = 3000;
const MORE_CHARACTERS = 100_000;
/** The last characters of a live text that are shown; the whole text is shown when it is complete. */
const LIVE_CHARACTERS = 20_000;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element; `on…` attributes are listeners, absent children and attributes are left out. */
export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for a part of a drawing. */
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Announces a message to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** A page's heading: it names the tab and takes the focus, so that reading goes on there. */
export function heading(text, ...more) {
  document.title = `${text} · toolloop`;
  const title = el("h1", { tabindex: -1 }, text);
  document.getElementById("main").append(el("div", { class: "title" }, title, more));
  title.focus({ preventScroll: true });
  return title;
}

/** An error message, in place of the content that is missing. */
export function notice(problem) {
  const detail = problem.detail ?? (problem.status === undefined && problem.constructor !== Error
    ? "The service cannot be reached." : problem.message);
  const id = problem.body?.request_id;
  return el("p", { class: "notice bad", role: "alert" }, visible(detail), id && el("small", {}, ` Request ${id}`));
}

export const status = (name) => el("span", { class: "status", "data-status": name }, words(name));

const clock = new Intl.DateTimeFormat("en-GB", {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit",
});

export const time = (iso) => (iso ? el("time", { datetime: iso, title: iso }, clock.format(new Date(iso))) : "–");

/** A text whose end is left out where it is long, with a button that shows the rest. */
export function long(text, tag = "p", attributes = {}) {
  const all = visible(text);
  const node = el(tag, attributes, all.length > INITIAL_CHARACTERS * 1.2 ? all.slice(0, INITIAL_CHARACTERS) : all);
  let shown = node.textContent.length;
  if (shown === all.length) return node;
  const label = () => (all.length - shown > MORE_CHARACTERS
    ? `Show ${MORE_CHARACTERS.toLocaleString("en")} more of ${(all.length - shown).toLocaleString("en")} characters`
    : `Show all: ${(all.length - shown).toLocaleString("en")} more characters`);
  const more = el("button", { type: "button", class: "more", onclick: () => {
    node.append(all.slice(shown, shown + MORE_CHARACTERS));
    shown = Math.min(all.length, shown + MORE_CHARACTERS);
    if (shown < all.length) more.textContent = label();
    else more.remove();
  } }, label());
  return el("div", { class: "long" }, node, more);
}

/** Shows a text that is being written: each piece is added to what is there. */
export function grow(place, all) {
  const shown = visible(all.length > LIVE_CHARACTERS ? `… ${all.slice(-LIVE_CHARACTERS)}` : all);
  const old = place.textContent;
  if (shown.startsWith(old)) place.append(shown.slice(old.length));
  else place.textContent = shown;
}

/** Text that keeps its lines; it can be scrolled with the keyboard. */
export const pre = (value, label) => long(pretty(value), "pre", { tabindex: 0, role: "group", "aria-label": label });

/** A part that can be opened; its content is created then. */
export function folded(title, content, open = false) {
  const node = el("details", {}, el("summary", {}, title));
  const fillIn = () => node.children.length === 1 && node.append(content());
  node.addEventListener("toggle", () => node.open && fillIn());
  if (open) {
    fillIn();
    node.open = true;
  }
  return node;
}

/** A description list; terms without a description are left out. */
export function facts(pairs) {
  const described = Object.entries(pairs).filter(([, what]) => what !== null && what !== undefined && what !== false && what !== "");
  return el("dl", { class: "facts" }, described.map(([term, what]) => el("div", {}, el("dt", {}, term), el("dd", {}, what))));
}
