//! `list`, `glob` and `search`: what is in directories.
//!
//! Walks go by name order and hold one directory open for each level; they follow no links, enter
//! nothing that the path rules deny and show no file that may not be read. Everything is bounded,
//! and what was left out is counted in the answer.

use std::fmt::Write as _;
use std::io::{self, Read};
use std::ops::ControlFlow::{self, Break, Continue};
use std::time::{Duration, Instant};

use cap_fs_ext::DirExt;
use cap_std::fs::Dir;
use tokio_util::sync::CancellationToken;

use super::{Kind, Permit, ToolError, Workspace, refused, special, stopped};
use crate::bounds::glob::Glob;
use crate::bounds::pattern::{Author, Pattern};
use crate::bounds::secrets;
use crate::bounds::text::quoted;
use crate::tools::staged_file::StagedFile;
use crate::tools::workspace::open_for_reading;

/// Names that a listing shows.
const MAX_LISTED: usize = 1000;
/// Lines that a search shows.
const MAX_MATCHES: usize = 200;
/// Characters of a line that a search shows.
const MAX_LINE: usize = 300;
/// Entries that a walk looks at.
const MAX_VISITED: usize = 50_000;
/// Levels that a walk goes down.
const MAX_DEPTH: usize = 64;
/// Bytes of a file that is searched.
const MAX_SEARCHED: u64 = 4 * 1024 * 1024;
/// How long one call may search.
const MAX_TIME: Duration = Duration::from_secs(5);
/// Bytes searched in one call.
const MAX_SEARCHED_TOTAL: u64 = 256 * 1024 * 1024;

/// An entry of a directory.
struct Entry {
    name: String,
    kind: Kind,
}

/// Entries of one directory.
#[derive(Default)]
struct Entries {
    /// By name.
    named: Vec<Entry>,
    /// How many have names that are not UTF-8.
    unnamed: usize,
    /// Whether there are more than are read.
    has_more: bool,
}

/// The entries of one directory, up to [`MAX_VISITED`].
fn entries(dir: &Dir) -> io::Result<Entries> {
    entries_up_to(dir, MAX_VISITED)
}

