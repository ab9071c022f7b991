// What each type of event looks like. A type that is missing here is shown as a folded line with its data.

import { count, duration, plural, visible, words } from "./format.js";
import { el, folded, long, pre } from "./dom.js";

/** A long text of which only the title is shown at first. */
const text = (title, content) => folded(title, () => pre(content, title));
const wait = (...children) => el("p", { class: "notice wait" }, children);
const because = (title, reason) => `${title}${reason ? `: ${visible(reason)}` : ""}`;
const wrong = (errors) =>
  el("ul", {}, errors.slice(0, 20).map((e) => el("li", {}, e.pointer && el("code", {}, visible(e.pointer)), " ", long(e.message, "span"))),
    errors.length > 20 && el("li", {}, `and ${errors.length - 20} more`));
const undecided = (title, { error, feedback }) =>
  ({ icon: "cross", tone: "bad", title, body: [long(error), text("Sent to the model", feedback)] });
const RESOLUTIONS = {
  approved: "Approved", denied: "Denied", expired: "Expired without an answer", result: "Result from the caller",
  happened: "Reviewed: it happened", did_not_happen: "Reviewed: it did not happen", child_ended: "The child run has ended",
};

/** Steps of their own: a line with an icon, and what can be opened below it. */
export const NOTES = {
  "run.queued": () => ({ icon: "queue", title: "Queued" }),
  "run.started": (d) => ({
    icon: "play", title: d.single_shot ? "Started, single shot" : "Started",
    body: [d.system && text("System prompt", d.system),
      d.turns.slice(-20).map((turn) => text(turn.user === undefined ? "Earlier turn" : "User message", turn.user ?? turn)),
      d.turns.length > 20 && el("p", { class: "meta" }, `${d.turns.length - 20} earlier turns are not shown`),
      d.warnings.map((warning) => wait(visible(warning)))],
  }),
  "session.loaded": (d) => ({
    icon: "talk", title: `Session ${visible(d.session_id)}`,
    meta: [plural(d.runs, "earlier run"), plural(d.turns, "turn"), `about ${count(d.tokens)} tokens`],
  }),
  "skill.activated": (d) => ({
    icon: "skill", title: `Skill ${visible(d.skill)}${d.inherited ? " (of the run that started this one)" : ""}`,
    meta: [d.allowed_tools && visible(`only ${d.allowed_tools.join(", ")}`),
      d.disallowed_tools?.length && visible(`not ${d.disallowed_tools.join(", ")}`),
      d.approval_required?.length && visible(`ask for ${d.approval_required.join(", ")}`), d.autonomy && `autonomy ${words(d.autonomy)}`],
  }),
  "run.resumed": (d) => ({
    icon: "loop", title: d.was_waiting ? "Continues: it has what it waited for" : "Continued on another replica or after a restart",
    meta: [d.deaths > 0 && plural(d.deaths, "replica crashed", "replicas crashed"), d.is_alone && "alone on its replica"],
  }),
  "approval.requested": (d) => ({
    icon: "ask", tone: "wait", title: d.tool ? `Asks whether to call ${visible(d.tool)}` : "Asks whether to continue",
    body: [long(d.reason), d.tool && text("Arguments", d.arguments)],
  }),
  "tool_call.awaiting_client": (d) => ({
    icon: "clock", tone: "wait", title: `Waits for the caller's result of ${visible(d.tool ?? "")}`, body: [text("Arguments", d.arguments)],
  }),
  "tool_call.awaiting_child": (d) => ({
    icon: "branch", tone: "wait", title: "Waits for a child run", run: d.child_run_id, meta: [d.reason && visible(d.reason)],
  }),
  "approval.resolved": (d) => ({
    icon: d.resolution === "denied" || d.resolution === "expired" ? "cross" : "check", by: d.decided_by,
    title: because(RESOLUTIONS[d.resolution] ?? words(d.resolution), d.reason),
    meta: [d.clears?.length && `cleared ${d.clears.map(words).join(", ")}`],
    body: [d.arguments && text("With other arguments", d.arguments), d.content && text("Result", d.content),
      d.result && text("Result", d.result)],
  }),
  "handoff.started": (d) => ({
    icon: "branch", title: `Handed over to ${visible(d.agent)}`, agent: d.agent, body: [d.reason && long(d.reason)],
  }),
  "scan.warned": (d) => ({
    icon: "shield", tone: "wait",
    title: `${d.withheld ? "Withheld" : "Suspicious"}: ${words(d.source)} ${visible(d.tool ?? d.pointer ?? "")}`.trim(),
    body: [wait(`Looks like a prompt injection: ${d.kinds.map(words).join(", ")}`,
      d.hidden_in?.length ? `; hidden in ${d.hidden_in.map(words).join(", ")}` : "")],
  }),
  "labels.changed": (d) => ({
    icon: "tag",
    title: d.cause === "approval"
      ? `An approval took labels from the run; it keeps ${d.labels.map(words).join(" and ") || "none"}`
      : `Has read ${d.labels.map(words).join(" and ") || "unlabelled"} data${d.tool ? `: ${visible(d.tool)}` : ""}`,
  }),
  "budget.warned": (d) => ({ icon: "limit", tone: "wait", title: "Budget warning", body: [long(d.warning)] }),
  "output.proposed": (d) => ({
    icon: "flag", title: "Output proposed", body: [d.problem && long(d.problem), text("Proposal", d.output)],
  }),
  "output.reflected": (d) => ({
    icon: "eye", tone: d.is_error && "bad", title: d.is_error ? "The proposal could not be rendered" : "The proposal was shown to the model",
    body: [text("What the model read", d.content)],
  }),
  "validation.failed": (d) => ({
    icon: "cross", tone: "bad", title: "Validation failed", body: [wrong(d.errors), text("Sent to the model", d.feedback)],
  }),
  "confirmation.requested": (d) => ({ icon: "ask", title: "Asked to confirm", body: [text("Prompt", d.prompt)] }),
  "decision.extraction_failed": (d) => undecided("No decision found", d),
  "decision.validation_failed": (d) => undecided("Decision not valid", d),
  "tool_choice.unmet": (d) => ({
    icon: "tool", tone: "wait", title: "A required tool call was not made",
    body: [d.warning && wait(visible(d.warning)), d.prompt && text("Sent to the model", d.prompt)],
  }),
  "model.retried": (d) => ({
    icon: "loop", tone: "wait",
    title: d.fallback ? `${visible(d.fallback)} takes over` : `The model is asked again${d.wait_ms ? ` in ${duration(d.wait_ms)}` : ""}`,
    meta: [`${visible(d.provider)}/${visible(d.model)}`, words(d.reason), d.status && `status ${d.status}`],
    body: [long(d.message)],
  }),
  "model.interrupted": (d) => ({
    icon: "stop", tone: "wait", title: "The model was interrupted while it answered",
    meta: [`${visible(d.provider)}/${visible(d.model)}`, `about ${count(d.usage.total_tokens)} tokens`],
  }),
  "answer.blank": (d) => ({ icon: "ask", tone: "wait", title: "The model said nothing and is asked again", body: [text("Prompt", d.prompt)] }),
  "context.compacted": (d) => ({
    icon: "compress", tone: "mark",
    title: `Conversation made smaller: ${count(d.tokens_before)} to ${count(d.tokens_after)} tokens`,
    meta: [d.cause === "provider_refused" ? "the provider refused it" : "the window was nearly full",
      d.window && `window ${count(d.window)}`, `${plural(d.cleared.length, "result")} cleared`,
      d.call && `summary took ${duration(d.call.latency_ms)}`],
    body: [d.summary && text(`Summary of ${plural(d.summary.turns, "turn")}`, d.summary.text)],
  }),
  "run.cancel_requested": (d) => ({ icon: "stop", tone: "bad", title: because("Cancel requested", d.reason) }),
};

/** Types that change a step which is there already, or open one that others belong to: see story.js. */
export const PARTS = [
  "attempt.started", "iteration.started", "model.delta", "model.responded", "call.given", "tool_call.started", "tool_call.progress",
  "tool_call.completed", "tool_call.blocked", "run.completed", "run.failed", "run.cancelled",
];

/** A type that is not known here. */
export const unknown = (type, data) =>
  ({ icon: "pulse", title: words(type), body: [Object.keys(data).length > 0 && text("Data", data)] });
