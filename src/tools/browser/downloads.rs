//! The downloads of a page during a call that accepts files.
//!
//! Chromium writes each file into a directory of this page, under a name that it generates. Number and
//! size are bounded while files arrive. Whether and where they are saved is decided later (`saving`).

use std::io;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use parking_lot::Mutex;
use rustix::process::geteuid;
use serde_json::Value;
use tempfile::TempDir;

use super::profile::NOBODY;

/// Files that one call takes.
pub(super) const MAX_FILES: usize = 10;
/// Bytes of all of them, while they arrive.
const MAX_BYTES: u64 = 64 * 1024 * 1024;
/// Bytes of a name and of an address that are kept.
const MAX_TEXT: usize = 1024;
/// What Chromium's own names of files are made of.
const MAX_GUID: usize = 64;

/// The downloads of one page.
#[derive(Default)]
pub(super) struct Downloads(Mutex<State>);

#[derive(Default)]
struct State {
    place: Option<Place>,
    /// Whether the current call accepts files.
    is_taking: bool,
    /// The number of downloads that the browser has reported during this call.
    reported: usize,
    begun: Vec<Download>,
}

/// The directory of a page's files; it is removed with the page.
struct Place {
    directory: TempDir,
    handle: Arc<Dir>,
}

/// A file that began to arrive.
#[derive(Debug, Clone)]
pub(super) struct Download {
    /// Its name in the directory.
    pub(super) guid: String,
    /// What the page calls it.
    pub(super) name: String,
    pub(super) url: String,
    received: u64,
    state: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Arriving,
    Complete,
    Failed(&'static str),
}

impl Download {
    /// # Errors
    /// Why the file did not arrive.
    pub(super) fn outcome(&self) -> Result<(), &'static str> {
        match self.state {
            Progress::Complete => Ok(()),
            Progress::Arriving => Err("it did not arrive in time"),
            Progress::Failed(why) => Err(why),
        }
    }
}

impl Place {
    /// In a directory that only the service writes.
    fn within(parent: &Path) -> io::Result<Self> {
        let directory = TempDir::new_in(parent)?;
        let handle = Dir::open_ambient_dir(directory.path(), ambient_authority())?;
        if geteuid().is_root() {
            chown(directory.path(), Some(NOBODY), Some(NOBODY))?;
        }
        Ok(Self { directory, handle: Arc::new(handle) })
    }
}

impl Downloads {
    /// Begins to accept files; returns the directory for them.
    ///
    /// # Errors
    /// Why there is no such place.
    pub(super) fn begin(&self, parent: &Path) -> io::Result<PathBuf> {
        let mut state = self.0.lock();
        let path = if let Some(place) = &state.place {
            place.directory.path().to_owned()
        } else {
            let place = Place::within(parent)?;
            state.place.insert(place).directory.path().to_owned()
        };
        state.begun.clear();
        (state.is_taking, state.reported) = (true, 0);
        Ok(path)
    }

    /// Ends accepting files; returns the downloads that began, and their directory.
    pub(super) fn end(&self) -> Option<(Arc<Dir>, Vec<Download>)> {
        let mut state = self.0.lock();
        state.is_taking = false;
        let begun = std::mem::take(&mut state.begun);
        state.place.as_ref().map(|place| (Arc::clone(&place.handle), begun))
    }

    pub(super) fn are_arriving(&self) -> bool {
        self.0.lock().begun.iter().any(|download| download.state == Progress::Arriving)
    }

    /// Whether a call takes files, and the browser has reported fewer than so many.
    pub(super) fn are_fewer_than(&self, files: usize) -> bool {
        let state = self.0.lock();
        state.is_taking && state.reported < files
    }

    /// Notes that a file begins to arrive.
    ///
    /// # Errors
    /// Why it is not taken.
    pub(super) fn begun(&self, params: &Value) -> Result<(), String> {
        let mut state = self.0.lock();
        state.reported += 1;
        if !state.is_taking {
            return Err(
                "only a click or a text saves files: open the page that has the link, and \
                        click it"
                    .into(),
            );
        }
        if state.begun.len() >= MAX_FILES {
            return Err(format!("one call saves at most {MAX_FILES} files"));
        }
        let text = |name: &str| {
            let text = params[name].as_str().unwrap_or_default();
            text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
        };
        let guid = params["guid"].as_str().unwrap_or_default();
        let is_known = state.begun.iter().any(|download| download.guid == guid);
        let is_plain = guid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if is_known || !is_plain || guid.is_empty() || guid.len() > MAX_GUID {
            return Err("the browser did not name it".into());
        }
        state.begun.push(Download {
            guid: guid.to_owned(),
            name: text("suggestedFilename"),
            url: text("url"),
            received: 0,
            state: Progress::Arriving,
        });
        Ok(())
    }

