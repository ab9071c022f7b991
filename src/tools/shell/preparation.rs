//! Prepares a command line for the sandbox: finds programs, resolves paths, expands patterns, and
//! lists what it would do as actions for the gate.
//!
//! It reads the workspace and changes nothing.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cap_std::fs::Dir;

use super::patterns::expanded;
use crate::bounds::command_line::{self, Pipeline, Redirection, Runs, SimpleCommand, Target, Word};
use crate::bounds::text::quoted;
use crate::governance::{Action, ActionKind, CommandRules};
use crate::run::Effect;
use crate::tools::ToolError;
use crate::tools::sandbox::plan::{self, Command, Step, When};
use crate::tools::workspace::{Kind, PathError, Workspace};

/// Bytes of all arguments of a line, patterns replaced.
const MAX_ARGUMENTS: usize = 128 * 1024;
/// The file that discards output.
const NOWHERE: &str = "/dev/null";

/// A prepared line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PreparedLine {
    pub(super) steps: Vec<Step>,
    /// Beneath the workspace.
    pub(super) directory: String,
    pub(super) actions: Vec<Action>,
    /// Whether one of the programs is one that runs others.
    pub(super) runs_others: bool,
}

/// The state of the preparation.
struct Preparation<'a> {
    workspace: &'a Workspace,
    path: &'a [PathBuf],
    rules: &'a CommandRules,
    /// Where the commands start, beneath the workspace.
    directory: String,
    handle: std::sync::Arc<Dir>,
    actions: Vec<Action>,
    runs_others: bool,
    /// Entries that were looked at for patterns so far.
    walked: usize,
    /// Bytes of arguments so far.
    size: usize,
}

pub(super) fn prepare(
    line: &str,
    workspace: &Workspace,
    path: &[PathBuf],
    rules: &CommandRules,
) -> Result<PreparedLine, ToolError> {
    let parsed = command_line::parse(line)
        .map_err(|refused| ToolError::ForModel(format!("the command line {refused}")))?;
    let mut pipelines = parsed.pipelines;
    let directory = first_directory(&mut pipelines, workspace)?;
    let directory_or_root = directory.clone().unwrap_or_else(|| ".".to_owned());
    let handle = workspace
        .open_dir(&directory_or_root)
        .map_err(|e| ToolError::ForModel(format!("cd {directory_or_root}: {}", e.kind())))?;
    let mut preparation = Preparation {
        workspace,
        path,
        rules,
        directory: directory_or_root,
        handle,
        actions: Vec::new(),
        runs_others: false,
        walked: 0,
        size: 0,
    };
    if let Some(path) = directory {
        preparation.actions.push(Action::new(ActionKind::Read { path }, Effect::Read));
    }
    let steps = pipelines.into_iter().map(|pipeline| preparation.step(pipeline));
    let steps = steps.collect::<Result<Vec<_>, _>>()?;
    let Preparation { directory, actions, runs_others, .. } = preparation;
    Ok(PreparedLine { steps, directory, actions, runs_others })
}

/// Removes a leading `cd DIR &&`. Elsewhere, the directory would depend on the outcome of commands.
fn first_directory(
    pipelines: &mut Vec<Pipeline>,
    workspace: &Workspace,
) -> Result<Option<String>, ToolError> {
    let refuse = |message: &str| Err(ToolError::ForModel(message.to_owned()));
    let is_cd = |command: &SimpleCommand| command.words.first().is_some_and(|w| w.text() == "cd");
    let mut directory = None;
    if let [Pipeline { commands, negated: false, .. }, rest @ ..] = pipelines.as_slice()
        && let [command] = commands.as_slice()
        && is_cd(command)
    {
        let [_, to] = command.words.as_slice() else {
            return refuse("cd needs exactly one directory");
        };
        if rest.first().is_none_or(|next| next.runs != Runs::AfterSuccess) {
            return refuse("cd only holds for its own line: write `cd DIR && COMMAND`");
        }
        if to.is_pattern() || !command.redirections.is_empty() || !command.variables.is_empty() {
            return refuse("cd needs the plain path of one directory");
        }
        let found =
            workspace.resolve(&to.text()).map_err(|e| ToolError::ForModel(e.to_string()))?;
        if found.kind != Some(Kind::Directory) {
            return Err(ToolError::ForModel(format!(
                "cd: {} is not a directory",
                quoted(&found.path)
            )));
        }
        directory = Some(found.path);
        pipelines.remove(0);
        if let Some(next) = pipelines.first_mut() {
            next.runs = Runs::Always;
        }
    }
    if pipelines.iter().flat_map(|pipeline| &pipeline.commands).any(is_cd) {
        return refuse("cd may only stand first, as in `cd DIR && COMMAND`; use paths instead");
    }
    Ok(directory)
}

