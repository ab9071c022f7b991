//! What an operation changed, as a unified diff with its counts.
//!
//! The equal beginning and end are removed first, so that a small change of a large file is found at
//! once. The rest is compared for a limited time; after that the diff is correct but not minimal. For
//! large files only the counts are reported.

use std::fmt::Write as _;
use std::io::Read;
use std::time::{Duration, Instant};

use cap_std::fs::{Dir, File};
use similar::{Algorithm, DiffOp, capture_diff_slices_deadline, group_diff_ops};

use crate::event::{ChangeKind, FileChange, MAX_DIFF};
use crate::tools::workspace::open_for_reading;

/// Bytes of a text that is compared line by line.
pub(super) const MAX_COMPARED: usize = 1024 * 1024;
/// Lines that are compared one by one; more of them are replaced as a whole.
const MAX_LINES: usize = 20_000;
/// How long they are compared.
const MAX_WAIT: Duration = Duration::from_millis(20);
/// Lines around a change.
const CONTEXT: usize = 3;

/// A file before it is changed.
pub(super) enum Before {
    Nothing,
    Content(Vec<u8>),
    /// More than is read for a diff.
    TooLarge,
}

impl Before {
    /// The content of a file of at most this many bytes.
    pub(super) fn of(dir: &Dir, name: &str, most: u64) -> Self {
        let Ok(file) = open_for_reading(dir, name) else { return Self::Nothing };
        let is_small = |file: &File| file.metadata().is_ok_and(|m| m.is_file() && m.len() <= most);
        let mut content = Vec::new();
        if !is_small(&file) || file.take(most + 1).read_to_end(&mut content).is_err() {
            return Self::TooLarge;
        }
        if content.len() as u64 > most { Self::TooLarge } else { Self::Content(content) }
    }
}

/// The change of a file. `after` is `None` if the file was deleted.
pub(super) fn compared(path: &str, before: &Before, after: Option<&[u8]>) -> FileChange {
    let change = match (before, after) {
        (Before::Nothing, _) => ChangeKind::Created,
        (_, None) => ChangeKind::Deleted,
        _ => ChangeKind::Modified,
    };
    let plain = FileChange::plain(path, change);
    let before = match before {
        Before::Nothing => None,
        Before::Content(content) => Some(content.as_slice()),
        Before::TooLarge => {
            let unknown = FileChange { added: None, removed: None, truncated: true, ..plain };
            return unknown;
        }
    };
    let (Some(old), Some(new)) = (text(before), text(after)) else {
        return FileChange { added: None, removed: None, ..plain };
    };
    if old.len().max(new.len()) > MAX_COMPARED {
        let (removed, added) = counts(old, new);
        return FileChange { added: Some(added), removed: Some(removed), truncated: true, ..plain };
    }
    let (old, new) = (lines(old), lines(new));
    let ops = operations(&old, &new);
    let (mut removed, mut added) = (0, 0);
    for op in &ops {
        if !matches!(op, DiffOp::Equal { .. }) {
            removed += op.old_range().len() as u64;
            added += op.new_range().len() as u64;
        }
    }
    let mut diff = Diff::new(path, change);
    for group in group_diff_ops(ops, CONTEXT) {
        diff.hunk(&group, &old, &new);
    }
    let Diff { text, truncated } = diff;
    FileChange { added: Some(added), removed: Some(removed), diff: Some(text), truncated, ..plain }
}

/// The text of a file; an absent file counts as empty.
fn text(content: Option<&[u8]>) -> Option<&str> {
    let text = std::str::from_utf8(content.unwrap_or_default()).ok()?;
    (!text.contains('\0')).then_some(text)
}

fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

