//! `toolloop policy`: what a definition would have decided on recorded calls, and cases that it must
//! decide as expected.

use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{Client, ClientError, segment};
use super::kinds::REPLAY;
use super::output::{print, print_json, print_notice};
use super::table::table;
use super::tenants::TenantArgs;
use super::{JsonArg, UsageError};
use crate::agents::{DefinitionError, is_agent_name, without_failed_examples};
use crate::app;
use crate::bounds::yaml;
use crate::config::{Config, Flags};
use crate::runtime::{CaseDecision, PolicyCase};

const REPLAY_EXAMPLES: &str = "\
Examples:
  toolloop policy replay --agent repo-guide --since 30d
  toolloop policy replay --agent repo-guide --definition agents/repo-guide.yaml --json";

const TEST_EXAMPLES: &str = "\
A file of cases:
  agent: repo-guide          # or definition: agents/repo-guide.yaml
  cases:
    - {tool: file_ops, arguments: {operation: read, path: README.md}, expect: allowed}
    - {tool: file_ops, arguments: {operation: write, path: .env, content: x}, expect: blocked, rule: path}
    - {tool: shell, actions: [{kind: exec, argv: [/usr/bin/git, push], effect: once}], expect: blocked}";

/// Runs that one request looks at.
const RUNS_OF_A_REQUEST: u64 = 1000;
/// Examples that are shown.
const MAX_EXAMPLES: usize = 100;

#[derive(Debug, Subcommand)]
pub(super) enum PolicyCommand {
    /// Judge recorded tool calls by another definition, and show which decisions change
    #[command(after_help = REPLAY_EXAMPLES)]
    Replay(ReplayArgs),
    /// Run cases against an agent's policy; exit code 1 if a decision is not as expected
    #[command(after_help = TEST_EXAMPLES)]
    Test {
        /// The file of cases
        file: PathBuf,
        /// Also write the results as JUnit XML
        #[arg(long, value_name = "FILE")]
        junit: Option<PathBuf>,
        #[command(flatten)]
        output: JsonArg,
    },
}

#[derive(Debug, Args)]
pub(super) struct ReplayArgs {
    /// The agent whose runs are judged
    #[arg(long)]
    agent: String,
    /// Definition file to judge by [default: the agent's own]
    #[arg(long, value_name = "FILE")]
    definition: Option<PathBuf>,
    /// Only runs created after this time, or within this age
    #[arg(long, value_name = "TIME|AGE", value_parser = super::times::past)]
    since: Option<DateTime<Utc>>,
    /// Only runs created before this time
    #[arg(long, value_name = "TIME|AGE", value_parser = super::times::past)]
    until: Option<DateTime<Utc>>,
    /// At most this many runs, newest first [default: all of the period]
    #[arg(long, value_name = "RUNS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    #[command(flatten)]
    access: TenantArgs,
    #[command(flatten)]
    output: JsonArg,
}

/// A file of cases.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseFile {
    #[serde(default)]
    agent: Option<String>,
    /// Relative to the file of cases.
    #[serde(default)]
    definition: Option<PathBuf>,
    cases: Vec<PolicyCase>,
}

/// A case and its result.
struct Outcome {
    name: String,
    /// What is wrong, if anything is.
    failure: Option<String>,
}

pub(super) async fn policy(flags: &Flags, command: PolicyCommand) -> anyhow::Result<ExitCode> {
    match command {
        PolicyCommand::Replay(args) => replay(flags, &args).await,
        PolicyCommand::Test { file, junit, output } => {
            let outcomes = test(flags, &file).await?;
            if let Some(path) = junit {
                std::fs::write(&path, junit_xml(&file, &outcomes))
                    .with_context(|| format!("{} cannot be written", path.display()))?;
            }
            report(&outcomes, output.json)
        }
    }
}

