// The runs that a run delegated to, and theirs: a tree, flat and in order, each with its depth and its own spans.

import { all, get, part } from "./api.js";
import { parse, same } from "./json.js";

/** Runs whose parts are read, and how deep. */
const MAX_RUNS = 24;
const MAX_DEPTH = 4;

export class Children {
  constructor(run, signal) {
    this.run = run;
    this.signal = signal;
    /** The parts of ended runs, which do not change. */
    this.done = new Map();
    this.tree = [];
  }

  async load() {
    const tree = [];
    await this.loadBelow(this.run, 1, tree);
    this.tree = tree;
    return tree;
  }

  async loadBelow(parent, depth, tree) {
    if (depth > MAX_DEPTH || tree.length >= MAX_RUNS) return;
    const { data } = await get(`runs?parent_run_id=${part(parent)}&limit=${MAX_RUNS}`, this.signal);
    for (const run of data.reverse()) {
      if (tree.length >= MAX_RUNS) return;
      tree.push({
        run, depth, from: Date.parse(run.started_at ?? run.created_at), to: run.finished_at && Date.parse(run.finished_at),
        ...(await this.parts(run)),
      });
      if (run.tree_usage || !run.finished_at) await this.loadBelow(run.run_id, depth + 1, tree);
    }
  }

  async parts(run) {
    const known = this.done.get(run.run_id);
    if (known) return known;
    const path = `runs/${part(run.run_id)}`;
    const [detail, iterations, calls] = await Promise.all([
      get(path, this.signal),
      all(`${path}/iterations?limit=200`, this.signal), all(`${path}/tool-calls?limit=200`, this.signal),
    ]);
    const parts = {
      inputs: detail.inputs,
      model: iterations.map(({ started_at: at, latency_ms: took, number }) => {
        const from = Date.parse(at);
        return { from, to: from + took, label: `${run.agent}: iteration ${number}` };
      }),
      tools: calls.filter((call) => call.started_at).map((call) => ({
        from: Date.parse(call.started_at), to: call.finished_at ? Date.parse(call.finished_at) : null,
        label: `${run.agent}: ${call.tool}`, tone: call.is_error ? "bad" : undefined,
      })),
    };
    if (run.finished_at) this.done.set(run.run_id, parts);
    return parts;
  }

  /** Which call started which child: the call of its agent whose arguments are its inputs. */
  match(story) {
    const taken = new Set([...story.calls.values()].map((row) => row.child));
    for (const { run, depth, inputs } of this.tree) {
      if (depth > 1 || taken.has(run.run_id)) continue;
      const began = Date.parse(run.created_at) + 100;
      const row = [...story.calls.values()].find((call) => !call.child && call.ran && Date.parse(call.ran) <= began
        && call.call.name.endsWith(`:${run.agent}`) && hasInputs(call.call.arguments, inputs));
      if (row) story.change(row, { child: run.run_id });
    }
  }
}

/** Whether arguments, as the model wrote them, are these inputs. */
function hasInputs(written, inputs) {
  try {
    return same(parse(written) ?? {}, inputs ?? {});
  } catch {
    return false;
  }
}
