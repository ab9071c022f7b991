//! `toolloop files`: list, get and put the files of a run.
//!
//! Which files there are and what may be done with them is the service's answer, over the network or
//! in this process.

use std::io::{self, Read as _};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use futures::StreamExt as _;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use uuid::Uuid;

use super::JsonArg;
use super::client::{Client, ClientError, TargetArgs, segment};
use super::kinds::FILE;
use super::output::{print, print_json};
use super::run_args::id;
use super::run_view::time;
use super::table::table;
use crate::config::Flags;
use crate::runtime::keys::DEFAULT_TENANT;

#[derive(Debug, Subcommand)]
pub(super) enum FilesCommand {
    /// List the files of a run's workspace
    Ls {
        #[command(flatten)]
        place: PlaceArgs,
        /// Only files whose paths begin with this
        #[arg(long, default_value = "")]
        prefix: String,
        /// Maximum number of files
        #[arg(long, default_value = "1000", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        limit: u64,
        #[command(flatten)]
        output: JsonArg,
    },
    /// Write a file of a run's workspace to standard output, or to a file
    Get {
        #[command(flatten)]
        place: PlaceArgs,
        /// The file's path in the workspace
        path: String,
        /// Where to write it
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Put a file into a run's workspace
    Put {
        #[command(flatten)]
        place: PlaceArgs,
        /// The file's path in the workspace
        path: String,
        /// The file to put there; - for standard input
        file: PathBuf,
        #[command(flatten)]
        output: JsonArg,
    },
}

#[derive(Debug, Args)]
pub(super) struct PlaceArgs {
    /// The run's id
    #[arg(value_parser = id)]
    run: Uuid,
    #[command(flatten)]
    target: TargetArgs,
}

pub(super) async fn files(flags: &Flags, command: FilesCommand) -> anyhow::Result<()> {
    let target = match &command {
        FilesCommand::Ls { place, .. }
        | FilesCommand::Get { place, .. }
        | FilesCommand::Put { place, .. } => &place.target,
    };
    let client = Client::open_existing(target, flags, DEFAULT_TENANT).await?;
    let done = run(&client, command).await;
    client.close().await;
    done
}

async fn run(client: &Client, command: FilesCommand) -> anyhow::Result<()> {
    match command {
        FilesCommand::Ls { place, prefix, limit, output } => {
            let path = format!("/runs/{}/files?prefix={}", place.run, encoded(&prefix));
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let (rows, next_cursor) = client.list(&path, limit, &FILE).await?;
            if output.json {
                print_json(&json!({"data": rows, "next_cursor": next_cursor}))?;
            } else {
                print(&listed(&rows))?;
            }
        }
        FilesCommand::Get { place, path, output } => {
            let mut content = client.content(&url(place.run, &path)?).await?.into_data_stream();
            let mut file: Box<dyn io::Write> = match &output {
                None => Box::new(io::stdout()),
                Some(file) => {
                    let name = file.display().to_string();
                    Box::new(std::fs::File::create(file).context(name)?)
                }
            };
            while let Some(chunk) = content.next().await {
                file.write_all(&chunk.map_err(|error| client.broken(&error))?)?;
            }
            file.flush()?;
        }
        FilesCommand::Put { place, path, file, output } => {
            let content = if file.as_os_str() == "-" {
                tokio::task::spawn_blocking(given).await?.context("standard input")?
            } else {
                tokio::fs::read(&file).await.with_context(|| file.display().to_string())?
            };
            let bytes = content.len();
            let is_new = client.put(&url(place.run, &path)?, content.into()).await?;
            if output.json {
                print_json(&json!({"path": path, "size": bytes, "created": is_new}))?;
            } else {
                let done = if is_new { "Created" } else { "Replaced" };
                print(&format!("{done} {path}, {bytes} bytes."))?;
            }
        }
    }
    Ok(())
}

/// What standard input has, up to its end.
fn given() -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    io::stdin().lock().read_to_end(&mut content)?;
    Ok(content)
}

fn url(run: Uuid, path: &str) -> Result<String, ClientError> {
    let parts = path.split('/').map(|part| segment(part, "file"));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    Ok(format!("/runs/{run}/files/{}", parts.join("/")))
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

fn listed(rows: &[Value]) -> String {
    let text = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    let rows = rows
        .iter()
        .map(|row| vec![text(row, "path"), row["size"].to_string(), time(row, "/modified_at")]);
    table(&["PATH", "BYTES", "CHANGED"], &rows.collect::<Vec<_>>())
}
