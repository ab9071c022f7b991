//! `file_ops`: reads and changes files of the run's workspace.
//!
//! This file is the tool as the model sees it (description, arguments) and as the gate sees it:
//! every operation declares which resolved paths it reads and writes, and whether something would
//! be lost. Execution takes its paths from the permit and never from the arguments, so what was
//! judged is what is done. The operations themselves are in `file_ops/`. What can take long runs on a blocking
//! thread, and stops when the call is cancelled; on a volume that replicas share, all of it, because it may hang.

mod diff;
mod finding;
mod patching;
mod reading;
mod writing;

use crate::message::tool_schema::ToolSchema;
use std::io;
use std::sync::LazyLock;

use async_trait::async_trait;
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::arguments::whole_number_of;
use super::large_contents;
use super::quota::OverQuota;
use super::workspace::{Kind, PathError, Resolved};
use super::{
    ChangeRecorder, Defaults, Standing, Tool, ToolContext, ToolError, ToolInfo, Workspace, pdf,
};
use crate::bounds::memory::TenantSemaphore;
use crate::event::ValidationError;
use crate::fairness::{self, WorkError};
use crate::governance::{Action, ActionKind, Permit};
use crate::run::Effect;
use reading::FirstRead;

/// Searches at the same time, half of them of one tenant: each holds a file and what its pattern builds.
static SEARCHES: LazyLock<TenantSemaphore> = LazyLock::new(|| TenantSemaphore::new(4));
/// Entries of a directory that are moved with it, at most.
const MAX_MOVED: usize = 1000;

/// The tool's name.
pub const NAME: &str = "file_ops";

/// Not longer than some servers of the OpenAI API allow: 1,024 characters.
const DESCRIPTION: &str = "Reads and changes files in your workspace. `operation` says what; the other arguments \
    depend on it:\n\
    - read: path; optional offset, limit (lines). The file's text, of a PDF document too.\n\
    - write: path, content. Creates the file (and its directories) or replaces it.\n\
    - append: path, content. Adds to the end, creates a missing file.\n\
    - edit: path, old, new; optional replace_all. Replaces exact text that occurs once.\n\
    - list: optional path. Names in a directory; directories end with /.\n\
    - glob: pattern; optional path. Paths that match, e.g. **/*.md.\n\
    - search: pattern (regular expression); optional path, glob. Matching lines as path:line: text.\n\
    - stat: path. Kind, size and time of change, as JSON.\n\
    - mkdir: path. Makes a directory, parents included.\n\
    - move: path, to. Renames or moves a file or directory.\n\
    - delete: path. Deletes a file or an empty directory.\n\
    - patch: patch. Applies a unified diff, all or nothing; /dev/null is a file that is made or deleted.\n\
    Paths are relative to the workspace, never absolute.";

/// The arguments, by operation. Arguments of other operations are ignored.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(tag = "operation", rename_all = "lowercase")]
enum Operation<'a> {
    Read {
        path: &'a str,
        #[serde(default, deserialize_with = "whole_number_of")]
        offset: Option<u64>,
        #[serde(default, deserialize_with = "whole_number_of")]
        limit: Option<u64>,
    },
    Write {
        path: &'a str,
        content: &'a str,
    },
    Append {
        path: &'a str,
        content: &'a str,
    },
    Edit {
        path: &'a str,
        old: &'a str,
        new: &'a str,
        replace_all: Option<bool>,
    },
    List {
        path: Option<&'a str>,
    },
    Glob {
        pattern: &'a str,
        path: Option<&'a str>,
    },
    Search {
        pattern: &'a str,
        path: Option<&'a str>,
        glob: Option<&'a str>,
    },
    Stat {
        path: &'a str,
    },
    Mkdir {
        path: &'a str,
    },
    Move {
        path: &'a str,
        to: &'a str,
    },
    Delete {
        path: &'a str,
    },
    Patch {
        patch: &'a str,
    },
}

/// The tool.
pub struct FileOps {
    info: ToolInfo,
}

