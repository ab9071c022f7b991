//! Unified diffs that a model wrote: read into files and hunks, and applied to texts.
//!
//! Git's extended headers are skipped if they change nothing; renames, modes and binary files are
//! refused. A hunk is applied where all its old lines match, as near as possible to the line in its
//! header; nothing else is guessed. A hunk that does not match is refused, with the first line that
//! differs. The bounds limit the time of parsing and applying.

use super::Refused;
use super::text::quoted;

/// Bytes of a patch.
pub const MAX_PATCH: usize = 1024 * 1024;
/// Files of a patch.
pub const MAX_FILES: usize = 100;
/// Hunks of a patch.
pub const MAX_HUNKS: usize = 1000;
/// Lines of all hunks.
pub const MAX_LINES: usize = 50_000;
/// Lines of a text that is patched.
const MAX_TEXT_LINES: usize = 1_000_000;
/// Maximum distance in lines between the line in a hunk's header and the place where it matches.
const MAX_AWAY: usize = 2000;
/// Lines that are compared for one file.
const MAX_STEPS: usize = 5_000_000;

const NOTHING: &str = "/dev/null";
/// Lines that Git writes above a file and that are skipped.
const PASSED_OVER: [&str; 6] =
    ["diff --git ", "index ", "new file mode ", "deleted file mode ", "similarity index ", "```"];
/// Changes in Git's format that are not changes of lines.
const REFUSED: [(&str, &str); 8] = [
    ("rename ", "renames a file; use the operation move"),
    ("copy ", "copies a file; write the new one"),
    ("old mode ", "changes the mode of a file"),
    ("new mode ", "changes the mode of a file"),
    ("GIT binary patch", "is about a binary file"),
    ("Binary files ", "is about a binary file"),
    ("*** ", "is no unified diff"),
    ("@@ ", "stands before the names of its file (`--- a/PATH` and `+++ b/PATH`)"),
];

/// What a patch does to one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePatch<'a> {
    pub path: &'a str,
    pub what: PatchKind,
    /// Lines.
    pub added: usize,
    pub removed: usize,
    hunks: Vec<Hunk<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchKind {
    Create,
    Modify,
    Delete,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hunk<'a> {
    /// The line that its header names, 0-based.
    start: usize,
    lines: Vec<Line<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Line<'a> {
    side: Side,
    /// Without its end.
    text: &'a str,
    ends: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Both,
    Old,
    New,
}

/// Reads a patch.
///
/// # Errors
/// What is wrong with it, and in which line.
pub fn parse(patch: &str) -> Result<Vec<FilePatch<'_>>, Refused> {
    if patch.len() > MAX_PATCH {
        return Err(Refused(format!("the patch is larger than {MAX_PATCH} bytes")));
    }
    let mut lines: Vec<&str> = patch.split('\n').collect();
    lines.pop_if(|last| last.is_empty());
    let mut reader = Reader { lines, next: 0, hunks: 0, body: 0 };
    let mut files: Vec<FilePatch<'_>> = Vec::new();
    while let Some(file) = reader.file()? {
        if files.len() == MAX_FILES {
            return Err(Refused(format!("the patch has more than {MAX_FILES} files")));
        }
        if files.iter().any(|other| other.path == file.path) {
            return Err(Refused(format!("{} is there twice", quoted(file.path))));
        }
        files.push(file);
    }
    if files.is_empty() {
        return Err(Refused(
            "the patch is empty: it needs `--- a/PATH`, `+++ b/PATH` and hunks".to_owned(),
        ));
    }
    Ok(files)
}

struct Reader<'a> {
    lines: Vec<&'a str>,
    next: usize,
    /// Counted over all files.
    hunks: usize,
    body: usize,
}

impl<'a> Reader<'a> {
    fn wrong<T>(&self, message: &str) -> Result<T, Refused> {
        Err(Refused(format!("line {} of the patch {message}", self.next + 1)))
    }

