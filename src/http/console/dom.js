// Elements and the words in them. Whatever a model, a tool or a caller wrote becomes a text node or an
// attribute's value, never markup.

/** An element; `on…` attributes are listeners, absent children and attributes are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

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

/** What went wrong, in place of what should be there. */
export function notice(problem) {
  const detail = problem.detail ?? "The service cannot be reached.";
  const id = problem.body?.request_id;
  return el("p", { class: "notice bad", role: "alert" }, detail, id && el("small", {}, ` Request ${id}`));
}

/** The end of an id, which tells it apart: its beginning is the time. */
export const short = (id) => id.slice(-8);

/** Names of the API in words: `awaiting_approval` is “awaiting approval”. */
export const words = (name) => String(name).replaceAll("_", " ");

export const status = (name) => el("span", { class: "status", "data-status": name }, words(name));

export const count = (number) => (number === null || number === undefined ? "–" : number.toLocaleString("en"));

export function money(usd) {
  if (usd === null || usd === undefined) return "–";
  return `$${usd.toFixed(usd !== 0 && Math.abs(usd) < 0.01 ? 6 : 2)}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  return seconds < 3600
    ? `${Math.floor(seconds / 60)} m ${seconds % 60} s`
    : `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} m`;
}

const clock = new Intl.DateTimeFormat("en-GB", {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit",
});

export const time = (iso) => (iso ? el("time", { datetime: iso, title: iso }, clock.format(new Date(iso))) : "–");

/** Indented where it is JSON, else as it is. */
export function pretty(value) {
  try {
    return JSON.stringify(typeof value === "string" ? JSON.parse(value) : value, null, 2) ?? "";
  } catch {
    return String(value);
  }
}

// Control characters, bidirectional marks, zero-width characters, selectors and tags.
const HIDDEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5"
  + "\\u180b-\\u180f\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb"
  + "\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]", "gu");

/** Text in which nothing is hidden, and nothing changes how the rest is seen. */
export const visible = (text) => text.replace(HIDDEN, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);

/** Text that keeps its lines; it can be scrolled with the keyboard. */
export const pre = (value, label) => el("pre", { tabindex: 0, "aria-label": label }, visible(pretty(value)));

/** Terms and what is said of them; pairs without a description are left out. */
export function facts(pairs) {
  const told = Object.entries(pairs).filter(([, what]) => what !== null && what !== undefined && what !== "");
  return el("dl", { class: "facts" }, told.map(([term, what]) => el("div", {}, el("dt", {}, term), el("dd", {}, what))));
}
