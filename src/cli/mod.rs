//! The command line: parses the arguments, runs the command and returns its exit code.
//!
//! `serve`, `check`, `migrate` and `doctor` work on the configured service in this process
//! ([`crate::app`]); `invoke`, `runs` and `keys` use the API ([`client`]), in this process or over
//! the network. Results go to standard output, everything else to standard error. Exit codes:
//! 0 success, 1 failure, 2 wrong usage or configuration, 3 the run waits for an answer,
//! 130 cancelled.

mod answers;
mod audit;
mod client;
mod doctor;
mod event_follower;
mod files;
mod files_by_reference;
mod interrupts;
mod invoke;
mod keys;
mod kinds;
mod models;
mod output;
mod pages;
mod policy;
mod progress;
mod project;
mod run_args;
mod run_view;
mod runs;
mod schema;
mod shell_words;
mod table;
mod tenants;
mod times;
mod tools;

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use serde_json::json;

use crate::app::{self, AppError};
use crate::config::{Config, ConfigError, Flags};
use crate::http;
use crate::message::visible::escaped;
use crate::telemetry::{LogFormat, Logs};

const AFTER_HELP: &str = "\
Settings come from toolloop.toml, then the environment (TOOLLOOP_SERVER__LISTEN=…, DATABASE_URL=…), then
flags. All are optional: by default, agents are read from ./agents and runs are stored in ./toolloop.db.

Getting started:
  toolloop init demo && cd demo               a project with an agent and a tool of its own
  toolloop serve                              start the service; the first start prints an admin key
  toolloop invoke hello --input text=hi       run an agent without a server
  toolloop doctor                             check the setup

Exit codes: 0 success · 1 failure · 2 wrong usage or configuration · 3 the run waits for an answer · 130 cancelled";

/// Runs LLM agents in governed tool-use loops and keeps a durable record of every run.
#[derive(Debug, Parser)]
#[command(name = "toolloop", version, propagate_version = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    settings: SettingArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Flags of every command; they override environment and file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Settings")]
struct SettingArgs {
    /// Configuration file [default: toolloop.toml, if it exists]
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// IP address and port to serve on, e.g. 127.0.0.1:8080
    #[arg(long, value_name = "ADDRESS", global = true)]
    listen: Option<String>,
    /// Database, as sqlite://FILE or postgres://…
    #[arg(long, value_name = "URL", global = true)]
    database_url: Option<String>,
    /// Directory of agent definitions
    #[arg(long, value_name = "DIR", global = true)]
    agents_dir: Option<String>,
    /// Format of log lines
    #[arg(long, value_name = "FORMAT", global = true, default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the HTTP API (the default)
    Serve,
    /// Write the first files of a project: an agent, a tool, their settings and tests
    Init(project::InitArgs),
    /// Write another file of a project
    #[command(subcommand)]
    New(project::NewCommand),
    /// Run an agent and wait for its answer
    Invoke(invoke::InvokeArgs),
    /// List, show, watch and cancel runs; answer what they wait for
    #[command(subcommand)]
    Runs(runs::RunsCommand),
    /// List, get and put the files of a run
    #[command(subcommand)]
    Files(files::FilesCommand),
    /// Create, list and revoke API keys
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Judge recorded tool calls by another definition; test a policy with cases
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Verify and export the audit log
    #[command(subcommand)]
    Audit(audit::AuditCommand),
    /// List the model providers, and the models that agents use
    Models(JsonArg),
    /// Import tools from an OpenAPI document; call one tool
    #[command(subcommand)]
    Tools(tools::ToolsCommand),
    /// Check configuration and agent definitions
    #[command(after_help = CHECK_CODES)]
    Check(JsonArg),
    /// Check the setup and the reachability of database and models, with advice for each problem
    Doctor(JsonArg),
    /// Migrate the database schema to the current version
    Migrate(JsonArg),
    /// Print the JSON Schema of a file format, for editors and validators
    #[command(subcommand)]
    Schema(schema::SchemaCommand),
    /// Print the OpenAPI document
    Openapi,
    /// Print the completion script for a shell
    #[command(after_help = COMPLETION_EXAMPLES)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

const CHECK_CODES: &str = "\
Exit codes: 0 everything is valid · 1 a definition, a scenario or a tools file is invalid · 2 a setting is invalid";

const COMPLETION_EXAMPLES: &str = "\
Examples:
  toolloop completions bash > ~/.local/share/bash-completion/completions/toolloop
  toolloop completions zsh > ~/.zfunc/_toolloop
  toolloop completions fish > ~/.config/fish/completions/toolloop.fish";

#[derive(Debug, Clone, Copy, Args)]
struct JsonArg {
    /// Print JSON instead of human-readable text
    #[arg(long)]
    json: bool,
}

/// Runs the command line. Errors are printed to standard error.
pub async fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(usage) => {
            let code = u8::try_from(usage.exit_code()).unwrap_or(2);
            // If this fails there is nowhere to report it.
            let _ = usage.print();
            return code.into();
        }
    };
    execute(cli).await.unwrap_or_else(|error| {
        if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS; // the reader has closed the pipe on purpose
        }
        let is_of_configuration = error.is::<ConfigError>()
            || error.is::<UsageError>()
            || error.downcast_ref::<AppError>().is_some_and(AppError::is_of_configuration);
        let code = if is_of_configuration { 2 } else { 1 };
        output::print_notice(&format!("toolloop: {error:#}"));
        ExitCode::from(code)
    })
}

