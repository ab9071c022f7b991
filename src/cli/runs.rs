//! `toolloop runs`: list, show, watch and cancel runs, and answer what they wait for.
//!
//! All data comes from the API; this only formats it.

use std::process::ExitCode;

use chrono::{DateTime, SecondsFormat, Utc};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strum::VariantNames as _;
use url::form_urlencoded::Serializer;
use uuid::Uuid;

use super::answers::{AnswerCommand, send_answer};
use super::client::{Client, NoDatabase, TargetArgs};
use super::event_follower::EventFollower;
use super::invoke::exit_code;
use super::kinds::{EVENT, ITERATION, RUN, TOOL_CALL};
use super::output::{json_line, line, one_line, print, print_json, print_notice};
use super::progress::{describe, parse_event};
use super::run_args::{RunArgs, id};
use super::run_view::{pending_text, run_table, run_text};
use super::{JsonArg, UsageError};
use crate::config::Flags;
use crate::run::{RunStatus, TerminationReason};
use crate::runtime::keys::DEFAULT_TENANT;

#[derive(Debug, Subcommand)]
pub(super) enum RunsCommand {
    /// List runs, newest first
    List(Box<ListArgs>),
    /// Show one run with its iterations and tool calls
    Show(RunArgs),
    /// Show a run's events as they happen, until it ends
    Watch(RunArgs),
    #[command(flatten)]
    Answer(AnswerCommand),
    /// Cancel a run in any status
    Cancel {
        /// Recorded in the run's error
        #[arg(long)]
        reason: Option<String>,
        #[command(flatten)]
        run: RunArgs,
    },
}

const LIST_EXAMPLES: &str = "\
Examples:
  toolloop runs list --status failed --since 24h
  toolloop runs list --agent repo-guide --metadata ticket=42 --json | jq '.data[].run_id'";

#[derive(Debug, Args)]
#[command(after_help = LIST_EXAMPLES)]
pub(super) struct ListArgs {
    /// Runs of this agent
    #[arg(long)]
    agent: Option<String>,
    /// Runs with this status
    #[arg(long, value_parser = PossibleValuesParser::new(RunStatus::VARIANTS))]
    status: Option<String>,
    /// Runs of this session
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Runs that ended for this reason
    #[arg(long, value_parser = PossibleValuesParser::new(TerminationReason::VARIANTS))]
    reason: Option<String>,
    /// Child runs of this run
    #[arg(long, value_name = "ID", value_parser = id)]
    parent: Option<Uuid>,
    /// Runs with this label; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    metadata: Vec<String>,
    /// Runs created after this: a time, or an age (30m, 24h, 7d)
    #[arg(long, value_name = "TIME", value_parser = super::times::past)]
    since: Option<DateTime<Utc>>,
    /// Runs created before this: a time, or an age
    #[arg(long, value_name = "TIME", value_parser = super::times::past)]
    until: Option<DateTime<Utc>>,
    /// Maximum number of runs
    #[arg(long, default_value = "50", value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    output: JsonArg,
}

pub(super) async fn runs(flags: &Flags, command: RunsCommand) -> anyhow::Result<ExitCode> {
    let target = match &command {
        RunsCommand::List(args) => &args.target,
        RunsCommand::Show(run) | RunsCommand::Watch(run) | RunsCommand::Cancel { run, .. } => {
            &run.target
        }
        RunsCommand::Answer(answer) => &answer.run().target,
    };
    let query =
        if let RunsCommand::List(args) = &command { list_query(args)? } else { String::new() };
    let opened = Client::open_existing(target, flags, DEFAULT_TENANT).await;
    if let (RunsCommand::List(args), Err(error)) = (&command, &opened)
        && error.is::<NoDatabase>()
    {
        print_notice(&error.to_string());
        return listed(args, &[], &Value::Null);
    }
    let client = opened?;
    let outcome = match &command {
        RunsCommand::List(args) => list(&client, args, &query).await,
        RunsCommand::Show(run) => show(&client, run).await,
        RunsCommand::Watch(run) => watch(&client, run).await,
        RunsCommand::Answer(answer) => send_answer(&client, answer).await,
        RunsCommand::Cancel { run, reason } => cancel(&client, run, reason.as_deref()).await,
    };
    client.close().await;
    outcome
}

fn list_query(args: &ListArgs) -> Result<String, UsageError> {
    let mut query = Serializer::new(String::new());
    let times = [("created_after", args.since), ("created_before", args.until)];
    let times = times.map(|(name, time)| {
        (name, time.map(|time| time.to_rfc3339_opts(SecondsFormat::Micros, true)))
    });
    for (name, value) in times {
        query.extend_pairs(value.map(|value| (name, value)));
    }
    let parent = args.parent.map(|id| id.to_string());
    for (name, value) in [
        ("agent", &args.agent),
        ("status", &args.status),
        ("session_id", &args.session),
        ("termination_reason", &args.reason),
        ("parent_run_id", &parent),
    ] {
        query.extend_pairs(value.as_ref().map(|value| (name, value)));
    }
    for label in &args.metadata {
        let (key, value) = label
            .split_once('=')
            .ok_or_else(|| UsageError(format!("--metadata: {label:?} is not KEY=VALUE")))?;
        query.append_pair(&format!("metadata.{key}"), value);
    }
    Ok(query.finish())
}

