//! Which call of a run last changed a file, from the run's journal.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::SystemTime;

use uuid::Uuid;

use super::journal;
use crate::event::{ChangeKind, Event, RunEvent};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::tools::stored_files::ListedFile;

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
        if files.is_empty() {
            return Ok(changes);
        }
        journal::read(app, tenant, run, |event| {
            changes.take_in(event);
            ControlFlow::Continue(())
        })
        .await?;
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