impl FileOps {
    /// The tool, for any workspace.
    #[expect(clippy::new_without_default, reason = "there is nothing default about it")]
    pub fn new() -> Self {
        let operations = [
            "read", "write", "append", "edit", "list", "glob", "search", "stat", "mkdir", "move",
            "delete", "patch",
        ];
        let input_schema = json!({
            "type": "object",
            "properties": {
                "operation": {"type": "string", "enum": operations},
                "path": {"type": "string", "description": "File or directory, relative to the workspace. \
                    Needed by all but patch; list, glob and search default to the whole workspace."},
                "offset": {"type": "integer", "minimum": 1, "description": "read: first line, counted from 1."},
                "limit": {"type": "integer", "minimum": 1, "description": "read: number of lines."},
                "content": {"type": "string", "description": "write, append: the text."},
                "old": {"type": "string", "minLength": 1, "description": "edit: text to replace, exactly as in the file."},
                "new": {"type": "string", "description": "edit: what to put there."},
                "replace_all": {"type": "boolean", "description": "edit: replace every occurrence."},
                "pattern": {"type": "string", "minLength": 1, "description": "glob: a glob; search: a regular expression."},
                "glob": {"type": "string", "minLength": 1, "description": "search: only in files that match, e.g. *.rs."},
                "patch": {"type": "string", "minLength": 1, "description": "patch: the unified diff, with paths of the workspace."},
                "to": {"type": "string", "description": "move: the new path."}
            },
            "required": ["operation"],
            "additionalProperties": false
        });
        let info = ToolInfo {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            input_schema: ToolSchema::from(input_schema),
            effect: Effect::Once,
            varies: true,
            concurrent: false,
            source: "builtin".into(),
            destructive: true,
            defaults: Defaults::default(),
        };
        Self { info }
    }
}

#[async_trait]
impl Tool for FileOps {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    fn mistakes(&self, arguments: &Value) -> Vec<ValidationError> {
        let checked = Operation::parse(arguments)
            .map_or_else(|error| vec![("", Err(error))], Operation::checked);
        let wrong = |(pointer, checked): (&str, Result<(), ToolError>)| {
            checked
                .err()
                .map(|e| ValidationError { pointer: pointer.to_owned(), message: e.to_string() })
        };
        checked.into_iter().filter_map(wrong).collect()
    }

    async fn actions(
        &self,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<Vec<Action>, ToolError> {
        let workspace = context.workspace.clone();
        let _turn = match Operation::parse(arguments)? {
            // It counts the occurrences.
            Operation::Edit { path, replace_all: Some(true), .. } => {
                let (workspace, path) = (workspace.clone(), path.to_owned());
                let size = quickly(workspace.is_shared(), move || {
                    let path = workspace.resolve(&path)?.path;
                    Ok(writing::size(&workspace, &path, writing::MAX_EDITED))
                });
                large_contents::turn(size.await?).await
            }
            // Moving a directory lists all its entries, writing compares with the existing content.
            Operation::Move { .. } | Operation::Patch { .. } | Operation::Write { .. } => None,
            quick if !workspace.is_shared() => return quick.actions(&workspace),
            _ => None,
        };
        let arguments = arguments.clone();
        blocking(move |_| Operation::parse(&arguments)?.actions(&workspace)).await
    }

    async fn execute(
        &self,
        permit: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        if let Operation::Read { offset, limit, .. } = Operation::parse(&arguments)? {
            let path = path_of(&permit, 0)?;
            let (workspace, place) = (context.workspace.clone(), path.to_owned());
            let begun = quickly(workspace.is_shared(), move || {
                reading::begin(&workspace, &place, offset, limit)
            });
            match begun.await? {
                FirstRead::Text(text) => return Ok(text),
                FirstRead::Pdf(document) => {
                    let text = pdf::text(document, &context.caller.tenant).await;
                    let text =
                        text.map_err(|why| ToolError::ForModel(format!("{path:?} {why}")))?;
                    return reading::page_of(path, &text, offset, limit);
                }
                FirstRead::Large => {}
            }
        }
        let workspace = context.workspace.clone();
        let sized = quickly(workspace.is_shared(), move || {
            let bytes = Operation::parse(&arguments)?.holds(&workspace, &permit);
            Ok((bytes, workspace, arguments, permit))
        });
        let (bytes, workspace, arguments, permit) = sized.await?;
        let _turn = large_contents::turn(bytes).await;
        let _place = match Operation::parse(&arguments)? {
            Operation::Search { .. } | Operation::Glob { .. } => {
                SEARCHES.acquire(&context.caller.tenant).await // never closed
            }
            _ => None,
        };
        let only_reads = !permit.actions().iter().any(|action| action.effect != Effect::Read);
        let changed = context.changed.clone();
        changed.make_atomic();
        let perform = move |stop: &CancellationToken| {
            Operation::parse(&arguments)?.perform(&workspace, &permit, stop, &changed)
        };
        if only_reads {
            return blocking(perform).await;
        }
        let done = changing(&context.standing, perform).await;
        context.changed.complete();
        done
    }
}

impl<'a> Operation<'a> {
    fn parse(arguments: &'a Value) -> Result<Self, ToolError> {
        Self::deserialize(arguments).map_err(|e| {
            let operation = arguments["operation"].as_str().unwrap_or("file_ops");
            ToolError::ForModel(format!("{operation}: {e}"))
        })
    }

