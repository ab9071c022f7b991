// What a service written in TypeScript does with toolloop: every call through the generated client, every
// answer by its generated type. `api.ts` is made from the service's own document by openapi-typescript.

import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

type Event = components["schemas"]["Event"];
type Problem = components["schemas"]["Problem"];
type RunStatus = components["schemas"]["RunStatus"];

const client = createClient<paths, "application/json" | "application/problem+json">({
  baseUrl: `${process.env["TOOLLOOP_URL"]}/v1`,
  headers: { Authorization: `Bearer ${process.env["TOOLLOOP_KEY"]}` },
  // Labels are parameters of their own: `metadata.ticket=42`.
  querySerializer: { object: { style: "form", explode: true } },
});

interface Answer<T> {
  data?: T;
  error?: Problem;
  response: Response;
}

function expect<T>(answer: Answer<T>, status: number): NonNullable<T> {
  assert.equal(answer.response.status, status, JSON.stringify(answer.error));
  assert.ok(answer.data !== undefined && answer.data !== null);
  return answer.data;
}

function refused(answer: Answer<unknown>, status: number): Problem {
  assert.equal(answer.response.status, status);
  assert.ok(answer.error);
  return answer.error;
}

const ended = (status: RunStatus): boolean => ["completed", "failed", "cancelled"].includes(status);

async function catalogue(): Promise<void> {
  const agents = expect(await client.GET("/agents"), 200);
  assert.deepEqual(agents.data.map((agent) => agent.name), ["reader", "stuck"]);
  const reader = expect(await client.GET("/agents/{name}", { params: { path: { name: "reader" } } }), 200);
  assert.equal(reader.limits.max_attempts, 3);
  const tools = expect(await client.GET("/tools"), 200);
  assert.ok(tools.data.some((tool) => tool.name === "file_ops" && tool.allowed));
}

async function aRunThatIsWaitedFor(): Promise<void> {
  const invoked = await client.POST("/agents/{name}/invoke-iterative", {
    params: { path: { name: "reader" }, header: { "Idempotency-Key": "typescript" } },
    body: { inputs: { path: "note.txt" }, metadata: { ticket: "ts 42" }, budget: { max_tool_calls: 5 }, tool_choice: "auto" },
  });
  const run = expect(invoked, 200);
  assert.ok("run_id" in run); // and no dry run
  assert.equal(invoked.response.headers.get("x-run-id"), run.run_id);
  assert.equal(run.status, "completed");
  assert.deepEqual(run.output, { text: "hello" });
  assert.equal(run.error, null);
  assert.deepEqual(run.tools_used, ["file_ops"]);

  const params = { path: { id: run.run_id } };
  const detail = expect(await client.GET("/runs/{id}", { params }), 200);
  assert.equal(detail.metadata["ticket"], "ts 42");
  assert.equal(detail.budget.limits?.max_tool_calls, 5);
  const events: Event[] = expect(await client.GET("/runs/{id}/events", { params }), 200).data;
  assert.deepEqual(events.map((event) => event.seq), events.map((_, at) => at + 1));
  assert.equal(events.at(-1)?.type, "run.completed");
  const iterations = expect(await client.GET("/runs/{id}/iterations", { params }), 200);
  assert.deepEqual(iterations.data.map((iteration) => iteration.finish_reason), ["tool_calls", "tool_calls"]);
  const calls = expect(await client.GET("/runs/{id}/tool-calls", { params }), 200);
  assert.deepEqual(calls.data.map((call) => [call.tool, call.decision, call.state]), [["file_ops", "allowed", "succeeded"]]);
  const messages = expect(await client.GET("/runs/{id}/messages", { params }), 200);
  assert.ok(messages.data.some((message) => message.role === "tool" && message.content.includes("hello")));

  const query = { status: "completed", metadata: { "metadata.ticket": "ts 42" }, limit: 5 } as const;
  const found = expect(await client.GET("/runs", { params: { query } }), 200);
  assert.deepEqual(found.data.map((found) => found.run_id), [run.run_id]);
  assert.equal(found.next_cursor, null);
}

async function aRunThatIsNot(): Promise<void> {
  const started = await client.POST("/agents/{name}/invoke-iterative", {
    params: { path: { name: "stuck" }, header: { Prefer: "respond-async" } },
    body: {},
  });
  const run = expect(started, 202);
  assert.ok("run_id" in run);
  assert.equal(started.response.headers.get("location"), `/v1/runs/${run.run_id}`);
  const path = { id: run.run_id };
  const early = expect(await client.GET("/runs/{id}/wait", { params: { path, query: { timeout: 0 } } }), 200);
  assert.ok(!ended(early.status));
  const cancelled = await client.POST("/runs/{id}/cancel", { params: { path }, body: { reason: "seen enough" } });
  expect(cancelled, 202);
  const late = expect(await client.GET("/runs/{id}/wait", { params: { path, query: { timeout: 20 } } }), 200);
  assert.equal(late.status, "cancelled");
  assert.equal(late.termination_reason, "cancelled");
  assert.equal(late.error?.code, "EXECUTION_CANCELLED");
}

async function aKey(): Promise<void> {
  const key = expect(await client.POST("/keys", { body: { name: "typescript", scopes: ["runs:read"] } }), 201);
  assert.ok(key.key.startsWith(`tl_${key.id}_`));
  const revoked = await client.DELETE("/keys/{id}", { params: { path: { id: key.id } } });
  assert.equal(revoked.response.status, 204);
  const listed = expect(await client.GET("/keys"), 200).data.find((listed) => listed.id === key.id);
  assert.ok(listed?.revoked_at);
}

async function refusals(): Promise<void> {
  const unknown = refused(await client.POST("/agents/{name}/invoke", { params: { path: { name: "nobody" } } }), 404);
  assert.equal(unknown.code, "NOT_FOUND");
  const invalid = await client.POST("/agents/{name}/invoke", {
    params: { path: { name: "reader" } },
    body: { inputs: { path: 7 } },
  });
  const problem = refused(invalid, 422);
  assert.equal(problem.code, "INVALID_INPUTS");
  assert.deepEqual(problem.errors?.map((error) => error.pointer), ["/inputs/path"]);
  assert.equal(problem.request_id, invalid.response.headers.get("x-request-id"));
}

await catalogue();
await aRunThatIsWaitedFor();
await aRunThatIsNot();
await aKey();
await refusals();
console.log("all calls answered as documented");
