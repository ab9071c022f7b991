// The service as the page sees it: who is signed in, requests and problems. The session is in a cookie that no script sees.

import { parse, stringify } from "./json.js";

/** Where the page is, which may be beneath the prefix itself. */
const PAGE_URL = new URL(".", document.baseURI).href;
const API_ROOT = new URL(PAGE_URL.endsWith("/v1/") ? "." : "v1/", PAGE_URL);
const SESSION = new URL("console/session", PAGE_URL);
/** Says that a request comes from a page of the console; pages of other sites cannot. */
const CONSOLE_HEADER = { "X-Toolloop-Console": "1" };

/** An answer that is an error (RFC 9457). */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail);
    this.status = status;
    this.body = body;
    this.detail = body.detail ?? `The service answered ${status}.`;
  }
}

/** The JSON of a response. */
export const read = async (answer) => parse(await answer.text());

/** Who is signed in, the same in all tabs: `{authentication, caller}`. */
let who = { authentication: "api_key", caller: null };
export const signedIn = () => who;
export const may = (scope) => (who.caller?.scopes ?? []).some((held) => held === scope || held === "admin");

async function session(method, key) {
  const headers = { ...CONSOLE_HEADER, ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(SESSION, { method, headers });
  const content = answer.status === 204 ? {} : await read(answer).catch(() => ({}));
  if (!answer.ok) throw new Problem(answer.status, content);
  return content;
}

/** Asks the service who is signed in. */
export async function loadCaller() {
  who = await session("GET");
  return who;
}

/** Exchanges an API key for a session; the key is not kept. */
export const signIn = (key) => session("POST", key);

export async function signOut() {
  await session("DELETE");
  who = { ...who, caller: null };
}

/** The full URL of a route. */
export const address = (path) => new URL(path, API_ROOT).href;

/** A name as a part of a path. */
export const part = (name) => encodeURIComponent(name);

/** Milliseconds that the clock of the service is ahead of ours. */
let ahead = 0;
export const serviceNow = () => Date.now() + ahead;

/** `body` is sent as JSON, `raw` as it is. */
export async function request(method, path, { body, raw, headers, signal } = {}) {
  const answer = await fetch(new URL(path, API_ROOT), {
    method,
    signal,
    headers: {
      ...CONSOLE_HEADER,
      ...(body && { "Content-Type": "application/json" }),
      ...headers,
    },
    body: body ? stringify(body) : raw,
  });
  const serviceTime = Date.parse(answer.headers.get("Date") ?? "");
  if (Math.abs(serviceTime - Date.now() - ahead) > 2000) ahead = serviceTime - Date.now();
  if (answer.ok) return answer;
  const problem = new Problem(answer.status, await read(answer).catch(() => ({})));
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("unauthenticated"));
  throw problem;
}

export const get = async (path, signal) => read(await request("GET", path, { signal }));

export const post = async (path, body, signal) => read(await request("POST", path, { body, signal }));

const pageOf = (path, cursor, signal) => get(path + (cursor && `${path.includes("?") ? "&" : "?"}cursor=${part(cursor)}`), signal);

/** The pages of a list, at most so many rows, and whether there are more. */
export async function first(path, signal, most) {
  const rows = [];
  let cursor = "";
  do {
    const page = await pageOf(path, cursor, signal);
    rows.push(...page.data);
    cursor = page.next_cursor;
  } while (cursor && rows.length < most);
  return { rows, more: Boolean(cursor) };
}

/** The pages of a list, at most so many rows. */
export const all = async (path, signal, most = 1000) => (await first(path, signal, most)).rows;

/** The last rows of a list, at most so many, and whether there are others before them. */
export async function last(path, signal, most) {
  let rows = [];
  let more = false;
  let cursor = "";
  do {
    const page = await pageOf(path, cursor, signal);
    rows.push(...page.data);
    more ||= rows.length > most;
    rows = rows.slice(-most);
    cursor = page.next_cursor;
  } while (cursor);
  return { rows, more };
}