    /// Its arguments with a syntax of their own, each with its pointer.
    fn checked(self) -> Vec<(&'static str, Result<(), ToolError>)> {
        match self {
            Self::Glob { pattern, .. } => {
                vec![("/pattern", finding::compile_glob(pattern).map(drop))]
            }
            Self::Search { pattern, glob, .. } => vec![
                ("/pattern", finding::compile_pattern(pattern).map(drop)),
                ("/glob", glob.map_or(Ok(()), |glob| finding::compile_file_glob(glob).map(drop))),
            ],
            Self::Edit { old, new, .. } => vec![("/new", writing::check_edit(old, new))],
            Self::Patch { patch } => vec![("/patch", patching::check(patch))],
            _ => Vec::new(),
        }
    }

    /// The actions that it would perform. Inspects links and existing files, changes nothing.
    fn actions(self, workspace: &Workspace) -> Result<Vec<Action>, ToolError> {
        let read = |path: &str| Ok::<_, PathError>(reads(workspace.resolve(path)?.path));
        Ok(match self {
            Self::Read { path, .. } | Self::Stat { path } => vec![read(path)?],
            Self::List { path } | Self::Glob { path, .. } | Self::Search { path, .. } => {
                vec![read(path.unwrap_or("."))?]
            }
            Self::Write { path, content } => {
                let Resolved { path, kind } = workspace.resolve(path)?;
                let destructive =
                    kind == Some(Kind::File) && !writing::holds(workspace, &path, content);
                let lines = content.lines().count();
                let write = writes_lines(path, Effect::Idempotent, destructive, lines);
                vec![with_directories(workspace, write)]
            }
            Self::Append { path, content } => {
                let path = workspace.resolve(path)?.path;
                let append = writes_lines(path, Effect::Once, false, content.lines().count());
                vec![with_directories(workspace, append)]
            }
            Self::Edit { path, old, new, replace_all } => {
                let path = workspace.resolve(path)?.path;
                let each = old.lines().count().max(new.lines().count());
                let times = match replace_all {
                    Some(true) => writing::occurrences(workspace, &path, old),
                    _ => 1,
                };
                let lines = each.saturating_mul(times);
                vec![writes_lines(path.clone(), Effect::Once, false, lines), reads(path)]
            }
            Self::Mkdir { path } => {
                let path = workspace.resolve(path)?.path;
                vec![with_directories(workspace, writes(path, Effect::Idempotent, false))]
            }
            Self::Move { path, to } => {
                let (from, to) = (workspace.resolve_entry(path)?, workspace.resolve_entry(to)?);
                if from.path == "." || to.path == "." {
                    return Err(refused(".", &io::ErrorKind::InvalidInput.into()));
                }
                let onto_something =
                    !matches!(to.kind, None | Some(Kind::Directory)) && to.path != from.path;
                let mut actions = vec![
                    writes(from.path.clone(), Effect::Once, false),
                    with_directories(
                        workspace,
                        writes(to.path.clone(), Effect::Once, onto_something),
                    ),
                    reads(from.path.clone()),
                ];
                if from.kind == Some(Kind::Directory) {
                    // The entries of a moved directory count as moved, so that rules about them are
                    // checked.
                    for entry in finding::everything_in(workspace, &from.path, MAX_MOVED)? {
                        let (old, new) =
                            (format!("{}/{entry}", from.path), format!("{}/{entry}", to.path));
                        actions.extend([
                            writes(old.clone(), Effect::Once, false),
                            writes(new, Effect::Once, false),
                            reads(old),
                        ]);
                    }
                }
                actions
            }
            Self::Patch { patch } => patching::actions(workspace, patch)?,
            Self::Delete { path } => {
                vec![writes(workspace.resolve_entry(path)?.path, Effect::Once, true)]
            }
        })
    }

