//! `toolloop policy`: what a definition would have decided on recorded calls, and cases that it must
//! decide as expected.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{Client, TargetArgs};
use super::output::{print, print_json};
use super::table::table;
use super::{JsonArg, UsageError};
use crate::agents::Agent;
use crate::app;
use crate::bounds::yaml;
use crate::config::{Config, Flags};
use crate::runtime::keys::DEFAULT_TENANT;
use crate::runtime::{Decided, PolicyBench, PolicyCase};

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

#[derive(Debug, Subcommand)]
pub(super) enum PolicyCommand {
    /// Judge recorded tool calls by another definition, and show which decisions change
    #[command(after_help = REPLAY_EXAMPLES)]
    Replay(ReplayArgs),
    /// Run cases against an agent's policy; exit code 1 if one is decided otherwise
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
    /// The agent whose runs are looked at
    #[arg(long)]
    agent: String,
    /// The file of the definition that judges [default: the agent's own]
    #[arg(long, value_name = "FILE")]
    definition: Option<PathBuf>,
    /// Only runs created after this time, or within this age
    #[arg(long, value_name = "TIME|AGE", value_parser = super::runs::instant)]
    since: Option<DateTime<Utc>>,
    /// Only runs created before this time
    #[arg(long, value_name = "TIME|AGE", value_parser = super::runs::instant)]
    until: Option<DateTime<Utc>>,
    /// The newest runs only
    #[arg(long, value_name = "RUNS")]
    limit: Option<u32>,
    /// The tenant [default: default, or with --server the tenant of the key]
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
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

/// A case with what came of it.
struct Outcome {
    name: String,
    /// What is wrong, if anything is.
    failure: Option<String>,
}

pub(super) async fn policy(flags: &Flags, command: PolicyCommand) -> anyhow::Result<ExitCode> {
    match command {
        PolicyCommand::Replay(args) => replay(flags, &args).await,
        PolicyCommand::Test { file, junit, output } => {
            let outcomes = test(&Config::read(flags)?, &file).await?;
            if let Some(path) = junit {
                std::fs::write(&path, junit_xml(&file, &outcomes))
                    .with_context(|| format!("{} cannot be written", path.display()))?;
            }
            report(&outcomes, output.json)
        }
    }
}

async fn replay(flags: &Flags, args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let mut request = json!({"since": args.since, "until": args.until, "limit": args.limit});
    if let Some(file) = &args.definition {
        request["definition"] = read(file)?.into();
    }
    let tenant = args.tenant.as_deref().unwrap_or(DEFAULT_TENANT);
    let client = Client::open(&args.target, flags, tenant).await?;
    let answer = client.post(&format!("/agents/{}/policy/replay", args.agent), &request).await;
    client.close().await;
    let replay = answer?;
    if args.output.json {
        print_json(&replay)?;
    } else {
        print(&replay_text(&replay))?;
    }
    Ok(ExitCode::SUCCESS)
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
    }
    text
}

/// Runs the cases of a file.
async fn test(config: &Config, file: &Path) -> anyhow::Result<Vec<Outcome>> {
    let cases: CaseFile = yaml::read(&read(file)?)
        .map_err(|error| UsageError(format!("{}: {}", file.display(), error.placed)))?;
    let bench = bench(config, file, &cases)?;
    let mut outcomes = Vec::with_capacity(cases.cases.len());
    for (index, case) in cases.cases.iter().enumerate() {
        let name = case.name.clone().unwrap_or_else(|| format!("{} {}", case.tool, index + 1));
        let directory = tempfile::tempdir().context("no directory for a case can be made")?;
        let failure = match bench.decide(case, directory.path()).await {
            Ok(decided) => mismatch(case, &decided),
            Err(message) => Some(message),
        };
        outcomes.push(Outcome { name, failure });
    }
    Ok(outcomes)
}

fn bench(config: &Config, file: &Path, cases: &CaseFile) -> anyhow::Result<PolicyBench> {
    let (definition, name) = match (&cases.definition, &cases.agent) {
        (Some(path), None) => {
            let path = file.parent().unwrap_or(Path::new("")).join(path);
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let agent = Agent::from_yaml(stem, &read(&path)?);
            let agent =
                agent.map_err(|error| UsageError(format!("{}: {error}", path.display())))?;
            let name = path.display().to_string();
            (agent.definition, name)
        }
        (None, Some(name)) => match app::agents(config)?.agent(name) {
            Some(agent) => (agent.definition.clone(), name.clone()),
            None => bail!(UsageError(format!("there is no agent named {name:?}"))),
        },
        _ => bail!(UsageError(format!(
            "{}: name an agent or the file of a definition, one of them",
            file.display()
        ))),
    };
    app::policy_bench(config, &definition)
        .map_err(|message| UsageError(format!("{name}: {message}")).into())
}

/// What is not as expected.
fn mismatch(case: &PolicyCase, decided: &Decided) -> Option<String> {
    let Decided { decision, rule, reason, actions: _ } = decided;
    let is_as_expected =
        *decision == case.expect && case.rule.as_ref().is_none_or(|expected| expected == rule);
    let expected = case.rule.as_ref().map(|rule| format!(" by {rule}")).unwrap_or_default();
    let reason = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    (!is_as_expected)
        .then(|| format!("expected {}{expected}, is {decision} by {rule}{reason}", case.expect))
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
    std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))
}
