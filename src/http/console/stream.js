// The events of a run as they happen: the answer of the request that started it, or the run's own stream.

import { part, request } from "./api.js";
import { parse } from "./json.js";

/** Milliseconds before a broken stream is opened again: the first time, and at most. Each failure in a row doubles them. */
const FIRST_PAUSE = 1000;
const MAX_PAUSE = 30_000;
/** Milliseconds that reading may keep the page from drawing. */
const SLICE = 12;
const ENDINGS = ["run.completed", "run.failed", "run.cancelled"];

/** Responses that are still streaming, by run; the page of the run continues to read them. */
const startedHere = new Map();

/** The headers that a request with a priority or a start time needs. */
export const queueHeaders = (body) => (body.available_at || body.priority ? { Prefer: "respond-async" } : {});

/** Starts a run whose response is a stream; resolves to its id as soon as it is known. */
export async function start(agent, mode, body) {
  const reading = new AbortController();
  const headers = { Accept: "text/event-stream", ...queueHeaders(body) };
  const answer = await request("POST", `agents/${part(agent)}/${mode}`, { body, headers, signal: reading.signal });
  const run = answer.headers.get("X-Run-Id");
  if (answer.headers.get("Content-Type")?.startsWith("text/event-stream")) startedHere.set(run, { answer, reading });
  else await answer.body?.cancel();
  return run;
}

/** Whether this page has started the run and still has its response. */
export const wasStartedHere = (run) => startedHere.has(run);

/** Each event of a run, once and in order, until the last; a broken stream is resumed. `onState` is called with `live` or `broken`. */
export async function* follow(run, signal, onState = () => {}) {
  let seen = 0;
  let ended = false;
  let wait = FIRST_PAUSE;
  while (!ended) {
    const opened = performance.now();
    try {
      const answer = await openStream(run, seen, signal);
      ended = answer.status === 204;
      onState("live");
      for await (const event of ended ? [] : frames(answer.body)) {
        if (event.seq !== undefined) {
          if (event.seq <= seen) continue;
          seen = event.seq;
        }
        wait = FIRST_PAUSE;
        ended = ENDINGS.includes(event.type);
        yield event;
      }
    } catch (problem) {
      // A stream over the limit of open requests (429) may be opened later.
      if (signal.aborted || (problem.status < 500 && problem.status !== 429)) throw problem;
    }
    if (ended) return;
    onState("broken");
    if (performance.now() - opened > MAX_PAUSE) wait = FIRST_PAUSE;
    await pause(wait, signal);
    wait = Math.min(2 * wait, MAX_PAUSE);
  }
}

/** Waits, but not for a page that is left. */
const pause = (milliseconds, signal) =>
  new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", resolve, { once: true });
  });

function openStream(run, seen, signal) {
  const first = startedHere.get(run);
  startedHere.delete(run);
  if (first && !seen) {
    signal.addEventListener("abort", () => first.reading.abort());
    return first.answer;
  }
  const headers = { Accept: "text/event-stream", ...(seen && { "Last-Event-ID": seen }) };
  return request("GET", `runs/${part(run)}/events`, { headers, signal });
}

/** The events of a stream (`text/event-stream`); comments and fields other than `data` are skipped. */
async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let since = performance.now();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) yield parse(data.map((line) => line.slice(5)).join("\n"));
      if (performance.now() - since > SLICE) {
        await new Promise((resolve) => setTimeout(resolve));
        since = performance.now();
      }
    }
  }
}
