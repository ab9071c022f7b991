//! `toolloop init` and `toolloop new`: the first files of a project, and more of them.
//!
//! The files lie in `project/` as they are written. Nothing is ever overwritten: a file that is
//! there is named, and then nothing is written at all.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::json;

use super::output::{print, print_json};
use super::shell_words::path_word;
use super::{JsonArg, UsageError};
use crate::agents::is_agent_name;
use crate::config::{Config, Flags};
use crate::message::visible::escaped;

/// Path and content.
type Template = (&'static str, &'static str);

macro_rules! templates {
    ($($path:literal),* $(,)?) => {
        [$(($path, include_str!(concat!("project/template/", $path)))),*]
    };
}

/// What `init` writes.
const PROJECT: [Template; 8] = templates![
    "toolloop.toml",
    "agents/hello.yaml",
    "scenarios/hello.yaml",
    "tools/text.yaml",
    "tools/word_count.py",
    "tests/hello.yaml",
    "docker-compose.yml",
    "README.md",
];
/// What `new agent` writes; every `NAME` is its name.
const AGENT: &str = include_str!("project/agent.yaml");

const INIT_EXAMPLES: &str = "\
Examples:
  toolloop init demo && cd demo && toolloop serve
  toolloop init                 # in this directory";

#[derive(Debug, Args)]
#[command(after_help = INIT_EXAMPLES)]
pub(super) struct InitArgs {
    /// The directory, created if it is missing [default: this directory]
    directory: Option<PathBuf>,
    #[command(flatten)]
    output: JsonArg,
}

#[derive(Debug, Subcommand)]
pub(super) enum NewCommand {
    /// Write agents/<NAME>.yaml, with a comment on each part
    Agent {
        /// The agent's name: lower-case letters, digits and -, 2 to 64 of them
        name: String,
        #[command(flatten)]
        output: JsonArg,
    },
}

pub(super) fn init(InitArgs { directory, output }: InitArgs) -> anyhow::Result<()> {
    let directory = directory.unwrap_or_else(|| PathBuf::from("."));
    let files: Vec<(PathBuf, &str)> =
        PROJECT.iter().map(|(path, text)| (directory.join(path), *text)).collect();
    write_all(&files)?;
    let names: Vec<&str> = PROJECT.iter().map(|(path, _)| *path).collect();
    if output.json {
        print_json(&json!({"directory": directory.display().to_string(), "written": names}))?;
        return Ok(());
    }
    let shown = directory.display().to_string();
    let is_here = directory.as_os_str() == ".";
    let cd = if is_here { String::new() } else { format!("cd {} && ", path_word(&directory)) };
    print(&escaped(&format!(
        "Written to {shown}:\n  {}\n\nNext:\n  {cd}toolloop serve",
        names.join("\n  ")
    )))?;
    Ok(())
}

pub(super) fn new(flags: &Flags, command: NewCommand) -> anyhow::Result<()> {
    let NewCommand::Agent { name, output } = command;
    if !is_agent_name(&name) {
        let shown = super::output::one_line(&name, 100);
        let message = format!("the name {shown:?} does not match ^[a-z][a-z0-9-]{{1,63}}$");
        return Err(UsageError(message).into());
    }
    let (config, _) = Config::read_without_secrets(flags)?;
    // An agent has one file, whichever way its name ends.
    refuse_existing([config.agents_dir.join(format!("{name}.yml"))].iter())?;
    let path = config.agents_dir.join(format!("{name}.yaml"));
    let text = AGENT.replace("NAME", &name);
    write_all(&[(path.clone(), text.as_str())])?;
    let shown = path.display().to_string();
    if output.json {
        print_json(&json!({"agent": name, "written": [shown]}))?;
    } else {
        print(&escaped(&format!("Written: {shown}\n\nNext:\n  toolloop check")))?;
    }
    Ok(())
}

/// Writes all files or none.
fn write_all(files: &[(PathBuf, &str)]) -> anyhow::Result<()> {
    refuse_existing(files.iter().map(|(path, _)| path))?;
    let mut made = Made::default();
    for (path, text) in files {
        made.write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    made.keep();
    Ok(())
}

fn refuse_existing<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> anyhow::Result<()> {
    let there: Vec<String> = paths
        .filter(|path| path.symlink_metadata().is_ok())
        .map(|path| path.display().to_string())
        .collect();
    match there.as_slice() {
        [] => Ok(()),
        [one] => Err(UsageError(format!("{one} exists; nothing was written")).into()),
        more => Err(UsageError(format!("{} exist; nothing was written", more.join(", "))).into()),
    }
}

/// What was made so far; removed again unless it is kept.
#[derive(Default)]
struct Made {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Made {
    fn write(&mut self, path: &Path, text: &str) -> std::io::Result<()> {
        if let Some(parent) = path.parent() {
            self.make_directory(parent)?;
        }
        let mode = if text.starts_with("#!") { 0o777 } else { 0o666 };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        self.files.push(path.to_owned());
        file.write_all(text.as_bytes())
    }

    fn make_directory(&mut self, path: &Path) -> std::io::Result<()> {
        if path.as_os_str().is_empty() || path.is_dir() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.make_directory(parent)?;
        }
        fs::create_dir(path)?;
        self.directories.push(path.to_owned());
        Ok(())
    }

    fn keep(mut self) {
        self.files.clear();
        self.directories.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for file in self.files.iter().rev() {
            let _ = fs::remove_file(file);
        }
        for directory in self.directories.iter().rev() {
            let _ = fs::remove_dir(directory);
        }
    }
}