    /// Notes how far a file has arrived.
    pub(super) fn progressed(&self, params: &Value) {
        let mut state = self.0.lock();
        let others = state.begun.iter().filter(|other| params["guid"] != other.guid.as_str());
        let others: u64 = others.map(|other| other.received).fold(0, u64::saturating_add);
        let known = state.begun.iter_mut().find(|known| params["guid"] == known.guid.as_str());
        let Some(download) = known.filter(|known| known.state == Progress::Arriving) else {
            return;
        };
        let bytes = |name: &str| params[name].as_f64().map_or(0, whole);
        download.received = bytes("receivedBytes").max(bytes("totalBytes"));
        if others.saturating_add(download.received) > MAX_BYTES {
            download.state = Progress::Failed("the files of one call have at most 64 MiB");
            download.received = 0;
            return;
        }
        match params["state"].as_str() {
            Some("completed") => download.state = Progress::Complete,
            Some("canceled") => {
                download.state =
                    Progress::Failed("the browser gave it up: its request failed or was refused");
            }
            _ => {}
        }
    }

    /// Whether the browser is to cancel the reported download.
    pub(super) fn is_unwanted(&self, params: &Value) -> bool {
        let mut begun = self.0.lock().begun.clone().into_iter();
        let known = begun.find(|download| params["guid"] == download.guid.as_str());
        !matches!(params["state"].as_str(), Some("completed" | "canceled"))
            && known.is_none_or(|download| matches!(download.state, Progress::Failed(_)))
    }
}

/// Bytes as the protocol reports them.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and what is no number is none"
)]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn begun(downloads: &Downloads, guid: &str) -> Result<(), String> {
        downloads.begun(&json!({"guid": guid, "url": "http://a/", "suggestedFilename": "a"}))
    }

    fn progress(guid: &str, received: f64, state: &str) -> Value {
        json!({"guid": guid, "totalBytes": 0, "receivedBytes": received, "state": state})
    }

    #[test]
    fn files_are_taken_while_a_call_takes_them() {
        let place = TempDir::new().unwrap();
        let downloads = Downloads::default();
        assert!(begun(&downloads, "a").unwrap_err().contains("click"));
        let directory = downloads.begin(place.path()).unwrap();
        assert!(directory.starts_with(place.path()));
        for wrong in ["", "../a", "a/b", &"a".repeat(MAX_GUID + 1)] {
            assert!(begun(&downloads, wrong).is_err(), "{wrong:?}");
        }
        for number in 0..MAX_FILES {
            begun(&downloads, &format!("a-{number}")).unwrap();
        }
        assert!(begun(&downloads, "a-0").is_err());
        assert!(begun(&downloads, "beyond").unwrap_err().contains("at most 10 files"));
        assert!(downloads.is_unwanted(&progress("beyond", 0.0, "inProgress")));
        for (guid, received, state) in [
            ("a-0", 1e6, "completed"),
            ("a-1", 6e7, "inProgress"),
            ("a-2", 1e7, "inProgress"),
            ("a-3", 1e300, "inProgress"),
            ("a-4", -1.0, "inProgress"),
            ("a-5", 5.0, "canceled"),
        ] {
            downloads.progressed(&progress(guid, received, state));
        }
        assert!(downloads.is_unwanted(&progress("a-2", 2e7, "inProgress")));
        assert!(!downloads.is_unwanted(&progress("a-2", 2e7, "canceled")));
        assert!(!downloads.is_unwanted(&progress("a-1", 6e7, "inProgress")));
        assert!(downloads.are_arriving());
        let (_, taken) = downloads.end().unwrap();
        let complete: Vec<bool> = taken.iter().map(|taken| taken.outcome().is_ok()).collect();
        assert_eq!(complete[..6], [true, false, false, false, false, false]);
        assert!(taken[3].outcome().unwrap_err().contains("64 MiB"));
        assert!(begun(&downloads, "later").is_err());
        drop(downloads);
        assert!(!directory.exists());
    }
}
