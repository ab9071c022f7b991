//! Saves pictures and downloads of a page in the workspace.
//!
//! A picture's path was judged by the gate. A download is unknown before it arrives, so the permit's
//! rules judge it here. It never replaces a file. Its suggested name is untrusted: only a plain file
//! name is made of it.

use std::io::{self, Read, Write};
use std::sync::Arc;

use cap_std::fs::{Dir, MetadataExt};
use tokio_util::sync::CancellationToken;

use super::downloads::{Download, MAX_FILES};
use crate::event::{ChangeKind, FileChange};
use crate::governance::{Decision, Permit};
use crate::tools::file_ops::blocking;
use crate::tools::quota::Growth;
use crate::tools::requests::AdmittedRequest;
use crate::tools::staged_file::StagedFile;
use crate::tools::workspace::open_for_reading;
use crate::tools::{ToolContext, ToolError, Workspace};

/// Where the files go, in the workspace.
const DIRECTORY: &str = "downloads";
/// Bytes of a name, and of its ending.
const MAX_NAME: usize = 120;
const MAX_ENDING: usize = 16;
/// The name of a file that has none.
const NAMELESS: &str = "download";
/// Files of one name.
const MAX_SAME: u32 = 1000;
/// Characters of a name that a page gave, where it is shown.
const MAX_SHOWN: usize = 200;

pub(super) fn picture_path(context: &ToolContext) -> String {
    format!("screenshots/{}.png", context.call_id)
}

pub(super) fn check_standing(context: &ToolContext) -> Result<(), ToolError> {
    let given_up = || ToolError::ForModel("The call was cancelled before it began.".into());
    context.standing.holds().then_some(()).ok_or_else(given_up)
}

/// Writes a picture into the workspace.
pub(super) async fn picture(picture: Vec<u8>, context: &ToolContext) -> Result<String, ToolError> {
    let (workspace, path) = (context.workspace.clone(), picture_path(context));
    let (standing, place, size) = (context.standing.clone(), path.clone(), picture.len());
    let writing = move |stop: &CancellationToken| {
        let may_write = || !stop.is_cancelled() && standing.holds();
        write_picture(&workspace, &place, &picture, may_write)
    };
    blocking(writing).await?;
    context.changed.add(created(&path));
    context.changed.complete();
    Ok(format!("Saved a picture of {size} bytes as {path}."))
}

/// `may_write` says whether the call may still change something.
fn write_picture(
    workspace: &Workspace,
    path: &str,
    picture: &[u8],
    may_write: impl Fn() -> bool,
) -> Result<(), ToolError> {
    let failed = |error: io::Error| {
        ToolError::ForModel(format!("{path:?} cannot be written: {}", error.kind()))
    };
    let destination = workspace.destination(path).map_err(failed)?;
    let growths = [
        Growth::of_file(None, picture.len() as u64),
        Growth::of_directories(destination.missing().len()),
    ];
    let over = |over| ToolError::ForModel(format!("{over}."));
    let _room = workspace.admit_all(growths).map_err(over)?;
    let made = destination.make().map_err(failed)?;
    let (staged, mut file) = StagedFile::create(made.dir()).map_err(failed)?;
    file.write_all(picture).and_then(|()| file.sync_data()).map_err(failed)?;
    let _lock = workspace.lock(&[(made.dir(), made.name())]).map_err(failed)?;
    if !may_write() {
        return Err(ToolError::ForModel("The call was cancelled.".into()));
    }
    staged.replace(made.dir(), made.name()).map_err(failed)?;
    made.keep();
    Ok(())
}

/// Moves files that have arrived into the workspace, as far as the rules permit it, and reports what
/// happened to each.
pub(super) async fn files(
    arrived: (Arc<Dir>, Vec<Download>),
    permit: &Permit,
    context: &ToolContext,
) -> Result<String, ToolError> {
    let (from, downloads) = arrived;
    let (permit, own_context) = (permit.clone(), context.clone());
    let reports = blocking(move |stop| {
        let saving = Saving { from: &from, permit: &permit, context: &own_context, stop };
        let reports: Vec<String> =
            downloads.iter().map(|download| saving.report(download)).collect();
        saving.clear();
        Ok(reports.concat())
    });
    let reports = reports.await?;
    context.changed.complete();
    Ok(reports)
}

fn created(path: &str) -> FileChange {
    let created = FileChange::plain(path, ChangeKind::Created);
    FileChange { added: None, removed: None, ..created }
}

struct Saving<'a> {
    from: &'a Dir,
    permit: &'a Permit,
    context: &'a ToolContext,
    stop: &'a CancellationToken,
}