/// Arguments that parse but are invalid.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

async fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let SettingArgs { config, listen, database_url, agents_dir, log_format } = cli.settings;
    let flags = Flags { config, listen, database_url, agents_dir };
    let command = cli.command.unwrap_or(Command::Serve);
    match command {
        Command::Openapi => {
            output::print(&http::openapi_json())?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Schema(what) => {
            output::print_json(&schema::schema(what))?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Init(args) => {
            project::init(args)?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "toolloop", &mut script);
            output::print(String::from_utf8_lossy(&script).trim_end())?;
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    let filter = match command {
        Command::Serve => "info",
        Command::Doctor(_) => "off",
        _ => "warn",
    };
    let _logs = Logs::start(log_format, filter).map_err(|e| UsageError(e.to_string()))?;
    match command {
        Command::Serve => app::serve(Config::read(&flags)?, flags).await?,
        Command::New(command) => project::new(&flags, command)?,
        Command::Invoke(args) => return invoke::invoke(&flags, args).await,
        Command::Runs(command) => return runs::runs(&flags, command).await,
        Command::Files(command) => files::files(&flags, command).await?,
        Command::Keys(command) => keys::keys(&flags, command).await?,
        Command::Audit(command) => return audit::audit(&flags, command).await,
        Command::Models(JsonArg { json }) => models::models(&Config::read(&flags)?, json)?,
        Command::Tools(tools::ToolsCommand::Call(args)) => {
            return invoke::call(&flags, args).await;
        }
        Command::Tools(tools::ToolsCommand::Import(args)) => tools::import(args)?,
        Command::Check(JsonArg { json }) => {
            return check(&flags, json).await;
        }
        Command::Policy(command) => return policy::policy(&flags, command).await,
        Command::Doctor(JsonArg { json }) => return doctor::doctor(&flags, json).await,
        Command::Migrate(JsonArg { json }) => migrate(&Config::read(&flags)?, json).await?,
        Command::Init(_) | Command::Openapi | Command::Schema(_) | Command::Completions { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn migrate(config: &Config, json: bool) -> anyhow::Result<()> {
    let store = app::open_store(config).await?;
    let before = store.about().await?.applied;
    store.migrate().await?;
    let now = store.about().await?.applied;
    store.close().await;
    let kind = store.kind();
    if json {
        output::print_json(
            &json!({"store": kind, "status": "up_to_date", "from": before, "to": now}),
        )?;
        return Ok(());
    }
    output::print(&match before {
        0 => format!("The {kind} schema was created; its version is {now}."),
        _ if before < now => {
            format!("The {kind} schema was migrated from version {before} to {now}.")
        }
        _ => format!("The {kind} schema is up to date; its version is {now}."),
    })?;
    Ok(())
}

async fn check(flags: &Flags, json: bool) -> anyhow::Result<ExitCode> {
    let (config, unset) = match Config::read_without_secrets(flags) {
        Ok(read) => read,
        Err(first) => {
            let mistakes = Config::mistakes(flags);
            let lines = mistakes.iter().map(ToString::to_string).collect::<Vec<_>>();
            let lines = if lines.is_empty() { vec![first.to_string()] } else { lines };
            return broken_settings(lines, json);
        }
    };
    let config = &config;
    if let Err(error) = app::check_admin_key(config) {
        return broken_settings(vec![error.to_string()], json);
    }
    if let Err(error) = app::check_key_set(config).await {
        return broken_settings(vec![error], json);
    }
    if let Err(error) = app::router(config) {
        return broken_settings(vec![error.to_string()], json);
    }
    let mut findings = app::check(config, unset);
    findings.warnings.extend(app::due_restarts(config).await);
    let problems = &findings.problems;
    if json {
        output::print_json(&json!(findings))?;
        return Ok(ExitCode::from(u8::from(!problems.is_empty())));
    }
    for warning in &findings.warnings {
        output::print(&escaped(&format!("warning: {warning}")))?;
    }
    if problems.is_empty() {
        let file = config
            .file
            .as_ref()
            .map_or("built-in settings".into(), |file| file.display().to_string());
        let dir = config.agents_dir.display();
        let lost = match findings.not_loaded.as_slice() {
            [] => String::new(),
            names => format!(" A service started here would not load: {}.", names.join(", ")),
        };
        output::print(&format!("{file} and the agents in {dir} are valid.{lost}"))?;
    } else {
        output::print(&escaped(&problems.join("\n")))?;
    }
    Ok(ExitCode::from(u8::from(!problems.is_empty())))
}

/// What is wrong with the settings, so that nothing that depends on them was checked.
fn broken_settings(problems: Vec<String>, json: bool) -> anyhow::Result<ExitCode> {
    let error = UsageError(problems.join("\n"));
    if json {
        output::print_json(&json!(app::Findings { problems, ..Default::default() }))?;
    }
    Err(error.into())
}

#[cfg(test)]
#[path = "mod_tests.rs"]
mod tests;