async fn list(client: &Client, args: &ListArgs, query: &str) -> anyhow::Result<ExitCode> {
    let path = format!("/runs?{query}");
    let (runs, next_cursor) = client.list(&path, args.limit as usize, &RUN).await?;
    listed(args, &runs, &next_cursor)
}

fn listed(args: &ListArgs, runs: &[Value], next_cursor: &Value) -> anyhow::Result<ExitCode> {
    if args.output.json {
        print_json(&json!({"data": runs, "next_cursor": next_cursor}))?;
    } else if runs.is_empty() {
        print_notice("No runs match.");
    } else {
        print(&run_table(runs))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn show(client: &Client, args: &RunArgs) -> anyhow::Result<ExitCode> {
    let mut run = client.get(&format!("/runs/{}", args.id), &RUN).await?;
    let (iterations, calls) =
        (format!("/runs/{}/iterations?", args.id), format!("/runs/{}/tool-calls?", args.id));
    let (iterations, _) = client.list(&iterations, usize::MAX, &ITERATION).await?;
    let (calls, _) = client.list(&calls, usize::MAX, &TOOL_CALL).await?;
    if args.output.json {
        run["parts"] = json!({"iterations": iterations, "tool_calls": calls});
        print_json(&run)?;
    } else {
        print(&run_text(&run, &iterations, &calls, client.options()))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn watch(client: &Client, args: &RunArgs) -> anyhow::Result<ExitCode> {
    if client.is_alone() {
        let run = client.get(&format!("/runs/{}", args.id), &RUN).await?;
        if run.get("finished_at").is_none_or(Value::is_null) {
            return show_so_far(client, args, &run).await;
        }
    }
    let mut following = EventFollower::existing(client, args.id);
    loop {
        let entry = following.next().await?;
        show_event(args, &entry.0)?;
        if let Some(answer) = entry.answer() {
            return Ok(exit_code(answer));
        }
    }
}

/// The stored events of a run; none is added while this command has the database.
async fn show_so_far(client: &Client, args: &RunArgs, run: &Value) -> anyhow::Result<ExitCode> {
    let id = args.id;
    let (events, _) = client.list(&format!("/runs/{id}/events?"), usize::MAX, &EVENT).await?;
    events.iter().try_for_each(|event| show_event(args, event))?;
    let options = client.options();
    let waiting = pending_text(run, options);
    let status = run.get("status").and_then(Value::as_str).unwrap_or_default();
    print_notice(&if waiting.is_empty() {
        format!(
            "Run {id} is {status}, and no service can continue it while this command has the database. Start one, \
             `toolloop serve{options}`, and follow the run there: `toolloop runs watch {id} --server URL`."
        )
    } else {
        format!("Run {id} waits for an answer:\n{waiting}")
    });
    Ok(exit_code(run))
}

fn show_event(args: &RunArgs, event: &Value) -> std::io::Result<()> {
    if args.output.json { json_line(event) } else { line(&event_line(event)) }
}

/// Sequence number, time, type and description of an event.
fn event_line(event: &Value) -> String {
    let text = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or_default();
    let time =
        DateTime::parse_from_rfc3339(text("at")).map(|at| at.format("%H:%M:%S%.3f").to_string());
    let seq = event.get("seq").and_then(Value::as_i64).unwrap_or_default();
    let said = parse_event(event).and_then(|event| describe(&event)).unwrap_or_default();
    let said = said.trim().replace('\n', "; ");
    let shown = format!(
        "{seq:>4}  {}  {:<22}  {said}",
        time.unwrap_or_default(),
        one_line(text("type"), 40)
    );
    shown.trim_end().to_owned()
}

async fn cancel(client: &Client, args: &RunArgs, reason: Option<&str>) -> anyhow::Result<ExitCode> {
    let body = reason.map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
    let run = client.post(&format!("/runs/{}/cancel", args.id), &body, &RUN).await?;
    if args.output.json {
        print_json(&run)?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&match run.get("status").and_then(Value::as_str) {
        Some("cancelled") => format!("Run {} is cancelled.", args.id),
        Some(status @ ("completed" | "failed")) => {
            format!("Run {} had already ended: {status}.", args.id)
        }
        _ => {
            let (id, options) = (args.id, client.options());
            format!("Run {id} is being cancelled: `toolloop runs watch {id}{options}`.")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
