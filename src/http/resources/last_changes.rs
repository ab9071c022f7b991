//! Who last changed a file: which call of which run, from the journals, or which caller, from the
//! audit log.
//!
//! A change counts if the file has not been changed since it was recorded. Only the newest runs that
//! share the workspace are searched, since they are the likely ones.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::journal;
use crate::clock;
use crate::event::{AuditAction, ChangeKind, Event, RunEvent};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::runtime::FileUsers;
use crate::store::{AuditFilter, Page, RunFilter};
use crate::tools::stored_files::ListedFile;

/// Runs that share a workspace and may have been in progress at the time.
const RUNS: u32 = 100;
/// Journals of them that are read.
const JOURNALS: usize = 20;
/// Audit records of uploads that are searched.
const UPLOADS: u32 = 1000;

/// The greatest difference between the clocks of the file system and the database. A file system rounds its
/// times.
const SKEW: TimeDelta = TimeDelta::seconds(1);

/// Who changed a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Changer {
    pub(super) call: Option<Uuid>,
    pub(super) run: Option<Uuid>,
    pub(super) subject: Option<String>,
}

/// The last known change of each path.
#[derive(Default)]
pub(super) struct LastChanges(HashMap<String, (DateTime<Utc>, Changer)>);

impl LastChanges {
    /// The last changes of files of a workspace; nothing is read if there are none.
    pub(super) async fn of(
        app: &App,
        tenant: &str,
        users: &FileUsers,
        files: &[ListedFile],
    ) -> Result<Self, Problem> {
        let mut changes = Self::default();
        let times = || files.iter().flat_map(times_of);
        let (Some(oldest), Some(newest)) = (times().min(), times().max()) else {
            return Ok(changes);
        };
        let (oldest, newest) = (oldest - SKEW, newest + SKEW);
        let mut runs: Vec<Uuid> = users.run.into_iter().collect();
        let mut sharing: HashSet<Uuid> = runs.iter().copied().collect();
        if users.agent.is_some() || users.session.is_some() {
            let agent = if users.session.is_some() { None } else { users.agent.clone() };
            let session_id = users.session.clone();
            let filter = RunFilter { agent, session_id, ..RunFilter::default() };
            let page = Page { limit: RUNS, after: None };
            for run in app.store.runs(tenant, &filter, &page).await? {
                let was_in_progress =
                    run.created_at <= newest && run.finished_at.is_none_or(|ended| ended >= oldest);
                if sharing.insert(run.id) && was_in_progress && runs.len() < JOURNALS {
                    runs.push(run.id);
                }
            }
        }
        for run in runs {
            let read = journal::read(app, tenant, run, |event| {
                changes.add_event(event);
                ControlFlow::Continue(())
            });
            match read.await {
                // Changes after an unreadable event are those of an unknown call.
                Err(problem) if problem.code() == Code::JournalUnreadable => {}
                read => read?,
            }
        }
        changes.add_uploads(app, tenant, users, &sharing, (oldest, files)).await?;
        Ok(changes)
    }

    fn add_event(&mut self, Event { at, what, run_id, .. }: Event) {
        let RunEvent::ToolCallCompleted(call) = what else { return };
        let changer = Changer { call: Some(call.call_id), run: Some(run_id), subject: None };
        for change in call.changes.unwrap_or_default() {
            if let Some(from) = change.from {
                self.note(from, at, Changer::default());
            }
            let is_gone = change.change == ChangeKind::Deleted;
            let changer = if is_gone { Changer::default() } else { changer.clone() };
            self.note(change.path, at, changer);
        }
    }

    /// Adds uploads by callers, if the file still has the content that was recorded then.
    async fn add_uploads(
        &mut self,
        app: &App,
        tenant: &str,
        users: &FileUsers,
        sharing: &HashSet<Uuid>,
        (oldest, files): (DateTime<Utc>, &[ListedFile]),
    ) -> Result<(), Problem> {
        let filter = AuditFilter {
            action: Some(AuditAction::FileWritten),
            created_after: Some(oldest),
            ..AuditFilter::default()
        };
        let contents: HashMap<&str, Option<&str>> =
            files.iter().map(|file| (file.path.as_str(), file.etag.as_deref())).collect();
        for row in app.store.audit(tenant, &filter, &Page { limit: UPLOADS, after: None }).await? {
            let Ok(details) = serde_json::from_str::<Value>(&row.arguments) else { continue };
            let named = |name: &str| details[name].as_str();
            let is_here = row.run_id.is_some_and(|run| sharing.contains(&run))
                || users.session.is_some() && named("session_id") == users.session.as_deref()
                || users.agent.is_some() && named("agent") == users.agent.as_deref();
            let Some(path) = named("path").filter(|_| is_here) else { continue };
            let is_same = contents.get(path).is_some_and(|etag| *etag == named("etag"));
            if is_same {
                let changer = Changer { subject: Some(row.subject), ..Changer::default() };
                self.note(path.to_owned(), row.at, changer);
            }
        }
        Ok(())
    }

    fn note(&mut self, path: String, at: DateTime<Utc>, changer: Changer) {
        match self.0.get(&path) {
            Some((known, _)) if *known > at => {}
            _ => drop(self.0.insert(path, (at, changer))),
        }
    }

    /// Who changed a file last; empty if it has been changed since.
    pub(super) fn take(&mut self, file: &ListedFile) -> Changer {
        let is_last = |at: &DateTime<Utc>| times_of(file).iter().any(|time| time <= at);
        let known = self.0.remove(&file.path).filter(|(at, _)| is_last(at));
        known.map(|(_, changer)| changer).unwrap_or_default()
    }
}

/// When a file was changed: its time comes from this machine's clock, or that of its volume, which may agree with
/// the database's.
fn times_of(file: &ListedFile) -> [DateTime<Utc>; 2] {
    let time = DateTime::<Utc>::from(file.modified);
    [time, clock::of_machine(time)]
}