fn entries_up_to(dir: &Dir, most: usize) -> io::Result<Entries> {
    let mut found = Entries::default();
    for (number, entry) in dir.entries()?.enumerate() {
        let entry = entry?;
        if number == most {
            found.has_more = true;
            break;
        }
        let kind = entry.file_type()?;
        let kind = if kind.is_file() {
            Kind::File
        } else if kind.is_dir() {
            Kind::Directory
        } else if kind.is_symlink() {
            Kind::Link
        } else {
            Kind::Special
        };
        match entry.file_name().into_string() {
            Ok(name) => found.named.push(Entry { name, kind }),
            Err(_) => found.unnamed += 1,
        }
    }
    found.named.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The same without files that are on their way to their places, or were left there by a crash.
fn placed(dir: &Dir) -> io::Result<Entries> {
    let mut entries = entries(dir)?;
    let is_placed = |it: &Entry| it.kind != Kind::File || !StagedFile::is_own_name(&it.name);
    entries.named.retain(is_placed);
    Ok(entries)
}

fn join(base: &str, name: &str) -> String {
    if base == "." { name.to_owned() } else { format!("{base}/{name}") }
}

/// What is directly in a directory.
pub(super) fn list(
    workspace: &Workspace,
    path: &str,
    permit: &Permit,
) -> Result<String, ToolError> {
    let Entries { named, unnamed, has_more } =
        workspace.open_dir(path).and_then(|dir| placed(&dir)).map_err(|e| refused(path, &e))?;
    let total = named.len();
    let shown = |entry: &Entry| match entry.kind {
        Kind::Directory => permit.may_enter(&join(path, &entry.name)),
        _ => permit.may_read(&join(path, &entry.name)),
    };
    let visible: Vec<_> = named.into_iter().filter(shown).collect();
    let hidden = total - visible.len();
    let mut answer = String::new();
    for Entry { name, kind } in visible.iter().take(MAX_LISTED) {
        answer.push_str(name);
        answer.push_str(match kind {
            Kind::Directory => "/\n",
            Kind::File => "\n",
            Kind::Link => " (symbolic link)\n",
            Kind::Special => " (device, FIFO or socket)\n",
        });
    }
    if visible.is_empty() {
        answer.push_str("[The directory is empty.]\n");
    }
    note(
        &mut answer,
        visible.len().saturating_sub(MAX_LISTED),
        "more entries; list a directory further down",
    );
    note(&mut answer, hidden, "entries that the path rules hide");
    note(&mut answer, unnamed, "entries whose names are not UTF-8");
    if has_more {
        let _ = writeln!(answer, "[Only {MAX_VISITED} entries were read; there are more.]");
    }
    Ok(trimmed(answer))
}

/// Paths that match a glob.
pub(super) fn glob(
    workspace: &Workspace,
    path: &str,
    pattern: &str,
    permit: &Permit,
    stop: &CancellationToken,
) -> Result<String, ToolError> {
    let glob = compile_glob(pattern)?;
    let (mut answer, mut found) = (String::new(), 0_usize);
    let walked = walk(workspace, path, permit, stop, |_, entry, relative, full| {
        if glob.is_match(relative) {
            found += 1;
            if found <= MAX_LISTED {
                let slash = if entry.kind == Kind::Directory { "/" } else { "" };
                let _ = writeln!(answer, "{full}{slash}");
            }
        }
        Ok(Continue(()))
    })?;
    if found == 0 {
        let _ = writeln!(answer, "[Nothing matches {pattern}.]");
    }
    note(
        &mut answer,
        found.saturating_sub(MAX_LISTED),
        "more matches; use a narrower pattern or path",
    );
    walked.note(&mut answer);
    Ok(trimmed(answer))
}

/// Lines that match a regular expression.
pub(super) fn search(
    workspace: &Workspace,
    path: &str,
    pattern: &str,
    glob: Option<&str>,
    permit: &Permit,
    stop: &CancellationToken,
) -> Result<String, ToolError> {
    let regex = compile_pattern(pattern)?;
    let glob = glob.map(compile_file_glob).transpose()?;
    let mut search = Search {
        pattern: regex,
        stop,
        until: Instant::now() + MAX_TIME,
        answer: String::new(),
        found: 0,
        skipped: 0,
        searched: 0,
        cut_short: false,
    };
    let mut walked = Walked::default();
    if path != "."
        && let Ok((dir, name)) = workspace.holder(path)
        && is_file(&dir, name)
    {
        search.file(&dir, name, path)?;
    } else {
        walked = walk(workspace, path, permit, stop, |dir, entry, relative, full| {
            if entry.kind == Kind::File && glob.as_ref().is_none_or(|glob| glob.is_match(relative))
            {
                search.file(dir, &entry.name, full)?;
            }
            Ok(if search.cut_short { Break(()) } else { Continue(()) })
        })?;
    }
    let Search { mut answer, found, skipped, searched, cut_short, .. } = search;
    if found == 0 {
        answer.push_str("[No line matches.]\n");
    }
    note(
        &mut answer,
        found.saturating_sub(MAX_MATCHES),
        "more matching lines; narrow the pattern, path or glob",
    );
    note(&mut answer, skipped, "files that are binary, too large or unreadable were not searched");
    if cut_short {
        let _ = writeln!(
            answer,
            "[Stopped after {searched} bytes: one search reads at most {MAX_SEARCHED_TOTAL} and takes at most {} seconds. Narrow the pattern, path or glob to see the rest.]",
            MAX_TIME.as_secs()
        );
    }
    walked.note(&mut answer);
    Ok(trimmed(answer))
}

/// A search under way.
struct Search<'a> {
    pattern: Pattern,
    stop: &'a CancellationToken,
    until: Instant,
    answer: String,
    found: usize,
    skipped: usize,
    searched: u64,
    cut_short: bool,
}