/// Lines between the equal beginning and the equal end of two texts.
fn counts(old: &str, new: &str) -> (u64, u64) {
    let (old, new) = (old.as_bytes(), new.as_bytes());
    let same = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let start = old[..same].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let (old, new) = (&old[start..], &new[start..]);
    let same = old.iter().rev().zip(new.iter().rev()).take_while(|(a, b)| a == b).count();
    let begins = |text: &[u8]| text.len() == same || text[text.len() - same - 1] == b'\n';
    let end = if begins(old) && begins(new) {
        same
    } else {
        // From the first whole line on.
        let tail = &old[old.len() - same..];
        tail.iter().position(|byte| *byte == b'\n').map_or(0, |at| same - at - 1)
    };
    let count = |text: &[u8]| {
        let text = &text[..text.len() - end];
        let ends = text.split(|byte| *byte == b'\n').count() - 1;
        (ends + usize::from(text.last().is_some_and(|byte| *byte != b'\n'))) as u64
    };
    (count(old), count(new))
}

fn operations(old: &[&str], new: &[&str]) -> Vec<DiffOp> {
    let first = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let (old_rest, new_rest) = (&old[first..], &new[first..]);
    let last = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(|(a, b)| a == b).count();
    let (old_rest, new_rest) =
        (&old_rest[..old_rest.len() - last], &new_rest[..new_rest.len() - last]);
    let mut ops = Ops::default();
    ops.equal(first);
    if old_rest.len() + new_rest.len() > MAX_LINES {
        ops.replaced(old_rest.len(), new_rest.len());
    } else {
        let deadline = Some(Instant::now() + MAX_WAIT);
        for op in capture_diff_slices_deadline(Algorithm::Myers, old_rest, new_rest, deadline) {
            match op {
                DiffOp::Equal { len, .. } => ops.equal(len),
                _ => ops.replaced(op.old_range().len(), op.new_range().len()),
            }
        }
    }
    ops.equal(last);
    ops.all
}

/// Steps from one text to another, each where the one before it ends: the library's own places are
/// not always those.
#[derive(Default)]
struct Ops {
    all: Vec<DiffOp>,
    old_index: usize,
    new_index: usize,
}

impl Ops {
    fn equal(&mut self, len: usize) {
        let Self { old_index, new_index, .. } = *self;
        self.add(DiffOp::Equal { old_index, new_index, len }, len, len);
    }

    fn replaced(&mut self, old_len: usize, new_len: usize) {
        let Self { old_index, new_index, .. } = *self;
        self.add(DiffOp::Replace { old_index, old_len, new_index, new_len }, old_len, new_len);
    }

    fn add(&mut self, op: DiffOp, old_len: usize, new_len: usize) {
        if old_len + new_len > 0 {
            self.all.push(op);
        }
        self.old_index += old_len;
        self.new_index += new_len;
    }
}

/// A diff that is being written, up to its bound.
struct Diff {
    text: String,
    truncated: bool,
}

impl Diff {
    fn new(path: &str, change: ChangeKind) -> Self {
        let side = |prefix: &str, is_there: bool| {
            if is_there { format!("{prefix}/{path}") } else { "/dev/null".to_owned() }
        };
        let old = side("a", change != ChangeKind::Created);
        let new = side("b", change != ChangeKind::Deleted);
        Self { text: format!("--- {old}\n+++ {new}\n"), truncated: false }
    }

