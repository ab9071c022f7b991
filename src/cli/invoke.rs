//! `toolloop invoke` and `toolloop tools call`: one run, progress on standard error, the answer on standard output.
//!
//! A terminal gets the output; a pipe, or `--json`, gets the whole response of the API. Ctrl-C,
//! SIGTERM and SIGHUP cancel the run and wait for its end; a second one exits immediately.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::client::{Client, ClientError, TargetArgs, segment};
use super::event_follower::{EventFollower, FIRST_PAUSE, LONGEST_PAUSE, RECONNECT_TIMEOUT};
use super::files_by_reference::file_references;
use super::interrupts::Interrupts;
use super::kinds::{AGENT, DRY_RUN, RUN};
use super::output::{human_readable, print, print_json, stdout_is_terminal};
use super::progress::Progress;
use super::run_view::pending_text;
use super::{JsonArg, UsageError};
use crate::bounds::json::in_words;
use crate::config::Flags;
use crate::message::visible::escaped;
use crate::runtime::keys::DEFAULT_TENANT;

/// The exit code after a cancelled run or a signal.
const INTERRUPTED: u8 = 130;

/// The exit code of a parked run.
const WAITING: u8 = 3;

/// How long a cancellation is repeated while the run does not exist yet.
const NOT_FOUND_PATIENCE: Duration = Duration::from_secs(5);

const AFTER_HELP: &str = "\
Without --server the run executes in this process, on the configured database. Progress goes to
standard error. Standard output gets the run's output if it is a terminal, and the whole response of
the API as JSON if it is a pipe or a file, or with --json.

Ctrl-C, SIGTERM and SIGHUP cancel the run and wait for its end; a second one exits immediately. While
the service is away, the cancellation is sent again, for up to a minute.

If the run waits for an approval, the command exits and the run stays parked: the pending calls go to
standard error, the run's current state to standard output as above.

Exit codes: 0 completed · 1 failed, or not started · 2 wrong usage · 3 waits for an answer · 130 cancelled

Examples:
  toolloop invoke repo-guide --input path=.
  toolloop invoke assistant --input task='What is in the README?' --server http://127.0.0.1:8080 --key tl_…
  toolloop invoke repo-guide --file in/a.csv=runs/0199…/files/out/a.csv
  toolloop invoke repo-guide --inputs '{\"path\": \"docs\"}' --json | jq .output.title";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct InvokeArgs {
    /// The agent's name
    agent: String,
    /// One input: KEY=TEXT, or KEY:=JSON; can be repeated
    #[arg(long = "input", value_name = "KEY=VALUE")]
    input: Vec<String>,
    /// All inputs as a JSON object
    #[arg(long, value_name = "JSON")]
    inputs: Option<String>,
    /// A copy of a file for the run: its path there, and the file's address in the API, e.g.
    /// in/a.csv=runs/ID/files/out/a.csv, sessions/ID/files/… or agents/NAME/files/…; can be repeated
    #[arg(long = "file", value_name = "PATH=ADDRESS")]
    files: Vec<String>,
    /// Make exactly one model call, without tools
    #[arg(long)]
    single: bool,
    /// Show the prompt, tools and limits that the run would have, without starting it
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    output: JsonArg,
}

const AFTER_CALL_HELP: &str = "\
The call is a run of its own in which no model is asked: its permission check, approvals, budgets and records are
those of any other run. The tool's result is the run's output. Everything else is as in `toolloop invoke`.

Exit codes: 0 completed · 1 failed, refused or not started · 2 wrong usage · 3 waits for an answer · 130 cancelled

Examples:
  toolloop tools call repo-guide file_ops --argument operation=read --argument path=README.md
  toolloop tools call repo-guide file_ops --arguments '{\"operation\": \"list\", \"path\": \".\"}' --json";

#[derive(Debug, Args)]
#[command(after_help = AFTER_CALL_HELP)]
pub(super) struct CallArgs {
    /// The agent's name
    agent: String,
    /// The tool, one of the agent's
    tool: String,
    /// One argument: KEY=TEXT, or KEY:=JSON; can be repeated
    #[arg(long = "argument", value_name = "KEY=VALUE")]
    argument: Vec<String>,
    /// All arguments as a JSON object
    #[arg(long, value_name = "JSON")]
    arguments: Option<String>,
    /// One input of the agent: KEY=TEXT, or KEY:=JSON; can be repeated
    #[arg(long = "input", value_name = "KEY=VALUE")]
    input: Vec<String>,
    /// The session to join, e.g. for its workspace
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    output: JsonArg,
}

pub(super) async fn invoke(flags: &Flags, args: InvokeArgs) -> anyhow::Result<ExitCode> {
    let inputs = parse_inputs(args.inputs.as_deref(), &args.input)?;
    let mut body = json!({"inputs": inputs});
    if !args.files.is_empty() {
        body["files"] = file_references(&args.files)?;
    }
    let client = Client::open(&args.target, flags, DEFAULT_TENANT).await?;
    if args.dry_run {
        client.prepare().await;
    } else {
        client.join().await?;
    }
    let route = if args.single { "invoke" } else { "invoke-iterative" };
    let answer = if args.dry_run {
        body["dry_run"] = true.into();
        dry_run(&client, &args.agent, route, &body).await
    } else {
        run(&client, &args.agent, route, body).await
    };
    client.close().await;
    let answer = answer?;
    if args.dry_run {
        print_json(&answer)?;
        return Ok(ExitCode::SUCCESS);
    }
    print_outcome(&answer, args.output.json)
}

