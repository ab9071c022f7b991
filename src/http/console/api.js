// The service as the page sees it: requests with the key, problems, and the events of a run as they happen.

const ROOT = new URL("v1/", document.baseURI);
const KEY = "toolloop.key";
/** Milliseconds between tries to follow a run again. */
const PAUSE = 1000;

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
  if (answer.ok) return answer;
  const problem = new Problem(answer.status, await answer.json().catch(() => ({})));
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("unauthenticated"));
  throw problem;
}

export const get = async (path, signal) => (await request("GET", path, { signal })).json();

/** All pages of a list that is not long. */
export async function all(path, signal) {
  const rows = [];
  let cursor = "";
  do {
    const page = await get(path + (cursor && `?cursor=${cursor}`), signal);
    rows.push(...page.data);
    cursor = page.next_cursor;
  } while (cursor);
  return rows;
}

export const isFinal = (event) => ["run.completed", "run.failed", "run.cancelled"].includes(event.type);

/**
 * Gives each event of a run once and in order to `take`, until the last. A broken stream is resumed behind
 * the last event that came; what a proxy may have held back is read page by page.
 */
export async function follow(run, take, signal) {
  const path = `runs/${run}/events`;
  let seen = 0;
  let ended = false;
  const accept = (event) => {
    if (!(event.seq > seen)) return;
    seen = event.seq;
    ended = isFinal(event);
    take(event);
  };
  while (!ended) {
    try {
      const headers = { Accept: "text/event-stream", ...(seen && { "Last-Event-ID": seen }) };
      const answer = await request("GET", path, { headers, signal });
      for await (const event of frames(answer.body)) accept(event);
    } catch (problem) {
      if (signal.aborted || (problem.status < 500 && problem.status !== 406)) throw problem;
    }
    try {
      for (let more = !ended; more;) {
        const page = await get(`${path}?after=${seen}`, signal);
        page.data.forEach(accept);
        more = page.next_cursor;
      }
    } catch (problem) {
      if (signal.aborted || problem.status < 500) throw problem;
    }
    if (!ended) await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

/** The events of a stream (`text/event-stream`); comments and fields other than `data` are skipped. */
async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) yield JSON.parse(data.map((line) => line.slice(5)).join("\n"));
    }
  }
}