    fn hunk(&mut self, group: &[DiffOp], old: &[&str], new: &[&str]) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return };
        if self.truncated {
            return;
        }
        let range = |start: usize, end: usize| {
            let len = end - start;
            let start = if len == 0 { start } else { start + 1 };
            if len == 1 { start.to_string() } else { format!("{start},{len}") }
        };
        let old_range = range(first.old_range().start, last.old_range().end);
        let new_range = range(first.new_range().start, last.new_range().end);
        let _ = writeln!(self.text, "@@ -{old_range} +{new_range} @@");
        for op in group {
            if let DiffOp::Equal { .. } = op {
                old[op.old_range()].iter().for_each(|line| self.line(' ', line));
            } else {
                old[op.old_range()].iter().for_each(|line| self.line('-', line));
                new[op.new_range()].iter().for_each(|line| self.line('+', line));
            }
        }
    }

    fn line(&mut self, sign: char, line: &str) {
        if self.truncated {
            return;
        }
        // Room for the note about a missing end.
        let left = MAX_DIFF.saturating_sub(self.text.len() + 40);
        if line.len() > left {
            self.truncated = true;
            return;
        }
        self.text.push(sign);
        self.text.push_str(line);
        if !line.ends_with('\n') {
            self.text.push_str("\n\\ No newline at end of file\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bounds::patch;

    fn change(before: Option<&str>, after: Option<&str>) -> FileChange {
        let before = before.map_or(Before::Nothing, |text| Before::Content(text.into()));
        compared("d/f", &before, after.map(str::as_bytes))
    }

    #[test]
    fn changes_are_unified_diffs() {
        let made = change(None, Some("a\nb"));
        let diff =
            "--- /dev/null\n+++ b/d/f\n@@ -0,0 +1,2 @@\n+a\n+b\n\\ No newline at end of file\n";
        assert_eq!((made.change, made.diff.as_deref()), (ChangeKind::Created, Some(diff)));
        assert_eq!((made.added, made.removed, made.truncated), (Some(2), Some(0), false));
        let before: Vec<String> = (1..=20).map(|n| format!("{n}\n")).collect();
        let before = before.concat();
        let changed = change(Some(&before), Some(&before.replace("10\n", "ten\n")));
        let diff = "--- a/d/f\n+++ b/d/f\n@@ -7,7 +7,7 @@\n 7\n 8\n 9\n-10\n+ten\n 11\n 12\n 13\n";
        assert_eq!(changed.diff.as_deref(), Some(diff));
        assert_eq!((changed.added, changed.removed), (Some(1), Some(1)));
        let gone = change(Some("a\n"), None);
        assert_eq!(gone.diff.as_deref(), Some("--- a/d/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"));
    }

    #[test]
    fn binary_and_large_contents_have_no_diff() {
        let binary = compared("f", &Before::Content(b"a\0b".to_vec()), Some(b"text"));
        assert_eq!((binary.diff, binary.added, binary.truncated), (None, None, false));
        let line = "0123456789\n";
        let large = line.repeat(MAX_COMPARED / 10);
        let changed = change(Some(&large), Some(&format!("new\n{large}end")));
        assert_eq!((changed.diff, changed.truncated), (None, true));
        let changed = change(Some(&large), Some(&large.replacen("9\n0", "9\nnew\n0", 1)));
        assert_eq!((changed.added, changed.removed), (Some(1), Some(0)));
        let long = change(None, Some(&line.repeat(10_000)));
        assert!(long.truncated && long.diff.unwrap().len() <= MAX_DIFF);
        assert_eq!(long.added, Some(10_000));
    }

    #[test]
    fn a_diff_takes_no_longer_than_its_time() {
        let mixed = |step: usize| -> String {
            let lines = (0..10_000).map(|n| format!("{}\n", n * step % 7919 % 97));
            lines.collect::<Vec<_>>().concat()
        };
        let since = Instant::now();
        let changed = change(Some(&mixed(31)), Some(&mixed(57)));
        assert!(changed.truncated && changed.added > Some(0));
        assert!(since.elapsed() < Duration::from_secs(20));
    }

    proptest! {
        #[test]
        fn a_diff_applied_is_the_new_text(before in "(a\n|b\n|c\n|d\n){0,30}[ab]{0,1}", after in "(a\n|b\n|c\n|d\n){0,30}[ab]{0,1}") {
            prop_assume!(before != after);
            let diff = change(Some(&before), Some(&after)).diff.unwrap();
            let files = patch::parse(&diff).unwrap();
            prop_assert_eq!(files[0].apply(&before).unwrap(), after);
        }
    }
}
