//! Runs as text for people: a table of several, the details of one.
//!
//! Formats the API's JSON and omits missing fields, so that an older command line can show the runs
//! of a newer service.

use serde_json::Value;

use super::output::{human_readable, one_line};
use super::shell_words::shell_word;
use super::table::table;
use crate::message::visible::escaped;

/// Maximum length of arguments and results in a list of calls, in characters.
const PAYLOAD: usize = 100;

/// Many runs, one line each.
pub(super) fn run_table(runs: &[Value]) -> String {
    let row = |run: &Value| {
        vec![
            text(run, "/run_id"),
            text(run, "/agent"),
            text(run, "/status"),
            text(run, "/termination_reason"),
            text(run, "/iterations"),
            text(run, "/tokens_used"),
            time(run, "/created_at"),
            duration(run, "/latency_ms"),
        ]
    };
    let head = ["ID", "AGENT", "STATUS", "REASON", "ITERATIONS", "TOKENS", "CREATED", "DURATION"];
    table(&head, &runs.iter().map(row).collect::<Vec<_>>())
}

/// One run with its iterations and tool calls. Commands that it names have these options.
pub(super) fn run_text(
    run: &Value,
    iterations: &[Value],
    calls: &[Value],
    options: &str,
) -> String {
    let mut parts = vec![fields(run, options)];
    if !iterations.is_empty() {
        parts.push(format!("Iterations\n{}", iteration_table(iterations)));
    }
    if !calls.is_empty() {
        let calls: Vec<String> = calls.iter().map(call_text).collect();
        parts.push(format!("Tool calls\n{}", calls.join("\n")));
    }
    if let Some(output) = run.get("output").filter(|output| !output.is_null()) {
        parts.push(format!("Output\n{}", human_readable(output)));
    }
    parts.join("\n\n")
}

fn fields(run: &Value, options: &str) -> String {
    let mut lines = Vec::new();
    let mut add = |name: &str, shown: String| {
        if !shown.is_empty() {
            lines.push(format!("{name:<11} {}", one_line(&shown, usize::MAX)));
        }
    };
    add("Run", text(run, "/run_id"));
    add("Agent", format!("{} {}", text(run, "/agent"), text(run, "/agent_version")));
    let reason = text(run, "/termination_reason");
    let status = text(run, "/status");
    add(
        "Status",
        if reason.is_empty() || reason == status { status } else { format!("{status}: {reason}") },
    );
    if run.get("error").is_some_and(|error| !error.is_null()) {
        add("Error", format!("{}: {}", text(run, "/error/code"), text(run, "/error/message")));
    }
    add("Model", text(run, "/model"));
    let cost =
        run.pointer("/usage/cost_usd").and_then(Value::as_f64).map(|usd| format!(", ${usd:.6}"));
    let (input, output) = (text(run, "/usage/input_tokens"), text(run, "/usage/output_tokens"));
    let cost = cost.unwrap_or_default();
    add("Tokens", format!("{} ({input} in, {output} out{cost})", text(run, "/tokens_used")));
    let (attempts, iterations) = (text(run, "/attempts"), text(run, "/iterations"));
    add(
        "Loop",
        format!(
            "{attempts} attempts, {iterations} iterations, {} tool calls",
            text(run, "/tool_calls_made")
        ),
    );
    add("Created", time(run, "/created_at"));
    add("Started", time(run, "/started_at"));
    add("Finished", time(run, "/finished_at"));
    add("Duration", duration(run, "/latency_ms"));
    add("Session", text(run, "/session_id"));
    add("Parent", text(run, "/parent_run_id"));
    for (name, pointer) in
        [("Metadata", "/metadata"), ("Overrides", "/overrides"), ("Inputs", "/inputs")]
    {
        add(name, object(run, pointer));
    }
    for warning in list(run, "/warnings") {
        add("Warning", warning.as_str().unwrap_or_default().to_owned());
    }
    for call in list(run, "/pending") {
        add("Waits for", pending_line(run, call));
        add("Answer", answering_command(call, options).unwrap_or_default());
    }
    lines.join("\n")
}

/// The pending calls of a run and the commands that answer them, with these options; empty if it waits
/// for nothing.
pub(super) fn pending_text(run: &Value, options: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for call in list(run, "/pending") {
        lines.push(format!("  {}", one_line(&pending_line(run, call), usize::MAX)));
        let reason = text(call, "/reason");
        lines
            .extend((!reason.is_empty()).then(|| format!("    {}", one_line(&reason, usize::MAX))));
        let forms = call.pointer("/input/requests").and_then(Value::as_object);
        for (name, form) in forms.into_iter().flatten() {
            let asked = format!("{name}: {}", text(form, "/message"));
            lines.push(format!("    asks for {}", one_line(&asked, usize::MAX)));
        }
        lines.extend(answering_command(call, options).map(|command| format!("    {command}")));
    }
    lines.join("\n")
}

