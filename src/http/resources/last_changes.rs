//! Which call of a run last changed a file, from the run's journal.

use std::collections::HashMap;
use std::time::SystemTime;

use uuid::Uuid;

use crate::event::{ChangeKind, Event, RunEvent};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::tools::stored_files::ListedFile;

/// How many events are read in one query.
const CHUNK: u32 = 500;

/// The last change of each path by the run's calls of `file_ops`.
#[derive(Default)]
pub(super) struct LastChanges(HashMap<String, (Uuid, SystemTime)>);

impl LastChanges {
    /// Of a run; the journal is not read where there is no file.
    pub(super) async fn of(
        app: &App,
        tenant: &str,
        run: Uuid,
        files: &[ListedFile],
    ) -> Result<Self, Problem> {
        let mut changes = Self::default();
        let mut seen = 0;
        while !files.is_empty() {
            let events = app.store.events(tenant, run, seen, CHUNK).await?;
            let Some(last) = events.last().map(|event| event.seq) else { break };
            for event in events {
                changes.take_in(event);
            }
            seen = last;
        }
        Ok(changes)
    }

    fn take_in(&mut self, Event { at, what, .. }: Event) {
        let RunEvent::ToolCallCompleted(call) = what else { return };
        for change in call.changes.unwrap_or_default() {
            if let Some(from) = change.from {
                self.0.remove(&from);
            }
            match change.change {
                ChangeKind::Deleted => self.0.remove(&change.path),
                ChangeKind::Created | ChangeKind::Modified | ChangeKind::Moved => {
                    self.0.insert(change.path, (call.call_id, at.into()))
                }
            };
        }
    }

    /// The call that left a file as it is now; none where it was changed since.
    pub(super) fn take(&mut self, file: &ListedFile) -> Option<Uuid> {
        let (call, at) = self.0.remove(&file.path)?;
        (file.modified <= at).then_some(call)
    }
}
