// How values are said in words: numbers, money, times, names of the API.

import { parse, stringify } from "./json.js";

/** The end of an id, which tells it apart: its beginning is the time. */
export const short = (id) => String(id).slice(-8);

/** Names of the API in words: `awaiting_approval` is “awaiting approval”. */
export const words = (name) => String(name).replaceAll("_", " ");

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => (number === null || number === undefined ? "–" : whole.format(number));

/** A large number in at most four characters: 1.2k, 34M. */
export function brief(number) {
  if (number === null || number === undefined) return "–";
  return compact.format(number);
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

const UNITS = ["kilobyte", "megabyte", "gigabyte"];

/** A size in the largest unit of which it has one. */
export function bytes(size) {
  if (size < 1000) return plural(size, "byte");
  const unit = Math.min(UNITS.length, Math.floor(Math.log10(size) / 3));
  return (size / 1000 ** unit).toLocaleString("en", { style: "unit", unit: UNITS[unit - 1], unitDisplay: "short", maximumSignificantDigits: 3 });
}

/** Dollars, never so rounded that fewer than two significant digits are left. */
export function money(usd) {
  if (usd === null || usd === undefined) return "–";
  if (usd === 0) return "$0";
  const digits = Math.abs(usd) >= 0.1 ? 2 : Math.min(12, 1 - Math.floor(Math.log10(Math.abs(usd))));
  return `$${usd.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: digits })}`;
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

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** Indented where it is JSON, else as it is. */
export function pretty(value) {
  try {
    return stringify(typeof value === "string" ? parse(value) : value, 2) ?? "";
  } catch {
    return String(value);
  }
}

// Control characters, bidirectional marks, zero-width characters, selectors and tags.
const HIDDEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5"
  + "\\u180b-\\u180f\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb"
  + "\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]", "gu");

/** The same characters as escapes of JSON, in a text that is JSON. */
export const escaped = (json) => json.replace(HIDDEN, (char) =>
  char.split("").map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`).join(""));

/** Text in which nothing is hidden, and nothing changes how the rest is seen. */
export const visible = (text) => String(text).replace(HIDDEN, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
