// What a service written in TypeScript does with toolloop through a client with a function for each operation:
// `hey` is made from the service's own document by @hey-api/openapi-ts.

import assert from "node:assert/strict";
import { createClient } from "./hey/client/index.js";
import { getRun, invokeAgent, invokeAgentIterative, listEvents, streamAgent } from "./hey/sdk.gen.js";
import type { Event } from "./hey/types.gen.js";

const client = createClient({
  baseUrl: `${process.env["TOOLLOOP_URL"]}/v1`,
  auth: process.env["TOOLLOOP_KEY"],
});
const reader = { name: "reader" };
const inputs = { path: "note.txt" };

const { data: run, error } = await invokeAgentIterative({
  client,
  path: reader,
  body: { inputs, tool_choice: { tool: "file_ops" } },
});
assert.ok(run, JSON.stringify(error));
assert.equal(run.status, "completed");
assert.deepEqual(run.output, { text: "hello" });
const { data: detail } = await getRun({ client, path: { id: run.run_id } });
assert.equal(detail?.budget.used.tool_calls, 1);

const { data: page } = await listEvents({ client, path: { id: run.run_id } });
const last: Event | undefined = page && "data" in page ? page.data.at(-1) : undefined;
assert.ok(last?.type === "run.completed");
assert.equal(last.data.termination_reason, "completed");

const { error: problem, response } = await invokeAgent({ client, path: { name: "nobody" } });
assert.equal(response?.status, 404);
assert.ok(problem && problem.code === "NOT_FOUND");

const types: string[] = [];
const { stream } = await streamAgent({ client, path: reader, body: { inputs } });
for await (const event of stream) types.push((event as unknown as Event).type);
assert.equal(types[0], "run.started");
assert.equal(types.at(-1), "run.completed");
console.log("all calls answered as documented");