    /// The most bytes that it takes in memory, judging by the current files.
    fn holds(self, workspace: &Workspace, permit: &Permit) -> u64 {
        // What else is moved with a directory is not read.
        let (files, most) = match self {
            Self::Read { .. } => return reading::HELD,
            Self::Append { .. } => (1, diff::MAX_COMPARED as u64),
            Self::Move { .. } => (2, writing::MAX_EDITED),
            Self::Write { .. } | Self::Edit { .. } | Self::Patch { .. } | Self::Delete { .. } => {
                (usize::MAX, writing::MAX_EDITED)
            }
            Self::List { .. }
            | Self::Glob { .. }
            | Self::Search { .. }
            | Self::Stat { .. }
            | Self::Mkdir { .. } => return 0,
        };
        let written = permit.actions().iter().filter_map(|action| match &action.what {
            ActionKind::Write { path } => Some(path),
            _ => None,
        });
        let sizes = written.take(files).map(|path| writing::size(workspace, path, most));
        sizes.sum::<u64>() * writing::COPIES
    }

    /// Executes it, on the permitted paths.
    fn perform(
        self,
        workspace: &Workspace,
        permit: &Permit,
        stop: &CancellationToken,
        changed: &ChangeRecorder,
    ) -> Result<String, ToolError> {
        let path = path_of(permit, 0)?;
        match self {
            Self::Read { offset, limit, .. } => reading::read(workspace, path, offset, limit, stop),
            Self::Stat { .. } => reading::stat(workspace, path),
            Self::List { .. } => finding::list(workspace, path, permit),
            Self::Glob { pattern, .. } => finding::glob(workspace, path, pattern, permit, stop),
            Self::Search { pattern, glob, .. } => {
                finding::search(workspace, path, pattern, glob, permit, stop)
            }
            Self::Write { content, .. } => {
                writing::write(workspace, path, content, permit, stop, changed)
            }
            Self::Append { content, .. } => {
                writing::append(workspace, path, content, stop, changed)
            }
            Self::Edit { old, new, replace_all, .. } => {
                let occurrences = if replace_all == Some(true) {
                    if self.actions(workspace)? != permit.actions() {
                        return Err(ToolError::ForModel(format!(
                            "{path:?} changed while it was about to be edited; read it again"
                        )));
                    }
                    writing::Occurrences::All
                } else {
                    writing::Occurrences::One
                };
                writing::edit(workspace, path, old, new, occurrences, stop, changed)
            }
            Self::Mkdir { .. } => writing::mkdir(workspace, path, changed),
            Self::Move { .. } => {
                if self.actions(workspace)? != permit.actions() {
                    return Err(ToolError::ForModel(format!(
                        "{path:?} changed while it was about to be moved; read it again"
                    )));
                }
                writing::rename(workspace, path, path_of(permit, 1)?, permit, stop, changed)
            }
            Self::Delete { .. } => writing::delete(workspace, path, stop, changed),
            Self::Patch { patch } => patching::apply(workspace, patch, permit, stop, changed),
        }
    }
}

fn reads(path: String) -> Action {
    Action::new(ActionKind::Read { path }, Effect::Read)
}

fn writes(path: String, effect: Effect, destructive: bool) -> Action {
    Action { destructive, ..Action::new(ActionKind::Write { path }, effect) }
}

fn writes_lines(path: String, effect: Effect, destructive: bool, lines: usize) -> Action {
    Action { lines: lines as u64, ..writes(path, effect, destructive) }
}

/// The same with the directories that must be created for it.
fn with_directories(workspace: &Workspace, action: Action) -> Action {
    let makes = match &action.what {
        ActionKind::Write { path } => writing::missing_above(workspace, path),
        _ => Vec::new(),
    };
    Action { makes, ..action }
}

/// The path of one of the permitted actions.
fn path_of(permit: &Permit, index: usize) -> Result<&str, ToolError> {
    match permit.actions().get(index).map(|a| &a.what) {
        Some(ActionKind::Read { path } | ActionKind::Write { path }) => Ok(path),
        _ => Err(ToolError::Fatal("a permit of file_ops names no path".into())),
    }
}

/// Does quick work on files at once, unless they are on a volume that may hang.
async fn quickly<T: Send + 'static>(
    may_hang: bool,
    work: impl FnOnce() -> Result<T, ToolError> + Send + 'static,
) -> Result<T, ToolError> {
    if may_hang { blocking(move |_| work()).await } else { work() }
}

