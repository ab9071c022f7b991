// The service as the page sees it: requests with the key, problems, and the events of a run as they happen.

const ROOT = new URL("v1/", document.baseURI);
const KEY = "toolloop.key";
/** Milliseconds between tries to follow a run again. */
const PAUSE = 1000;
const ENDINGS = ["run.completed", "run.failed", "run.cancelled"];

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

/** Each event of a run, once and in order, until the last; a broken stream is resumed. */
export async function* follow(run, signal) {
  let seen = 0;
  let ended = false;
  while (!ended) {
    try {
      const headers = { Accept: "text/event-stream", ...(seen && { "Last-Event-ID": seen }) };
      const answer = await request("GET", `runs/${run}/events`, { headers, signal });
      ended = answer.status === 204;
      for await (const event of ended ? [] : frames(answer.body)) {
        seen = event.seq ?? seen; // pieces of an answer have no number
        ended = ENDINGS.includes(event.type);
        yield event;
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