fn answering_command(call: &Value, options: &str) -> Option<String> {
    let (action, answer) = match text(call, "/kind").as_str() {
        "approval" | "escalation" => ("approve", String::new()),
        "review" => ("resolve", " --outcome 'happened|did_not_happen'".to_owned()),
        "client" => match call.pointer("/input/round") {
            Some(round) => {
                let round = shell_word(&round.to_string());
                ("result", format!(" --round {round} --responses JSON"))
            }
            None => ("result", " --content TEXT".to_owned()),
        },
        _ => return None,
    };
    let [run, id] = ["/run_id", "/call_id"].map(|id| one_line(&text(call, id), usize::MAX));
    let (run, id) = (shell_word(&run), shell_word(&id));
    let seen = call.get("seq").filter(|_| action != "result");
    let seen =
        seen.map(|seq| format!(" --seq {}", shell_word(&seq.to_string()))).unwrap_or_default();
    Some(format!("toolloop runs {action} {run} {id}{seen}{options}{answer}"))
}

/// What a call waits for; of a child's, with the child's id.
fn pending_line(run: &Value, call: &Value) -> String {
    let of = format!(
        "{} of {} {}",
        text(call, "/kind"),
        text(call, "/tool"),
        object(call, "/arguments")
    );
    let until = time(call, "/expires_at");
    let until = if until.is_empty() { until } else { format!(" until {until}") };
    let (id, of_run) = (text(call, "/call_id"), text(call, "/run_id"));
    let is_own = of_run.is_empty() || of_run == text(run, "/run_id");
    let of_run = if is_own { String::new() } else { format!(" of run {of_run}") };
    format!("{} ({id}{of_run}){until}", of.trim_end())
}

fn iteration_table(iterations: &[Value]) -> String {
    let row = |iteration: &Value| {
        vec![
            format!("{}.{}", text(iteration, "/attempt"), text(iteration, "/number")),
            format!("{}/{}", text(iteration, "/provider"), text(iteration, "/model")),
            text(iteration, "/finish_reason"),
            text(iteration, "/usage/total_tokens"),
            duration(iteration, "/latency_ms"),
            text(iteration, "/retries"),
        ]
    };
    let head = ["NUMBER", "MODEL", "FINISH", "TOKENS", "LATENCY", "RETRIES"];
    table(&head, &iterations.iter().map(row).collect::<Vec<_>>())
}

/// A call with its state, the decision on it and its result.
fn call_text(call: &Value) -> String {
    let arguments = call.get("arguments").map(Value::to_string).unwrap_or_default();
    let place = format!("{}.{}", text(call, "/attempt"), text(call, "/iteration"));
    let mut lines = vec![
        format!(
            "{place}  {} {}",
            one_line(&text(call, "/tool"), 60),
            one_line(&arguments, PAYLOAD)
        ),
        format!("     {} {}", text(call, "/state"), duration(call, "/duration_ms"))
            .trim_end()
            .to_owned(),
    ];
    let decision = text(call, "/decision");
    if !decision.is_empty() && decision != "allowed" {
        lines.push(format!("     {decision}: {}", one_line(&text(call, "/reason"), usize::MAX)));
    }
    match text(call, "/reconciled").as_str() {
        "" => {}
        "happened" => lines.push("     asked after a crash: it took effect".to_owned()),
        _ => lines.push("     asked after a crash: it had not happened".to_owned()),
    }
    let result = text(call, "/result");
    if !result.is_empty() {
        lines.push(format!("     → {}", one_line(&result, PAYLOAD)));
    }
    lines.join("\n")
}

/// A string or a number; empty for null.
fn text(value: &Value, pointer: &str) -> String {
    match value.pointer(pointer) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => escaped(text).into_owned(),
        Some(other) => other.to_string(),
    }
}

/// JSON; empty for an empty object.
fn object(value: &Value, pointer: &str) -> String {
    let object = value
        .pointer(pointer)
        .filter(|value| value.as_object().is_some_and(|object| !object.is_empty()));
    object.map(Value::to_string).unwrap_or_default()
}

fn list<'v>(value: &'v Value, pointer: &str) -> impl Iterator<Item = &'v Value> {
    value.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

/// A time to the second, UTC.
pub(super) fn time(value: &Value, pointer: &str) -> String {
    let time = text(value, pointer);
    time.get(..19).map(|seconds| format!("{seconds}Z")).unwrap_or(time)
}

/// Formats milliseconds.
fn duration(value: &Value, pointer: &str) -> String {
    let Some(ms) = value.pointer(pointer).and_then(Value::as_u64) else { return String::new() };
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}.{}s", ms / 1_000, ms % 1_000 / 100),
        _ => format!("{}m{:02}s", ms / 60_000, ms % 60_000 / 1_000),
    }
}