    fn peek(&self) -> Option<&'a str> {
        self.lines.get(self.next).copied()
    }

    fn file(&mut self) -> Result<Option<FilePatch<'a>>, Refused> {
        let old = loop {
            let Some(line) = self.peek() else { return Ok(None) };
            if let Some(old) = line.strip_prefix("--- ") {
                break old;
            }
            if let Some((_, why)) = REFUSED.iter().find(|(start, _)| line.starts_with(start)) {
                return self.wrong(why);
            }
            let is_passed =
                line.trim().is_empty() || PASSED_OVER.iter().any(|start| line.starts_with(start));
            if !is_passed {
                let message = format!("is {}, not `--- a/PATH` or a line of a hunk", quoted(line));
                return self.wrong(&message);
            }
            self.next += 1;
        };
        let old = self.path(old)?;
        self.next += 1;
        let Some(new) = self.peek().and_then(|line| line.strip_prefix("+++ ")) else {
            return self.wrong("should be `+++ b/PATH`");
        };
        let new = self.path(new)?;
        let prefixed = |path: &str, prefix: &str| path == NOTHING || path.starts_with(prefix);
        let is_prefixed = prefixed(old, "a/") && prefixed(new, "b/");
        let plain = |path: &'a str| {
            if is_prefixed && path != NOTHING { &path[2..] } else { path }
        };
        let (path, what) = match (plain(old), plain(new)) {
            (NOTHING, NOTHING) => return self.wrong("names no file"),
            (NOTHING, path) => (path, PatchKind::Create),
            (path, NOTHING) => (path, PatchKind::Delete),
            (old, new) if old == new => (old, PatchKind::Modify),
            _ => return self.wrong("names another file; use the operation move to rename one"),
        };
        self.next += 1;
        let mut file = FilePatch { path, what, added: 0, removed: 0, hunks: Vec::new() };
        while let Some(header) = self.peek().filter(|line| line.starts_with("@@")) {
            let hunk = self.hunk(header, path, file.hunks.len() + 1)?;
            let count = |side| hunk.lines.iter().filter(|line| line.side == side).count();
            file.added += count(Side::New);
            file.removed += count(Side::Old);
            file.hunks.push(hunk);
        }
        if file.hunks.is_empty() {
            return self.wrong("should be a hunk, `@@ -LINE,COUNT +LINE,COUNT @@`");
        }
        Ok(Some(file))
    }

    /// A name behind `---` or `+++`, without the time behind it.
    fn path(&self, written: &'a str) -> Result<&'a str, Refused> {
        let path = written.split('\t').next().unwrap_or_default().trim_end();
        if path.is_empty() || path.starts_with('"') {
            return self
                .wrong("names a file in a way that is not understood; write its plain path");
        }
        Ok(path)
    }

    fn hunk(&mut self, header: &str, path: &str, number: usize) -> Result<Hunk<'a>, Refused> {
        self.hunks += 1;
        if self.hunks > MAX_HUNKS {
            return Err(Refused(format!("the patch has more than {MAX_HUNKS} hunks")));
        }
        let Some([old_start, old_count, _, new_count]) = numbers(header) else {
            return self.wrong("should be `@@ -LINE,COUNT +LINE,COUNT @@`");
        };
        self.next += 1;
        // Behind a line where nothing is taken away, at a line elsewhere.
        let start = if old_count == 0 { old_start } else { old_start.saturating_sub(1) };
        let mut hunk = Hunk { start, lines: Vec::new() };
        let (mut old, mut new) = (0, 0);
        while old < old_count || new < new_count {
            let line = self.peek();
            let (side, text) = match line.and_then(|line| line.split_at_checked(1)) {
                Some((" ", text)) => (Side::Both, text),
                Some(("-", text)) => (Side::Old, text),
                Some(("+", text)) => (Side::New, text),
                Some(("\\", _)) => {
                    self.unended(&mut hunk);
                    continue;
                }
                // Blanks at the end of a line are easily lost.
                None if line.is_some() => (Side::Both, ""),
                _ => return Err(counted(path, number, [old_count, new_count], [old, new])),
            };
            self.body += 1;
            if self.body > MAX_LINES {
                return Err(Refused(format!("the hunks have more than {MAX_LINES} lines")));
            }
            old += usize::from(side != Side::New);
            new += usize::from(side != Side::Old);
            hunk.lines.push(Line { side, text, ends: true });
            self.next += 1;
        }
        if (old, new) != (old_count, new_count) {
            return Err(counted(path, number, [old_count, new_count], [old, new]));
        }
        if self.peek().is_some_and(|line| line.starts_with('\\')) {
            self.unended(&mut hunk);
        }
        let is_more = |line: &str| {
            line.starts_with([' ', '+', '-'])
                && !line.starts_with("--- ")
                && !line.trim().is_empty()
        };
        if self.peek().is_some_and(is_more) {
            return self.wrong(&format!(
                "is one too many for hunk {number} of {}, whose header counts {old_count} old and {new_count} new lines",
                quoted(path)
            ));
        }
        Ok(hunk)
    }

    /// `\ No newline at end of file`
    fn unended(&mut self, hunk: &mut Hunk<'a>) {
        if let Some(last) = hunk.lines.last_mut() {
            last.ends = false;
        }
        self.next += 1;
    }
}

fn counted(path: &str, number: usize, says: [usize; 2], has: [usize; 2]) -> Refused {
    Refused(format!(
        "hunk {number} of {} has {} old and {} new lines, its header counts {} and {}",
        quoted(path),
        has[0],
        has[1],
        says[0],
        says[1]
    ))
}