pub(super) async fn call(flags: &Flags, args: CallArgs) -> anyhow::Result<ExitCode> {
    let arguments = parse_pairs("argument", args.arguments.as_deref(), &args.argument)?;
    let inputs = parse_inputs(None, &args.input)?;
    let mut body = json!({"tool": args.tool, "arguments": arguments, "inputs": inputs});
    if let Some(session) = args.session {
        body["session_id"] = session.into();
    }
    let client = Client::open(&args.target, flags, DEFAULT_TENANT).await?;
    client.join().await?;
    let answer = run(&client, &args.agent, "call", body).await;
    client.close().await;
    print_outcome(&answer?, args.output.json)
}

/// Prints the answer of a run.
fn print_outcome(answer: &Value, as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json || !stdout_is_terminal() {
        print_json(answer)?;
    } else if let Some(output) = answer.get("output").filter(|output| !output.is_null()) {
        print(&human_readable(output))?;
    }
    Ok(exit_code(answer))
}

fn path_of(agent: &str, route: &str) -> Result<String, ClientError> {
    Ok(format!("/agents/{}/{route}", segment(agent, "agent")?))
}

async fn dry_run(client: &Client, agent: &str, route: &str, body: &Value) -> anyhow::Result<Value> {
    Ok(client.post(&path_of(agent, route)?, body, &DRY_RUN).await?)
}

async fn run(client: &Client, agent: &str, route: &str, mut body: Value) -> anyhow::Result<Value> {
    let path = match path_of(agent, route) {
        Ok(path) => path,
        Err(error) => return Err(with_known_agents(client, agent, error).await),
    };
    let mut interrupts = Interrupts::listen().context("cannot handle signals")?;
    let run_id = Uuid::now_v7();
    body["run_id"] = json!(run_id);
    let mut progress = Progress::start();
    let (mut is_interrupted, mut is_cancelled) = (false, false);
    let started = tokio::select! {
        started = EventFollower::started(client, run_id, &path, &body) => started,
        reason = interrupts.next() => {
            (is_interrupted, is_cancelled) = (true, true);
            match cancel(client, run_id, reason, &mut interrupts, &progress).await {
                Ok(()) => Ok(EventFollower::existing(client, run_id)),
                Err(error) => {
                    progress.print(&not_cancelled_message(run_id, &error));
                    exit_now(&progress)
                }
            }
        }
    };
    let mut following = match started {
        Ok(following) => following,
        Err(error) => {
            progress.finish();
            return Err(with_known_agents(client, agent, error).await);
        }
    };
    let mut looks = FuturesUnordered::new();
    let outcome = loop {
        tokio::select! {
            entry = following.next() => match entry {
                Ok(entry) => {
                    progress.show(&entry.0);
                    if let Some(answer) = entry.answer() {
                        break Ok(answer.clone());
                    }
                    looks.extend(entry.parked_as().map(|status| parked(client, run_id, status)));
                }
                // A key that may not read the run gets only its status.
                Err(error) if is_cancelled && error.code() == Some("FORBIDDEN") => exit_now(&progress),
                Err(error) => break Err(error).context(continues_message(run_id)),
            },
            Some(seen) = looks.next() => match seen {
                Ok(Some((run, waiting))) => {
                    progress.print(&format!("run {run_id} waits for an answer:\n{waiting}"));
                    break Ok(run);
                }
                Ok(None) => {}
                Err(error) => break Err(error).context(continues_message(run_id)),
            },
            reason = interrupts.next() => {
                if std::mem::replace(&mut is_interrupted, true) {
                    if !is_cancelled {
                        progress.print(&may_continue_message(run_id));
                    }
                    exit_now(&progress);
                }
                match cancel(client, run_id, reason, &mut interrupts, &progress).await {
                    Ok(()) => is_cancelled = true,
                    Err(error) if error.is_transient() => {
                        break Err(error).context(may_continue_message(run_id));
                    }
                    Err(error) => progress.print(&not_cancelled_message(run_id, &error)),
                }
            }
        }
    };
    progress.finish();
    outcome
}

