// The service as the page sees it: requests with the key, and problems.

const ROOT = new URL("v1/", document.baseURI);
const KEY = "toolloop.key";

/** An answer that is an error (RFC 9457). */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail);
    this.status = status;
    this.body = body;
    this.detail = body.detail ?? `The service answered ${status}.`;
  }
}

/** The key lives as long as the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (token) => sessionStorage.setItem(KEY, token),
  clear: () => sessionStorage.removeItem(KEY),
};

/** The whole address of a route, for those who call it from elsewhere. */
export const address = (path) => new URL(path, ROOT).href;

/** A name as a part of a path. */
export const part = (name) => encodeURIComponent(name);

/** Milliseconds that the clock of the service is ahead of ours. */
let ahead = 0;
export const serviceNow = () => Date.now() + ahead;

export async function request(method, path, { body, headers, signal } = {}) {
  const token = key.get();
  const answer = await fetch(new URL(path, ROOT), {
    method,
    signal,
    headers: {
      ...(token && { Authorization: `Bearer ${token}` }),
      ...(body && { "Content-Type": "application/json" }),
      ...headers,
    },
    body: body && JSON.stringify(body),
  });
  const told = Date.parse(answer.headers.get("Date") ?? "");
  if (Math.abs(told - Date.now() - ahead) > 2000) ahead = told - Date.now();
  if (answer.ok) return answer;
  const problem = new Problem(answer.status, await answer.json().catch(() => ({})));
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("unauthenticated"));
  throw problem;
}

export const get = async (path, signal) => (await request("GET", path, { signal })).json();

export const post = async (path, body, signal) => (await request("POST", path, { body, signal })).json();

/** The pages of a list, at most so many rows. */
export async function all(path, signal, most = 1000) {
  const rows = [];
  let cursor = "";
  do {
    const page = await get(path + (cursor && `${path.includes("?") ? "&" : "?"}cursor=${part(cursor)}`), signal);
    rows.push(...page.data);
    cursor = page.next_cursor;
  } while (cursor && rows.length < most);
  return rows;
}