/// The four numbers of a hunk's header.
fn numbers(header: &str) -> Option<[usize; 4]> {
    let (ranges, _) = header.strip_prefix("@@ -")?.split_once(" @@")?;
    let (old, new) = ranges.split_once(" +")?;
    let number = |text: &str| text.parse::<u32>().ok().map(|number| number as usize);
    let range = |text: &str| match text.split_once(',') {
        Some((start, count)) => Some([number(start)?, number(count)?]),
        None => Some([number(text)?, 1]),
    };
    let ([old_start, old_count], [new_start, new_count]) = (range(old)?, range(new)?);
    Some([old_start, old_count, new_start, new_count])
}

impl FilePatch<'_> {
    /// The text that the patch makes of a text.
    ///
    /// # Errors
    /// Which hunk does not fit, and why.
    pub fn apply(&self, text: &str) -> Result<String, Refused> {
        let lines: Vec<&str> = text.split_inclusive('\n').take(MAX_TEXT_LINES + 1).collect();
        if lines.len() > MAX_TEXT_LINES {
            let path = quoted(self.path);
            return Err(Refused(format!("{path} has more than {MAX_TEXT_LINES} lines")));
        }
        let mut made = String::with_capacity(text.len());
        let (mut done, mut away, mut steps) = (0, 0_isize, 0);
        for (index, hunk) in self.hunks.iter().enumerate() {
            let old: Vec<&Line<'_>> =
                hunk.lines.iter().filter(|line| line.side != Side::New).collect();
            let expected = hunk.start.saturating_add_signed(away);
            let found = place(&lines, &old, done, expected, &mut steps);
            let at = found.ok_or_else(|| self.misfit(index, &lines, &old, expected.max(done)))?;
            away = at.cast_signed() - hunk.start.cast_signed();
            lines[done..at].iter().for_each(|line| push(&mut made, line));
            done = at;
            for Line { side, text, ends } in &hunk.lines {
                match side {
                    Side::Both => push(&mut made, lines[done]),
                    Side::New => push(&mut made, text),
                    Side::Old => {}
                }
                if *side == Side::New && *ends {
                    made.push('\n');
                }
                done += usize::from(*side != Side::New);
            }
        }
        lines[done..].iter().for_each(|line| push(&mut made, line));
        if self.what == PatchKind::Delete && !made.is_empty() {
            let path = quoted(self.path);
            let message =
                format!("{path} has lines that the patch does not remove, so it is not deleted");
            return Err(Refused(message));
        }
        Ok(made)
    }

    fn misfit(&self, index: usize, lines: &[&str], old: &[&Line<'_>], at: usize) -> Refused {
        let differs = old.iter().zip(at..).find_map(|(line, place)| match lines.get(place) {
            Some(there) if is_same(there, line) => None,
            there => Some((place + 1, *line, there)),
        });
        let why = match differs {
            Some((place, line, Some(there))) => format!(
                "at line {place} the file has {}, the hunk {}",
                quoted(there.trim_end_matches('\n')),
                quoted(line.text)
            ),
            Some((_, line, None)) => format!(
                "the file ends with line {}, the hunk goes on with {}",
                lines.len(),
                quoted(line.text)
            ),
            None => "looking for its place takes too long; correct the line in its header".into(),
        };
        Refused(format!(
            "hunk {} of {} does not fit: {why}; read the file again",
            index + 1,
            quoted(self.path)
        ))
    }
}

/// Adds a piece of a text, on a line of its own.
fn push(made: &mut String, piece: &str) {
    if !made.is_empty() && !made.ends_with('\n') {
        made.push('\n');
    }
    made.push_str(piece);
}

fn is_same(there: &str, line: &Line<'_>) -> bool {
    there.strip_suffix('\n').unwrap_or(there) == line.text
}

/// Where lines are, from `first` on, nearest to where they are expected.
fn place(
    lines: &[&str],
    old: &[&Line<'_>],
    first: usize,
    expected: usize,
    steps: &mut usize,
) -> Option<usize> {
    let last = lines.len().checked_sub(old.len())?;
    if old.is_empty() {
        return (first..=last).contains(&expected).then_some(expected);
    }
    let mut fits = |at: usize| {
        old.iter().zip(&lines[at..]).all(|(line, there)| {
            *steps += 1;
            *steps <= MAX_STEPS && is_same(there, line)
        })
    };
    (0..=MAX_AWAY).find_map(|away| {
        let before = expected.checked_sub(away);
        let after = (away > 0).then(|| expected.checked_add(away)).flatten();
        let mut tried = before.into_iter().chain(after);
        tried.find(|at| (first..=last).contains(at) && fits(*at))
    })
}

#[cfg(test)]
#[path = "patch_tests.rs"]
mod tests;