/// Runs on a thread for files. The work is signalled to stop when the caller is dropped.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&CancellationToken) -> Result<T, ToolError> + Send + 'static,
) -> Result<T, ToolError> {
    let stop = CancellationToken::new();
    let _stop_when_dropped = stop.clone().drop_guard();
    match fairness::on_files(move || work(&stop)).await {
        Ok(done) => done,
        Err(WorkError { panic: Some(panic) }) => std::panic::resume_unwind(panic),
        Err(WorkError { panic: None }) => Err(stopped()),
    }
}

/// The same for work that changes something. It may have waited long for a thread, so the lease is
/// checked again before it begins.
async fn changing<T, W>(standing: &Standing, mut work: W) -> Result<T, ToolError>
where
    T: Send + 'static,
    W: FnOnce(&CancellationToken) -> Result<T, ToolError> + Send + 'static,
{
    loop {
        let look = standing.clone();
        let begun = blocking(move |stop| {
            Ok(if look.holds() && !stop.is_cancelled() { Ok(work(stop)?) } else { Err(work) })
        });
        match begun.await? {
            Ok(done) => return Ok(done),
            Err(not_begun) => work = not_begun,
        }
        standing.until_valid().await;
    }
}

/// The call was cancelled.
fn stopped() -> ToolError {
    ToolError::ForModel("the operation was cancelled".into())
}

/// The error for the model where the system refused something.
fn refused(path: &str, error: &io::Error) -> ToolError {
    const LINK: Option<i32> = Some(Errno::LOOP.raw_os_error());
    ToolError::ForModel(match error.kind() {
        _ if path == "." => "the workspace itself cannot be used like that".to_owned(),
        io::ErrorKind::NotFound => format!("{path:?} does not exist"),
        io::ErrorKind::IsADirectory => format!("{path:?} is a directory"),
        io::ErrorKind::NotADirectory => {
            format!("{path:?} is not a directory, or a part of the path is not one")
        }
        io::ErrorKind::AlreadyExists => format!("{path:?} exists already"),
        io::ErrorKind::DirectoryNotEmpty => format!("{path:?} is a directory that is not empty"),
        _ if error.raw_os_error() == LINK => {
            format!("{path:?} is a symbolic link now and was not before; list the directory again")
        }
        kind => format!("{path:?} was refused by the system: {kind}"),
    })
}

/// The error for the model on devices, FIFOs and sockets.
fn special(path: &str) -> ToolError {
    ToolError::ForModel(format!(
        "{path:?} is a device, FIFO or socket; only files and directories can be used"
    ))
}

impl From<PathError> for ToolError {
    fn from(error: PathError) -> Self {
        Self::ForModel(error.to_string())
    }
}

impl From<OverQuota> for ToolError {
    fn from(error: OverQuota) -> Self {
        Self::ForModel(error.to_string())
    }
}

#[cfg(test)]
mod confinement_tests;
#[cfg(test)]
mod fixture_tests;
#[cfg(test)]
mod operation_tests;
