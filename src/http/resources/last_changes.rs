//! Who last changed a file: which call of which run, from the journals, or which caller, from the
//! audit log.
//!
//! A change counts where it left the file as it is now: the file was not changed after it was
//! recorded. Who shares a workspace is asked as far as it is likely to know: the newest runs.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::SystemTime;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::journal;
use crate::event::{AuditAction, ChangeKind, Event, RunEvent};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::runtime::FileUsers;
use crate::store::{AuditFilter, Page, RunFilter};
use crate::tools::stored_files::ListedFile;

/// Runs that share a workspace, of which it is looked whether they were there at the time.
const RUNS: u32 = 100;
/// Journals of them that are read.
const JOURNALS: usize = 20;
/// Acts of callers that are looked through.
const ACTS: u32 = 1000;

/// How far apart the clocks of the file system and of the database may be. That of a file system goes
/// in steps.
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
pub(super) struct LastChanges(HashMap<String, (SystemTime, Changer)>);

impl LastChanges {
    /// Of files of a workspace; nothing is read where there are none.
    pub(super) async fn of(
        app: &App,
        tenant: &str,
        users: &FileUsers,
        files: &[ListedFile],
    ) -> Result<Self, Problem> {
        let mut changes = Self::default();
        let times = || files.iter().map(|file| file.modified);
        let (Some(oldest), Some(newest)) = (times().min(), times().max()) else {
            return Ok(changes);
        };
        let (oldest, newest) =
            (DateTime::<Utc>::from(oldest) - SKEW, DateTime::<Utc>::from(newest) + SKEW);
        let mut runs: Vec<Uuid> = users.run.into_iter().collect();
        let mut sharing: HashSet<Uuid> = runs.iter().copied().collect();
        if users.agent.is_some() || users.session.is_some() {
            let agent = if users.session.is_some() { None } else { users.agent.clone() };
            let session_id = users.session.clone();
            let filter = RunFilter { agent, session_id, ..RunFilter::default() };
            let page = Page { limit: RUNS, after: None };
            for run in app.store.runs(tenant, &filter, &page).await? {
                let was_there =
                    run.created_at <= newest && run.finished_at.is_none_or(|ended| ended >= oldest);
                if sharing.insert(run.id) && was_there && runs.len() < JOURNALS {
                    runs.push(run.id);
                }
            }
        }
        for run in runs {
            let read = journal::read(app, tenant, run, |event| {
                changes.take_in(event);
                ControlFlow::Continue(())
            });
            match read.await {
                // What changed behind the event that cannot be read was changed by an unknown call.
                Err(problem) if problem.code() == Code::JournalUnreadable => {}
                read => read?,
            }
        }
        changes.take_in_acts(app, tenant, users, &sharing, (oldest, files)).await?;
        Ok(changes)
    }

    fn take_in(&mut self, Event { at, what, run_id, .. }: Event) {
        let RunEvent::ToolCallCompleted(call) = what else { return };
        let changer = Changer { call: Some(call.call_id), run: Some(run_id), subject: None };
        for change in call.changes.unwrap_or_default() {
            if let Some(from) = change.from {
                self.note(from, at.into(), Changer::default());
            }
            let is_gone = change.change == ChangeKind::Deleted;
            let changer = if is_gone { Changer::default() } else { changer.clone() };
            self.note(change.path, at.into(), changer);
        }
    }

    /// Files that callers put there have the content that was noted then.
    async fn take_in_acts(
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
        for row in app.store.audit(tenant, &filter, &Page { limit: ACTS, after: None }).await? {
            let Ok(details) = serde_json::from_str::<Value>(&row.arguments) else { continue };
            let named = |name: &str| details[name].as_str();
            let is_here = row.run_id.is_some_and(|run| sharing.contains(&run))
                || users.session.is_some() && named("session_id") == users.session.as_deref()
                || users.agent.is_some() && named("agent") == users.agent.as_deref();
            let Some(path) = named("path").filter(|_| is_here) else { continue };
            let is_same = contents.get(path).is_some_and(|etag| *etag == named("etag"));
            if is_same {
                let changer = Changer { subject: Some(row.subject), ..Changer::default() };
                self.note(path.to_owned(), row.at.into(), changer);
            }
        }
        Ok(())
    }

    fn note(&mut self, path: String, at: SystemTime, changer: Changer) {
        match self.0.get(&path) {
            Some((known, _)) if *known > at => {}
            _ => drop(self.0.insert(path, (at, changer))),
        }
    }

    /// Who left a file as it is now; none where it was changed since.
    pub(super) fn take(&mut self, file: &ListedFile) -> Changer {
        let known = self.0.remove(&file.path).filter(|(at, _)| file.modified <= *at);
        known.map(|(_, changer)| changer).unwrap_or_default()
    }
}