async fn replay(flags: &Flags, args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let mut request = json!({"since": args.since, "until": args.until});
    if let Some(file) = &args.definition {
        request["definition"] = read(file)?.into();
    }
    let client = args.access.open_existing(flags).await?;
    let replay = replay_all(&client, args, request).await;
    client.close().await;
    let replay = replay?;
    if args.output.json {
        print_json(&replay)?;
    } else {
        print(&replay_text(&replay))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The sum of as many answers as there are runs for.
async fn replay_all(
    client: &Client,
    args: &ReplayArgs,
    mut request: Value,
) -> Result<Value, ClientError> {
    let path = format!("/agents/{}/policy/replay", segment(&args.agent, "agent")?);
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut sum = Value::Null;
    loop {
        request["limit"] = left.min(RUNS_OF_A_REQUEST).into();
        let answer = client.post(&path, &request, &REPLAY).await?;
        let looked_at = answer.get("runs").and_then(Value::as_u64).unwrap_or_default();
        left = left.saturating_sub(looked_at);
        let next = answer.get("next_cursor").cloned().unwrap_or_default();
        sum = if sum.is_null() { answer } else { sum_of(sum, answer) };
        if next.is_null() || left == 0 {
            return Ok(sum);
        }
        if request.get("cursor") == Some(&next) {
            let what = "a page that leads to itself".to_owned();
            return Err(ClientError::UnexpectedResponse(what));
        }
        request["cursor"] = next;
    }
}

/// Two answers about different runs as one: numbers are added, and the first examples stay.
fn sum_of(mut sum: Value, more: Value) -> Value {
    let Value::Object(more) = more else { return sum };
    for (name, value) in more {
        let before = sum.get(&name).cloned().unwrap_or_default();
        let together = match (before, value) {
            (before @ Value::Object(_), value @ Value::Object(_)) => sum_of(before, value),
            (Value::Array(mut before), Value::Array(value)) => {
                let room = MAX_EXAMPLES.saturating_sub(before.len());
                before.extend(value.into_iter().take(room));
                before.into()
            }
            (Value::Number(before), Value::Number(value)) => {
                if let (Some(before), Some(value)) = (before.as_u64(), value.as_u64()) {
                    (before + value).into()
                } else {
                    let numbers = [before, value].map(|it| it.as_f64().unwrap_or_default());
                    numbers.iter().sum::<f64>().into()
                }
            }
            (_, value) => value,
        };
        sum[name] = together;
    }
    sum
}

fn replay_text(replay: &Value) -> String {
    let number = |pointer: &str| replay.pointer(pointer).cloned().unwrap_or_default();
    let mut text = format!(
        "{} calls in {} runs: {} unchanged, {} unknown.\nNewly blocked {}, escalated {}, warned {}, allowed {}, in {} runs that cost {} USD.\nCalls waited {:.1} hours for approvals that they would not need.",
        number("/calls"),
        number("/runs"),
        number("/unchanged"),
        number("/unknown"),
        number("/newly/blocked"),
        number("/newly/escalated"),
        number("/newly/warned"),
        number("/newly/allowed"),
        number("/changed_runs"),
        number("/cost_usd"),
        number("/waiting_hours").as_f64().unwrap_or_default(),
    );
    if replay.get("has_more") == Some(&Value::Bool(true)) {
        let _ = write!(
            text,
            "\nOnly the newest {} runs of the period were looked at: --limit; there are more.",
            number("/runs")
        );
    }
    let examples = replay.get("examples").and_then(Value::as_array).cloned().unwrap_or_default();
    if !examples.is_empty() {
        let cell = |row: &Value, field: &str| {
            row.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let rows: Vec<Vec<String>> = examples
            .iter()
            .map(|row| {
                ["run_id", "tool", "was", "would_be", "rule"].map(|field| cell(row, field)).into()
            })
            .collect();
        text.push_str("\n\n");
        text.push_str(&table(&["RUN", "TOOL", "WAS", "WOULD BE", "RULE"], &rows));
        let newly = replay.get("newly").and_then(Value::as_object).into_iter().flatten();
        let changes: u64 = newly.filter_map(|(_, count)| count.as_u64()).sum();
        let hidden = changes.saturating_sub(examples.len() as u64);
        if hidden > 0 {
            let _ = write!(text, "\n\n{hidden} more changes are not shown.");
        }
    }
    text
}

/// Runs the cases of a file, and the examples of the definition's own rules.
async fn test(flags: &Flags, file: &Path) -> anyhow::Result<Vec<Outcome>> {
    let (config, mut unset) = Config::read_without_secrets(flags)?;
    let cases: CaseFile = yaml::read(&read(file)?)
        .map_err(|error| UsageError(format!("{}: {}", file.display(), error.placed)))?;
    let path = definition_file(&config, file, &cases)?;
    let shown = path.display().to_string();
    let wrong = |message: &dyn Display| UsageError(format!("{shown}: {message}"));
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let (agent, failed) =
        without_failed_examples(stem, &read(&path)?).map_err(|error| wrong(&error))?;
    let bench = app::policy_bench(&config, &agent.definition, &mut unset);
    for line in app::unset_messages(&unset) {
        print_notice(&format!("warning: {line}"));
    }
    let bench = bench.map_err(|message| wrong(&message))?;
    let of_example = |error: DefinitionError| Outcome {
        name: error.key.clone(),
        failure: Some(format!("{shown}: {error}")),
    };
    let mut outcomes: Vec<Outcome> = failed.into_iter().map(of_example).collect();
    for (index, case) in cases.cases.iter().enumerate() {
        let name = case.name.clone().unwrap_or_else(|| format!("{} {}", case.tool, index + 1));
        let directory = tempfile::tempdir().context("no directory for a case can be made")?;
        let decided = match bench.missing(&case.tool) {
            Some(blocked) => Ok(blocked),
            None => bench.decide(case, directory.path()).await,
        };
        let failure = match decided {
            Ok(decided) => mismatch(case, &decided),
            Err(refused) => Some(refused.to_string()),
        };
        outcomes.push(Outcome { name, failure });
    }
    Ok(outcomes)
}

/// The file of the definition that is tested.
fn definition_file(config: &Config, file: &Path, cases: &CaseFile) -> Result<PathBuf, UsageError> {
    match (&cases.definition, &cases.agent) {
        (Some(path), None) => Ok(file.parent().unwrap_or(Path::new("")).join(path)),
        (None, Some(name)) if is_agent_name(name) => {
            let files = ["yaml", "yml"].map(|end| config.agents_dir.join(format!("{name}.{end}")));
            let is_there = files.into_iter().find(|path| path.is_file());
            is_there.ok_or_else(|| UsageError(format!("there is no agent named {name:?}")))
        }
        (None, Some(name)) => Err(UsageError(format!("there is no agent named {name:?}"))),
        _ => Err(UsageError(format!(
            "{}: name an agent or the file of a definition, one of them",
            file.display()
        ))),
    }
}

/// How a decision differs from the expected one.
fn mismatch(case: &PolicyCase, decided: &CaseDecision) -> Option<String> {
    let CaseDecision { decision, rule, reason, actions: _ } = decided;
    let is_as_expected = *decision == case.expect.as_str()
        && case.rule.as_ref().is_none_or(|expected| expected == rule);
    let expected = case.rule.as_ref().map(|rule| format!(" by {rule}")).unwrap_or_default();
    let reason = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    (!is_as_expected).then(|| {
        format!("expected {}{expected}, is {decision} by {rule}{reason}", case.expect.as_str())
    })
}

fn report(outcomes: &[Outcome], as_json: bool) -> anyhow::Result<ExitCode> {
    let failed = outcomes.iter().filter(|outcome| outcome.failure.is_some()).count();
    if as_json {
        let cases = outcomes
            .iter()
            .map(|outcome| json!({"name": outcome.name, "failure": outcome.failure}));
        print_json(&json!({"cases": cases.collect::<Vec<_>>(), "failed": failed}))?;
    } else {
        for Outcome { name, failure } in outcomes {
            if let Some(failure) = failure {
                print(&format!("FAILED {name}: {failure}"))?;
            }
        }
        print(&format!("{} cases, {failed} failed.", outcomes.len()))?;
    }
    Ok(ExitCode::from(u8::from(failed > 0)))
}

/// The results in the XML that CI systems read.
fn junit_xml(file: &Path, outcomes: &[Outcome]) -> String {
    let escaped = |text: &str| {
        let plain: String = text.chars().filter(|c| !c.is_control()).collect();
        plain.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
    };
    let failed = outcomes.iter().filter(|outcome| outcome.failure.is_some()).count();
    let suite = escaped(&file.display().to_string());
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"{suite}\" tests=\"{}\" failures=\"{failed}\">\n",
        outcomes.len()
    );
    for Outcome { name, failure } in outcomes {
        let failure = failure.as_ref().map_or_else(String::new, |failure| {
            format!("<failure message=\"{}\"/>", escaped(failure))
        });
        let _ = writeln!(xml, "  <testcase name=\"{}\">{failure}</testcase>", escaped(name));
    }
    xml.push_str("</testsuite>\n");
    xml
}

fn read(file: &Path) -> anyhow::Result<String> {
    let unreadable = |error| UsageError(format!("{} cannot be read: {error}", file.display()));
    Ok(std::fs::read_to_string(file).map_err(unreadable)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_about_different_runs_are_added() {
        let one = json!({"runs": 2, "cost_usd": 0.5, "newly": {"blocked": 3}, "examples": [1, 2],
            "has_more": true, "next_cursor": "x"});
        let more: Vec<u64> = (3..200).collect();
        let other = json!({"runs": 1, "cost_usd": 1.0, "newly": {"blocked": 4}, "examples": more,
            "has_more": false, "next_cursor": null});
        let sum = sum_of(one, other);
        assert_eq!((&sum["runs"], &sum["cost_usd"]), (&json!(3), &json!(1.5)));
        assert_eq!((&sum["newly"]["blocked"], &sum["has_more"]), (&json!(7), &json!(false)));
        assert_eq!(sum["examples"].as_array().map(Vec::len), Some(MAX_EXAMPLES));
        assert_eq!((&sum["examples"][2], &sum["next_cursor"]), (&json!(3), &Value::Null));
    }

    #[test]
    fn omitted_changes_are_reported() {
        let row = json!({"run_id": "r", "tool": "t", "was": "allowed", "would_be": "blocked", "rule": "path"});
        let replay = |more: bool, blocked: u64| {
            replay_text(
                &json!({"runs": 5, "newly": {"blocked": blocked}, "has_more": more, "examples": [row]}),
            )
        };
        let cut = replay(true, 3);
        assert!(cut.contains("Only the newest 5 runs of the period were looked at"), "{cut}");
        assert!(cut.ends_with("2 more changes are not shown."), "{cut}");
        let whole = replay(false, 1);
        assert!(!whole.contains("newest") && !whole.contains("not shown"), "{whole}");
    }
}
