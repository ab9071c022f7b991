//! The command line: what was typed, and which exit code it ends with.
//!
//! Commands work in this process: `serve`, `invoke` and `check` on the whole service ([`crate::app`]),
//! `migrate` and `keys` on its store. Results go to standard output, everything else to standard
//! error. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 cancelled.

mod invoke;
mod keys;

use std::ffi::OsString;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::app;
use crate::config::{Config, ConfigError, Flags};
use crate::http;
use crate::telemetry::{LogFormat, Logs};

/// Runs LLM agents in governed tool-use loops and keeps a durable record of every run.
#[derive(Debug, Parser)]
#[command(name = "toolloop", version, propagate_version = true)]
struct Cli {
    #[command(flatten)]
    settings: SettingArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Flags that every command takes; they beat environment and file.
#[derive(Debug, Args)]
struct SettingArgs {
    /// Configuration file [default: toolloop.toml, if it is there]
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// Address and port to serve on
    #[arg(long, value_name = "ADDRESS", global = true)]
    listen: Option<String>,
    /// sqlite://FILE or postgres://…
    #[arg(long, value_name = "URL", global = true)]
    database_url: Option<String>,
    /// Directory of agent definitions
    #[arg(long, value_name = "DIR", global = true)]
    agents_dir: Option<String>,
    /// How logs are written
    #[arg(long, value_name = "FORMAT", global = true, default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the HTTP API (the default)
    Serve,
    /// Run an agent in this process, without a server
    Invoke(invoke::InvokeArgs),
    /// Check configuration and agent definitions
    Check(JsonArg),
    /// Bring the store's schema up to date
    Migrate,
    /// Print the OpenAPI document
    Openapi,
    /// Make, list and revoke API keys
    #[command(subcommand)]
    Keys(keys::KeysCommand),
}

#[derive(Debug, Clone, Copy, Args)]
struct JsonArg {
    /// Print JSON instead of text for people
    #[arg(long)]
    json: bool,
}

/// Does what the arguments say. Prints errors as one line.
pub async fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(usage) => {
            let code = u8::try_from(usage.exit_code()).unwrap_or(2);
            // Nothing can be told where neither output can be written to.
            let _ = usage.print();
            return code.into();
        }
    };
    execute(cli).await.unwrap_or_else(|error| {
        let code = if error.is::<ConfigError>() || error.is::<UsageError>() { 2 } else { 1 };
        eprintln!("toolloop: {error:#}");
        ExitCode::from(code)
    })
}

/// Arguments that are well-formed but make no sense.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

async fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let SettingArgs { config, listen, database_url, agents_dir, log_format } = cli.settings;
    let command = cli.command.unwrap_or(Command::Serve);
    if matches!(command, Command::Openapi) {
        return Ok(print(&http::openapi_json()));
    }
    let filter = if matches!(command, Command::Serve) { "info" } else { "warn" };
    let _logs = Logs::start(log_format, filter).map_err(|e| UsageError(e.to_string()))?;
    let config = Config::read(&Flags { config, listen, database_url, agents_dir })?;
    for notice in &config.notices {
        tracing::warn!("{notice}");
    }
    match command {
        Command::Serve => app::serve(config).await?,
        Command::Invoke(args) => return invoke::invoke(config, args).await,
        Command::Check(JsonArg { json }) => return Ok(check(&config, json)),
        Command::Migrate => {
            let store = app::open_store(&config).await?;
            store.migrate().await?;
            println!("The {} schema is up to date.", store.kind());
            store.close().await;
        }
        Command::Keys(command) => keys::keys(&config, command).await?,
        Command::Openapi => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a line to standard output; whoever closed it has read enough.
fn print(text: &str) -> ExitCode {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

fn check(config: &Config, json: bool) -> ExitCode {
    let problems = app::check(config);
    if json {
        println!("{}", serde_json::json!({ "problems": problems }));
    } else if problems.is_empty() {
        let file = config.file.as_ref().map_or("built-in settings".into(), |file| file.display().to_string());
        println!("{file} and the agents in {} are in order.", config.agents_dir.display());
    } else {
        println!("{}", problems.join("\n"));
    }
    ExitCode::from(u8::from(!problems.is_empty()))
}

#[cfg(test)]
#[path = "mod_tests.rs"]
mod tests;