impl Search<'_> {
    fn file(&mut self, dir: &Dir, name: &str, path: &str) -> Result<(), ToolError> {
        if self.searched > MAX_SEARCHED_TOTAL {
            self.cut_short = true;
            return Ok(());
        }
        let Some(text) = searchable(dir, name) else {
            self.skipped += 1;
            return Ok(());
        };
        for (number, line) in text.lines().enumerate() {
            self.searched += line.len() as u64 + 1;
            let (stop, until) = (self.stop, self.until);
            let is_over = || stop.is_cancelled() || Instant::now() >= until;
            let is_found = self.pattern.occurs_in(line, is_over);
            if self.stop.is_cancelled() {
                return Err(stopped());
            }
            if is_found.is_none() || Instant::now() >= self.until {
                self.cut_short = true;
                return Ok(());
            }
            if is_found != Some(true) {
                continue;
            }
            self.found += 1;
            if self.found <= MAX_MATCHES {
                let end = line.char_indices().nth(MAX_LINE).map_or(line.len(), |(at, _)| at);
                let cut = if end < line.len() { "…" } else { "" };
                let shown = secrets::head(line, end);
                let _ = writeln!(self.answer, "{path}:{}: {shown}{cut}", number + 1);
            }
        }
        Ok(())
    }
}

fn is_file(dir: &Dir, name: &str) -> bool {
    dir.symlink_metadata(name).is_ok_and(|metadata| metadata.is_file())
}

