//! `toolloop invoke`: one run in this process, progress on standard error, the answer on standard output.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Map, Value};

use super::UsageError;
use crate::app;
use crate::config::Config;
use crate::event::{Event, RunEvent};
use crate::run::RunKind;

#[derive(Debug, Args)]
pub(super) struct InvokeArgs {
    /// The agent's name
    agent: String,
    /// One input: KEY=TEXT, or KEY:=JSON; may be repeated
    #[arg(long = "input", value_name = "KEY=VALUE")]
    input: Vec<String>,
    /// All inputs as a JSON object
    #[arg(long, value_name = "JSON")]
    inputs: Option<String>,
    /// Make exactly one model call, without tools
    #[arg(long)]
    single: bool,
}

pub(super) async fn invoke(config: Config, args: InvokeArgs) -> anyhow::Result<ExitCode> {
    let inputs = parse_inputs(args.inputs.as_deref(), &args.input)?;
    let kind = if args.single { RunKind::Single } else { RunKind::Iterative };
    let progress = |event: &Event| {
        if let Some(line) = progress_line(event) {
            eprintln!("{line}");
        }
    };
    let answer = app::invoke(config, &args.agent, inputs, kind, progress).await?;
    println!("{}", serde_json::to_string_pretty(&answer).context("the answer cannot be printed")?);
    Ok(exit_code(&answer))
}

/// 0 completed, 1 failed, 130 cancelled.
fn exit_code(answer: &Value) -> ExitCode {
    match answer.get("status").and_then(Value::as_str) {
        Some("completed") => ExitCode::SUCCESS,
        Some("cancelled") => ExitCode::from(130),
        _ => ExitCode::from(1),
    }
}

/// The object of `--inputs`, with every `--input` laid over it.
pub(super) fn parse_inputs(object: Option<&str>, pairs: &[String]) -> anyhow::Result<Value> {
    let wrong = |message: String| anyhow::Error::from(UsageError(message));
    let mut inputs = match object.map(serde_json::from_str::<Value>) {
        None => Map::new(),
        Some(Ok(Value::Object(object))) => object,
        Some(Ok(_)) => return Err(wrong("--inputs: not a JSON object".into())),
        Some(Err(error)) => return Err(wrong(format!("--inputs: not JSON: {error}"))),
    };
    for pair in pairs {
        let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !matches!(*key, "" | ":")) else {
            return Err(wrong(format!("--input: {pair:?} is neither KEY=TEXT nor KEY:=JSON")));
        };
        let (key, value) = match key.strip_suffix(':') {
            Some(key) => match serde_json::from_str(value) {
                Ok(json) => (key, json),
                Err(error) => return Err(wrong(format!("--input {key}: not JSON: {error}"))),
            },
            None => (key, Value::from(value)),
        };
        inputs.insert(key.to_owned(), value);
    }
    Ok(Value::Object(inputs))
}

/// What a person wants to know of an event while it happens.
pub(super) fn progress_line(event: &Event) -> Option<String> {
    Some(match &event.what {
        RunEvent::RunStarted { warnings, .. } => {
            let mut lines = vec![format!("run {}", event.run_id)];
            lines.extend(warnings.iter().map(|warning| format!("  warning: {warning}")));
            lines.join("\n")
        }
        RunEvent::IterationStarted { attempt, iteration } => format!("attempt {attempt}, iteration {iteration}"),
        RunEvent::ModelResponded(r) => format!(
            "  {}/{}: {} tokens, {} ms, {} tool call(s)",
            r.provider,
            r.model,
            r.usage.total_tokens(),
            r.latency_ms,
            r.message.tool_calls.len()
        ),
        RunEvent::ToolCallCompleted(c) => {
            let outcome = if c.failure.is_some() { "failed" } else { "ok" };
            format!("  {}: {outcome}, {} ms", c.tool, c.duration_ms)
        }
        RunEvent::ToolCallBlocked(c) => format!("  {}: {}, {}", c.tool, c.decision, c.reason),
        RunEvent::ValidationFailed { attempt, errors, .. } => {
            let mut lines = vec![format!("attempt {attempt} was not accepted")];
            lines.extend(errors.iter().map(|e| format!("  {} {}", e.pointer, e.message)));
            lines.join("\n")
        }
        RunEvent::RunCompleted(end) | RunEvent::RunFailed(end) | RunEvent::RunCancelled(end) => {
            let reason = end.outcome.error().map_or_else(String::new, |e| format!(": {}", e.message));
            format!("{} after {} ms{reason}", end.outcome.status().as_str(), end.latency_ms)
        }
        _ => return None,
    })
}
