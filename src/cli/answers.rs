//! What `toolloop runs` answers to a run that waits: decisions, outcomes of reviewed calls, and results
//! of calls that the caller executes.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use uuid::Uuid;

use super::client::Client;
use super::kinds::RUN;
use super::output::{print, print_json};
use super::run_args::{RunArgs, id};
use super::run_view::pending_text;
use crate::bounds::json::in_words;

#[derive(Debug, Subcommand)]
pub(super) enum AnswerCommand {
    /// Approve a pending tool call, or let a run continue after a stop condition
    Approve {
        #[command(flatten)]
        call: CallArgs,
        /// Recorded with the decision
        #[arg(long)]
        reason: Option<String>,
        /// Arguments that replace the model's, as a JSON object
        #[arg(long, value_name = "JSON", value_parser = object)]
        arguments: Option<Value>,
        /// A label that the run no longer has, e.g. `untrusted`; can be repeated
        #[arg(long, value_name = "LABEL")]
        clears: Vec<String>,
        #[command(flatten)]
        asked: AskedArg,
    },
    /// Deny a pending tool call, or end a run after a stop condition
    Deny {
        #[command(flatten)]
        call: CallArgs,
        /// Recorded with the decision, and sent to the model
        #[arg(long)]
        reason: Option<String>,
        #[command(flatten)]
        asked: AskedArg,
    },
    /// Report whether a call took effect, if a crash left its outcome unknown
    Resolve {
        #[command(flatten)]
        call: CallArgs,
        /// Whether it took effect; if it did not, it is executed now
        #[arg(long, value_parser = ["happened", "did_not_happen"])]
        outcome: String,
        /// What the call returned, if it is known; sent to the model
        #[arg(long, value_name = "TEXT")]
        result: Option<String>,
        #[command(flatten)]
        asked: AskedArg,
    },
    /// Submit the result of a client tool, or the input that a tool asks for
    Result {
        #[command(flatten)]
        call: CallArgs,
        /// The result of a client tool; sent to the model
        #[arg(long, value_name = "TEXT", required_unless_present = "responses")]
        content: Option<String>,
        /// The call failed
        #[arg(long, requires = "content")]
        is_error: bool,
        /// The answers to the requests of a tool that asks for input, as a JSON object
        #[arg(long, value_name = "JSON", value_parser = object, requires = "round")]
        #[arg(conflicts_with = "content")]
        responses: Option<Value>,
        /// The round of the requests, as shown by `runs show --json`
        #[arg(long, value_name = "N", requires = "responses")]
        round: Option<u32>,
    },
}

#[derive(Debug, Args)]
pub(super) struct CallArgs {
    #[command(flatten)]
    run: RunArgs,
    /// The call's id, as shown by `runs show`
    #[arg(value_parser = id)]
    call: Uuid,
}

#[derive(Debug, Args)]
pub(super) struct AskedArg {
    /// The number of the event that asks, as shown by `runs show`; refused if the call was asked about again since
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    seq: Option<i64>,
}

impl AnswerCommand {
    fn call(&self) -> &CallArgs {
        match self {
            Self::Approve { call, .. }
            | Self::Deny { call, .. }
            | Self::Resolve { call, .. }
            | Self::Result { call, .. } => call,
        }
    }

    pub(super) fn run(&self) -> &RunArgs {
        &self.call().run
    }

    /// The last part of the address that the answer is sent to, and the body; fields that are `null`
    /// count as absent.
    fn request(&self) -> (&'static str, Value) {
        match self {
            Self::Approve { reason, arguments, clears, asked, .. } => (
                "approve",
                json!({
                    "reason": reason, "arguments": arguments, "clears": clears, "seq": asked.seq,
                }),
            ),
            Self::Deny { reason, asked, .. } => {
                ("deny", json!({"reason": reason, "seq": asked.seq}))
            }
            Self::Resolve { outcome, result, asked, .. } => {
                ("resolve", json!({"outcome": outcome, "result": result, "seq": asked.seq}))
            }
            Self::Result { content, is_error, responses, round, .. } => (
                "result",
                json!({
                    "content": content, "is_error": is_error, "responses": responses, "round": round,
                }),
            ),
        }
    }
}

fn object(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(_) => Err("it is not a JSON object".to_owned()),
        Err(error) => Err(format!("it is not JSON: {}", in_words(&error))),
    }
}

pub(super) async fn send_answer(
    client: &Client,
    answer: &AnswerCommand,
) -> anyhow::Result<ExitCode> {
    let CallArgs { run: RunArgs { id, output, .. }, call } = answer.call();
    let (action, body) = answer.request();
    let run = client.post(&format!("/runs/{id}/tool-calls/{call}/{action}"), &body, &RUN).await?;
    if output.json {
        print_json(&run)?;
        return Ok(ExitCode::SUCCESS);
    }
    let options = client.options();
    let waiting = pending_text(&run, options);
    print(&if !waiting.is_empty() {
        format!("Answer accepted. The run still waits:\n{waiting}")
    } else if client.is_remote() {
        format!("Answer accepted. Run {id} continues: `toolloop runs watch {id}{options}`.")
    } else if client.is_alone() {
        format!(
            "Answer accepted. Run {id} continues when the service is started: `toolloop serve{options}`."
        )
    } else {
        format!(
            "Answer accepted. Run {id} continues as soon as a service has this database: `toolloop runs watch {id}{options}`."
        )
    })?;
    Ok(ExitCode::SUCCESS)
}
