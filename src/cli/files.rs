//! `toolloop files`: list, get and put the files of a run.
//!
//! Which files there are and what may be done with them is the service's answer, over the network or
//! in this process.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use futures::StreamExt as _;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
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
            get(client, &url(place.run, &path)?, output.as_deref()).await?;
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

async fn get(client: &Client, url: &str, output: Option<&Path>) -> anyhow::Result<()> {
    let mut content = client.content(url).await?.into_data_stream();
    let mut destination = match output {
        None => Destination::Direct(Box::new(io::stdout())),
        Some(path) => Destination::open(path).with_context(|| path.display().to_string())?,
    };
    while let Some(chunk) = content.next().await {
        destination.write_all(&chunk.map_err(|error| client.broken(&error))?)?;
    }
    Ok(destination.finish()?)
}

/// What a download is written to.
enum Destination {
    /// Standard output, a device or a pipe, or a file that cannot be replaced.
    Direct(Box<dyn Write>),
    /// A file that appears at `path` once it is complete.
    Replaced { partial: NamedTempFile, path: PathBuf },
}

impl Destination {
    fn open(path: &Path) -> io::Result<Self> {
        let (target, existing) = match path.canonicalize() {
            Ok(target) if target.is_file() => {
                let file = OpenOptions::new().write(true).open(&target)?;
                (target, Some(file.metadata()?.permissions()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => {
                (path.to_owned(), None)
            }
            Ok(_) | Err(_) => return Ok(Self::Direct(Box::new(File::create(path)?))),
        };
        let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty());
        let partial = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory.unwrap_or(Path::new(".")));
        let Ok(partial) = partial else {
            // Its directory may be one in which no file can be made.
            return Ok(Self::Direct(Box::new(File::create(path)?)));
        };
        if let Some(permissions) = existing {
            partial.as_file().set_permissions(permissions)?;
        }
        Ok(Self::Replaced { partial, path: target })
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Direct(file) => file.write_all(bytes),
            Self::Replaced { partial, .. } => partial.write_all(bytes),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Direct(mut file) => file.flush(),
            Self::Replaced { partial, path } => {
                partial.persist(path)?;
                Ok(())
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_download_that_breaks_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("old"), "old").unwrap();
        fs::set_permissions(at("old"), Permissions::from_mode(0o640)).unwrap();
        symlink("old", at("link")).unwrap();
        let names = || {
            let entries = fs::read_dir(dir.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let before = names();
        for name in ["old", "link", "new"] {
            let mut broken = Destination::open(&at(name)).unwrap();
            broken.write_all(b"par").unwrap();
            drop(broken);
            assert_eq!((names(), fs::read(at("old")).unwrap()), (before.clone(), b"old".to_vec()));
        }
        for name in ["link", "new"] {
            let mut whole = Destination::open(&at(name)).unwrap();
            whole.write_all(b"whole").unwrap();
            whole.finish().unwrap();
            assert_eq!(fs::read(at(name)).unwrap(), b"whole");
        }
        assert_eq!(names(), ["link", "new", "old"]);
        assert!(at("link").is_symlink(), "what the link leads to is replaced, not the link");
        assert_eq!(fs::metadata(at("old")).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn what_cannot_be_replaced_is_written_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let dangling = dir.path().join("dangling");
        symlink("target", &dangling).unwrap();
        for path in [dangling.as_path(), Path::new("/dev/null")] {
            let mut direct = Destination::open(path).unwrap();
            assert!(matches!(direct, Destination::Direct(_)), "{}", path.display());
            direct.write_all(b"x").unwrap();
            direct.finish().unwrap();
        }
        assert_eq!(fs::read(dir.path().join("target")).unwrap(), b"x");
        assert!(Destination::open(dir.path()).is_err(), "a directory");
    }
}