/// The text of a file that is a regular one, not too large and not binary.
fn searchable(dir: &Dir, name: &str) -> Option<String> {
    let file = open_for_reading(dir, name).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MAX_SEARCHED {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_SEARCHED).read_to_end(&mut bytes).ok()?;
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

/// The paths beneath a directory, relative to it, all of them.
pub(super) fn everything_in(
    workspace: &Workspace,
    path: &str,
    limit: usize,
) -> Result<Vec<String>, ToolError> {
    let too_many = || {
        ToolError::ForModel(format!(
            "{path:?} holds more than {limit} entries, too many to move at once"
        ))
    };
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(base) = open.pop() {
        let full = if base.is_empty() { path.to_owned() } else { format!("{path}/{base}") };
        let Entries { named, unnamed, has_more } = workspace
            .open_dir(&full)
            .and_then(|dir| entries(&dir))
            .map_err(|e| refused(&full, &e))?;
        if has_more {
            return Err(too_many());
        }
        if unnamed > 0 {
            return Err(ToolError::ForModel(format!(
                "{full:?} holds names that are not UTF-8 and cannot be moved"
            )));
        }
        for Entry { name, kind } in named {
            let relative = if base.is_empty() { name } else { format!("{base}/{name}") };
            if found.len() >= limit {
                return Err(too_many());
            }
            if kind == Kind::Special {
                return Err(special(&format!("{path}/{relative}")));
            }
            if kind == Kind::Directory {
                open.push(relative.clone());
            }
            found.push(relative);
        }
    }
    Ok(found)
}

/// What a walk left out.
#[derive(Default)]
struct Walked {
    visited: usize,
    /// Whether a directory has more entries than are read.
    has_more: bool,
    hidden: usize,
    unnamed: usize,
    too_deep: usize,
}

impl Walked {
    fn note(&self, answer: &mut String) {
        if self.has_more || self.visited >= MAX_VISITED {
            let _ = writeln!(
                answer,
                "[Stopped after {MAX_VISITED} entries; give a path further down to see the rest.]"
            );
        }
        note(answer, self.hidden, "entries that the path rules hide");
        note(answer, self.unnamed, "entries whose names are not UTF-8");
        note(answer, self.too_deep, "directories that are too deep or unreadable were not entered");
    }
}

/// One directory of a walk: its handle, its path from the workspace and from the walk's start.
struct Level {
    dir: std::sync::Arc<Dir>,
    full: String,
    relative: String,
    entries: std::vec::IntoIter<Entry>,
}

/// Shows `visit` what may be seen beneath a directory: holder, entry, path from the start, path
/// from the workspace.
fn walk(
    workspace: &Workspace,
    path: &str,
    permit: &Permit,
    stop: &CancellationToken,
    mut visit: impl FnMut(&Dir, &Entry, &str, &str) -> Result<ControlFlow<()>, ToolError>,
) -> Result<Walked, ToolError> {
    let mut walked = Walked::default();
    let dir = workspace.open_dir(path).map_err(|e| refused(path, &e))?;
    let first = placed(&dir).map_err(|e| refused(path, &e))?;
    walked.unnamed += first.unnamed;
    walked.has_more |= first.has_more;
    let mut levels = vec![Level {
        dir,
        full: path.to_owned(),
        relative: ".".into(),
        entries: first.named.into_iter(),
    }];
    while let Some(level) = levels.last_mut() {
        let Some(entry) = level.entries.next() else {
            levels.pop();
            continue;
        };
        if stop.is_cancelled() {
            return Err(stopped());
        }
        if walked.visited == MAX_VISITED {
            break;
        }
        walked.visited += 1;
        let (full, relative) = (join(&level.full, &entry.name), join(&level.relative, &entry.name));
        let is_dir = entry.kind == Kind::Directory;
        if !(if is_dir { permit.may_enter(&full) } else { permit.may_read(&full) }) {
            walked.hidden += 1;
            continue;
        }
        if visit(&level.dir, &entry, &relative, &full)?.is_break() {
            break;
        }
        if is_dir {
            let dir = level.dir.open_dir_nofollow(&entry.name);
            match dir.and_then(|dir| placed(&dir).map(|found| (dir, found))) {
                Ok((dir, found)) if levels.len() < MAX_DEPTH => {
                    walked.unnamed += found.unnamed;
                    walked.has_more |= found.has_more;
                    levels.push(Level {
                        dir: dir.into(),
                        full,
                        relative,
                        entries: found.named.into_iter(),
                    });
                }
                _ => walked.too_deep += 1,
            }
        }
    }
    Ok(walked)
}

pub(super) fn compile_pattern(pattern: &str) -> Result<Pattern, ToolError> {
    Pattern::compile(pattern, Author::Caller)
        .map_err(|refused| ToolError::ForModel(format!("the pattern {refused}")))
}

/// A glob on files, which without a `/` means them wherever they are.
pub(super) fn compile_file_glob(glob: &str) -> Result<Glob, ToolError> {
    if glob.contains('/') { compile_glob(glob) } else { compile_glob(&format!("**/{glob}")) }
}

pub(super) fn compile_glob(pattern: &str) -> Result<Glob, ToolError> {
    let relative = pattern.strip_prefix("./").unwrap_or(pattern);
    Glob::of_paths(relative).map_err(|refused| {
        ToolError::ForModel(format!("the pattern {} {refused}", quoted(pattern)))
    })
}

/// Says how much is missing, where something is.
fn note(answer: &mut String, count: usize, what: &str) {
    if count > 0 {
        let _ = writeln!(answer, "[… {count} {what}]");
    }
}

fn trimmed(mut answer: String) -> String {
    answer.truncate(answer.trim_end().len());
    answer
}

#[cfg(test)]
mod tests {
    use cap_std::ambient_authority;

    use super::*;

    #[test]
    fn a_directory_tells_whether_it_has_more_entries_than_are_read() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap();
        for name in ["a", "b", "c"] {
            dir.write(name, "").unwrap();
        }
        for (most, named, has_more) in [(2, 2, true), (3, 3, false), (4, 3, false)] {
            let found = entries_up_to(&dir, most).unwrap();
            assert_eq!((found.named.len(), found.has_more), (named, has_more), "{most}");
        }
    }
}