/// The run if it is parked, and what it waits for. It may be the last that there is to see of it, so
/// the service is asked again while it is away. A key that may not read the run learns `status`, which
/// the run has by its last event.
async fn parked(
    client: &Client,
    run_id: Uuid,
    status: &str,
) -> Result<Option<(Value, String)>, ClientError> {
    let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
    let run = loop {
        match client.get(&format!("/runs/{run_id}"), &RUN).await {
            Ok(run) => break run,
            Err(ClientError::Refused(refusal)) if refusal.status == 403 => {
                let waiting = "  what it waits for is shown to keys with the scope `runs:read`";
                let run = json!({"run_id": run_id, "status": status});
                return Ok(Some((run, waiting.to_owned())));
            }
            Err(error) if error.is_transient() && begun.elapsed() < RECONNECT_TIMEOUT => {}
            Err(error) => return Err(error),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    };
    let waiting = pending_text(&run, client.options());
    let is_driven = run.get("status").and_then(Value::as_str) == Some("running");
    // Other work of the run may continue while it waits.
    Ok((!waiting.is_empty() && !is_driven).then_some((run, waiting)))
}

/// Requests cancellation, again while the service is away, for as long as the follower would try to
/// reconnect, and for a while where the run may not be there yet; a second interrupt in the meantime
/// exits.
async fn cancel(
    client: &Client,
    run_id: Uuid,
    reason: &str,
    interrupts: &mut Interrupts,
    progress: &Progress,
) -> Result<(), ClientError> {
    progress.print("cancelling the run; press Ctrl-C again to exit immediately");
    let (path, reason) = (format!("/runs/{run_id}/cancel"), json!({ "reason": reason }));
    let accepted = async {
        let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            match client.post(&path, &reason, &RUN).await {
                Err(error) if error.is_transient() && begun.elapsed() < RECONNECT_TIMEOUT => {
                    if pause == FIRST_PAUSE {
                        progress.print(&format!(
                            "the cancellation is sent again until it is accepted: {error}"
                        ));
                    }
                }
                Err(error) if error.is_not_found() && begun.elapsed() < NOT_FOUND_PATIENCE => {}
                asked => return asked.map(drop),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    };
    tokio::select! {
        accepted = accepted => accepted,
        _ = interrupts.next() => {
            progress.print(&may_continue_message(run_id));
            exit_now(progress)
        }
    }
}

fn continues_message(run_id: Uuid) -> String {
    format!("run {run_id} continues in the background")
}

fn may_continue_message(run_id: Uuid) -> String {
    format!("the cancellation of run {run_id} was not accepted, so the run may continue")
}

fn not_cancelled_message(run_id: Uuid, error: &ClientError) -> String {
    format!("run {run_id} cannot be cancelled: {error}")
}

/// Exits the process without waiting for the run.
fn exit_now(progress: &Progress) -> ! {
    progress.finish();
    std::process::exit(INTERRUPTED.into())
}

/// Adds the names of the existing agents to an unknown-agent error, where the service lists them and
/// the agent is none of them.
async fn with_known_agents(client: &Client, agent: &str, error: ClientError) -> anyhow::Error {
    if error.code() != Some("NOT_FOUND") {
        return error.into();
    }
    let Ok((agents, _)) = client.list("/agents?", usize::MAX, &AGENT).await else {
        return error.into();
    };
    let names: Vec<&str> = agents.iter().filter_map(|it| it.get("name")?.as_str()).collect();
    if names.contains(&agent) {
        return error.into();
    }
    let hint = if names.is_empty() {
        "no agents are defined: write agents/<name>.yaml (`toolloop check` reports errors in it)"
            .to_owned()
    } else {
        format!("known agents: {}", escaped(&names.join(", ")))
    };
    anyhow::anyhow!("there is no agent named {agent:?}\n  {hint}")
}

pub(super) fn exit_code(answer: &Value) -> ExitCode {
    match answer.get("status").and_then(Value::as_str) {
        Some("completed") => ExitCode::SUCCESS,
        Some("cancelled") => ExitCode::from(INTERRUPTED),
        Some("awaiting_approval" | "awaiting_tool_results" | "needs_review") => {
            ExitCode::from(WAITING)
        }
        _ => ExitCode::from(1),
    }
}

/// The object of `--inputs`, overridden by every `--input`.
pub(super) fn parse_inputs(object: Option<&str>, pairs: &[String]) -> anyhow::Result<Value> {
    parse_pairs("input", object, pairs)
}

/// The same of options with another name.
fn parse_pairs(name: &str, object: Option<&str>, pairs: &[String]) -> anyhow::Result<Value> {
    let wrong = |message: String| anyhow::Error::from(UsageError(message));
    let mut inputs = match object.map(serde_json::from_str::<Value>) {
        None => Map::new(),
        Some(Ok(Value::Object(object))) => object,
        Some(Ok(_)) => return Err(wrong(format!("--{name}s: not a JSON object"))),
        Some(Err(e)) => return Err(wrong(format!("--{name}s: not JSON: {}", in_words(&e)))),
    };
    for pair in pairs {
        let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !matches!(*key, "" | ":"))
        else {
            return Err(wrong(format!("--{name}: {pair:?} is neither KEY=TEXT nor KEY:=JSON")));
        };
        let (key, value) = match key.strip_suffix(':') {
            Some(key) => match serde_json::from_str(value) {
                Ok(json) => (key, json),
                Err(e) => {
                    let why = in_words(&e);
                    return Err(wrong(format!("--{name} {key}: not JSON: {why}")));
                }
            },
            None => (key, Value::from(value)),
        };
        inputs.insert(key.to_owned(), value);
    }
    Ok(Value::Object(inputs))
}