impl Preparation<'_> {
    fn step(&mut self, pipeline: Pipeline) -> Result<Step, ToolError> {
        let Pipeline { runs, negated, commands } = pipeline;
        let when = match runs {
            Runs::Always => When::Always,
            Runs::AfterSuccess => When::Succeeded,
            Runs::AfterFailure => When::Failed,
        };
        let commands = commands.into_iter().map(|command| self.command(command));
        Ok(Step { when, negated, commands: commands.collect::<Result<_, _>>()? })
    }

    fn command(&mut self, simple: SimpleCommand) -> Result<Command, ToolError> {
        let mut words = simple.words.iter();
        let name = words.next().map(Word::text).unwrap_or_default();
        let program = self.program(&name)?;
        let mut arguments = vec![name];
        for word in words {
            let matches = if word.is_pattern() {
                expanded(&self.handle, &word.pattern(), &mut self.walked)?
            } else {
                Vec::new()
            };
            if matches.is_empty() { arguments.push(word.text()) } else { arguments.extend(matches) }
        }
        self.size += arguments.iter().map(|argument| argument.len() + 1).sum::<usize>();
        if self.size > MAX_ARGUMENTS {
            let message = format!("the arguments are larger than {MAX_ARGUMENTS} bytes");
            return Err(ToolError::ForModel(message));
        }
        let mut argv = arguments.clone();
        argv[0].clone_from(&program);
        let effect = self.rules.effect_of(&argv);
        self.runs_others |= effect.runs_others;
        self.actions.push(Action {
            destructive: effect.destructive,
            ..Action::new(ActionKind::Exec { argv, declared: false }, effect.effect)
        });
        let redirections = simple.redirections.into_iter().map(|it| self.redirection(it));
        let redirections = redirections.collect::<Result<_, _>>()?;
        let environment =
            simple.variables.into_iter().map(|(name, value)| (name, value.text())).collect();
        let is_read_only = effect.effect == Effect::Read;
        Ok(Command { program, arguments, environment, redirections, is_read_only })
    }

    /// The file of a program on the fixed path.
    fn program(&self, name: &str) -> Result<String, ToolError> {
        let refuse = |message: String| Err(ToolError::ForModel(message));
        let executable = |file: &Path| {
            let found = file.metadata();
            found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        };
        let files: Vec<PathBuf> = match name.rsplit_once('/') {
            None => self.path.iter().map(|directory| directory.join(name)).collect(),
            Some((directory, plain)) => {
                let listed = self.path.iter().any(|known| known == Path::new(directory));
                if !listed || matches!(plain, "" | "." | "..") {
                    let dirs: Vec<_> = self.path.iter().map(|d| d.display().to_string()).collect();
                    return refuse(format!(
                        "{} is not in a directory where programs may be: {}",
                        quoted(name),
                        dirs.join(", ")
                    ));
                }
                vec![PathBuf::from(name)]
            }
        };
        let found = files.into_iter().find(|file| executable(file));
        match found.and_then(|file| file.into_os_string().into_string().ok()) {
            Some(file) => Ok(file),
            None => refuse(format!("there is no program {}", quoted(name))),
        }
    }

    fn redirection(&mut self, written: Redirection) -> Result<plan::Redirection, ToolError> {
        let stream = written.stream;
        let to = match written.to {
            Target::Stream(other) => plan::Target::Stream(other),
            Target::Read(file) => plan::Target::Read(self.file(&file, None)?),
            Target::Write(file) => plan::Target::Write(self.file(&file, Some(false))?),
            Target::Append(file) => plan::Target::Append(self.file(&file, Some(true))?),
        };
        Ok(plan::Redirection { stream, to })
    }

    /// The file of a redirection as seen from where the programs start. `appends` is none where it
    /// is read.
    fn file(&mut self, word: &Word, appends: Option<bool>) -> Result<String, ToolError> {
        let written = word.text();
        if word.is_pattern() || written.is_empty() {
            let message = "a redirection needs the plain path of one file";
            return Err(ToolError::ForModel(message.into()));
        }
        if written == NOWHERE {
            return Ok(written);
        }
        let for_model = |e: PathError| ToolError::ForModel(format!("redirection: {e}"));
        let asked = if written.starts_with('/') || self.directory == "." {
            written
        } else {
            format!("{}/{written}", self.directory)
        };
        let found = self.workspace.resolve(&asked).map_err(for_model)?;
        if matches!(found.kind, Some(Kind::Special | Kind::Directory)) {
            let message = format!("redirection: {} is not a regular file", quoted(&found.path));
            return Err(ToolError::ForModel(message));
        }
        let path = found.path.clone();
        self.actions.push(match appends {
            None => Action::new(ActionKind::Read { path }, Effect::Read),
            Some(true) => Action::new(ActionKind::Write { path }, Effect::Once),
            Some(false) => Action {
                destructive: found.kind.is_some(),
                ..Action::new(ActionKind::Write { path }, Effect::Idempotent)
            },
        });
        let above = if self.directory == "." { 0 } else { self.directory.split('/').count() };
        Ok(format!("{}{}", "../".repeat(above), found.path))
    }
}