impl Saving<'_> {
    fn report(&self, download: &Download) -> String {
        match self.save(download) {
            Ok((path, size)) => format!("\nSaved a file of {size} bytes as {path}."),
            Err(why) => {
                let name: String = download.name.chars().take(MAX_SHOWN).collect();
                format!("\nThe file {name:?} was not saved: {why}.")
            }
        }
    }

    fn save(&self, download: &Download) -> Result<(String, u64), String> {
        download.outcome()?;
        let system = |error: io::Error| format!("it cannot be written: {}", error.kind());
        let mut source = open_for_reading(self.from, &download.guid).map_err(system)?;
        let metadata = source.metadata().map_err(system)?;
        if !metadata.is_file() || metadata.nlink() != 1 {
            return Err("it is not a regular file".into());
        }
        let size = metadata.len();
        let name = plain_name(&download.name);
        for number in 1..=MAX_SAME {
            let path = format!("{DIRECTORY}/{}", numbered(&name, number));
            let workspace = &self.context.workspace;
            let entry = workspace.resolve_entry(&path).map_err(|error| error.to_string())?;
            if entry.kind.is_some() {
                continue;
            }
            let path = entry.path;
            let admitted = self.judge(&path, size, download)?;
            if !self.context.changed.may_add(&path) {
                return Err("the run's budget of files is used up (max_files_modified)".into());
            }
            let destination = workspace.destination(&path).map_err(system)?;
            let directories = Growth::of_directories(destination.missing().len());
            let _room = workspace
                .admit_all([Growth::of_file(None, size), directories])
                .map_err(|over| over.to_string())?;
            let made = destination.make().map_err(system)?;
            let (staged, mut file) = StagedFile::create(made.dir()).map_err(system)?;
            let copied = io::copy(&mut (&mut source).take(size), &mut file).map_err(system)?;
            if copied != size {
                return Err("it changed while it was read".into());
            }
            file.sync_data().map_err(system)?;
            if self.stop.is_cancelled() || !self.context.standing.holds() {
                return Err("the call was cancelled".into());
            }
            match staged.place(made.dir(), made.name()) {
                Ok(()) => {
                    made.keep();
                    self.context.requests.record_written(admitted);
                    self.context.changed.add(created(&path));
                    return Ok((path, size));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    workspace.freed(size);
                    source = open_for_reading(self.from, &download.guid).map_err(system)?;
                }
                Err(error) => return Err(system(error)),
            }
        }
        Err(format!("{MAX_SAME} files have this name already"))
    }

    /// The decision of the rules on the file, which is recorded for the audit log.
    fn judge(&self, path: &str, size: u64, download: &Download) -> Result<AdmittedRequest, String> {
        let ruling = self.permit.ruling_on_new_file(path);
        let refused = (ruling.decision > Decision::Warned).then(|| ruling.reason.clone());
        let admitted = self.context.requests.file(path, size, &download.url, ruling);
        refused.map_or(Ok(admitted), |why| Err(why.unwrap_or_default()))
    }

    /// Removes what the browser has put there.
    fn clear(&self) {
        let Ok(left) = self.from.entries() else { return };
        for entry in left.flatten().take(2 * MAX_FILES) {
            let _ = entry.remove_file(); // goes with the page at the latest
        }
    }
}

/// A name without directories, without a leading dot, of visible characters.
fn plain_name(suggested: &str) -> String {
    let last = suggested.rsplit(['/', '\\']).next().unwrap_or_default();
    let is_unseen = |c: &char| {
        c.is_control()
            || matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let plain = |c: char| if r#":*?"<>|"#.contains(c) { '_' } else { c };
    let name: String = last.chars().filter(|c| !is_unseen(c)).map(plain).collect();
    // Chromium writes `_` for characters that would lead to another directory.
    let name = name.trim_start_matches("_.").trim_matches(|c: char| c == '.' || c.is_whitespace());
    if name.is_empty() {
        return NAMELESS.into();
    }
    let (stem, ending) = parts(name);
    let stem = &stem[..stem.floor_char_boundary(MAX_NAME - ending.len())];
    format!("{stem}{ending}")
}

/// The name and its ending with the dot, where it has one that is worth keeping.
fn parts(name: &str) -> (&str, &str) {
    match name.rfind('.') {
        Some(dot) if dot > 0 && name.len() - dot <= MAX_ENDING => name.split_at(dot),
        _ => (name, ""),
    }
}

fn numbered(name: &str, number: u32) -> String {
    let (stem, ending) = parts(name);
    if number == 1 { name.to_owned() } else { format!("{stem}-{number}{ending}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_pages_become_plain_names() {
        let long = "x".repeat(5_000);
        let long_ending = format!("a.{long}");
        for (suggested, name) in [
            ("report.pdf", "report.pdf"),
            ("../../etc/passwd", "passwd"),
            ("/etc/cron.d/x", "x"),
            ("..\\..\\a.exe", "a.exe"),
            (".bashrc", "bashrc"),
            ("...", "download"),
            ("", "download"),
            ("a\0b\nc", "abc"),
            ("a\u{202e}fdp.exe", "afdp.exe"),
            ("a/", "download"),
            ("C:x|y?.txt", "C_x_y_.txt"),
            (" a . ", "a"),
            ("_.._x_y.zip", "_x_y.zip"),
            ("Bericht für März.csv", "Bericht für März.csv"),
            (&long, &long[..MAX_NAME]),
            (&long_ending, &long_ending[..MAX_NAME]),
        ] {
            assert_eq!(plain_name(suggested), name, "{suggested:?}");
        }
        assert_eq!(plain_name(&format!("{long}.tar.gz")).len(), MAX_NAME);
        assert!(plain_name(&format!("{long}.tar.gz")).ends_with("x.gz"));
        assert_eq!(numbered("a.tar.gz", 2), "a.tar-2.gz");
        assert_eq!(numbered("a", 12), "a-12");
    }

    #[test]
    fn a_call_that_was_given_up_leaves_no_picture() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(root.path(), "t", ".").unwrap();
        let write = |may: bool| write_picture(&workspace, "screenshots/a.png", b"png", || may);
        assert!(write(false).is_err());
        assert_eq!(std::fs::read_dir(root.path().join("t")).unwrap().count(), 0);
        write(true).unwrap();
        assert_eq!(std::fs::read(root.path().join("t/screenshots/a.png")).unwrap(), b"png");
    }

    proptest! {
        #[test]
        fn no_name_leaves_the_directory(suggested in any::<String>()) {
            let name = plain_name(&suggested);
            prop_assert!(!name.is_empty() && name.len() <= MAX_NAME);
            prop_assert!(!name.starts_with('.') && !name.contains(['/', '\\']));
            let path = format!("{DIRECTORY}/{name}");
            prop_assert_eq!(crate::tools::workspace::normalise(&path).ok(), Some(path));
        }
    }
}
