//! Deletes the files of deleted runs and sessions: the directories that no other run uses.
//!
//! The directories are moved to the trash before the deletion is committed, and deleted after it. If the
//! deletion fails, they are moved back. A crash in between leaves runs without their files, or directories
//! in the trash, which the next deletion empties. Replicas with directories of their own delete only what
//! they have themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::Mutex as AsyncMutex;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::super::retention;
use super::Workspaces;
use super::change_locks::{ChangeLock, ChangeLocks};
use super::kept_files::contains;
use crate::agents::directories::{directory_of, exclusive_directory};
use crate::clock;
use crate::store::{DeletedRun, RemovedFiles};
use crate::tools::staged_file::StagedFile;
use crate::tools::workspace::{Aside, normalise};
use crate::tools::{Workspace, quarantine};

/// The pause between two searches for files that crashes have left.
const POLL_INTERVAL: Duration = Duration::from_mins(30);
/// The number of the search that looks through all directories, which takes long: what the crash before this start has
/// left is old enough by then.
const DEEP_SEARCH: u64 = 3;

/// The part of a definition that is needed here.
#[derive(Deserialize)]
struct DefinedWorkspace {
    workspace: String,
}

/// Directories in the trash, with the locks of their tenants, until it is known whether their runs were
/// deleted. If not, they are moved back.
#[derive(Debug, Default)]
pub(in crate::runtime) struct TrashedDirectories {
    locks: AsyncMutex<BTreeMap<String, ChangeLock>>,
    aside: Mutex<Vec<((String, String), Aside)>>,
    /// One of the runs.
    run: OnceLock<Uuid>,
    are_deleted: AtomicBool,
}

impl TrashedDirectories {
    /// Waits until no file of these tenants is being changed.
    async fn lock(&self, locks: &ChangeLocks, tenants: BTreeSet<String>) {
        let mut held = self.locks.lock().await;
        for tenant in tenants {
            if held.contains_key(&tenant) {
                continue;
            }
            match locks.lock(&tenant).await {
                Ok(lock) => drop(held.insert(tenant, lock)),
                Err(error) => {
                    tracing::warn!(%error, "files are deleted while others may be changing them");
                }
            }
        }
    }

    /// Moves a directory to the trash; returns whether it is there now, also from an earlier attempt.
    fn move_in(&self, root: &Path, directory_id: &(String, String)) -> bool {
        let (tenant, directory) = directory_id;
        let mut aside = self.aside.lock();
        match Workspace::move_aside(root, tenant, directory) {
            Ok(Some(moved)) => aside.push((directory_id.clone(), moved)),
            Ok(None) => return aside.iter().any(|(taken, _)| taken == directory_id),
            Err(error) => {
                tracing::warn!(%error, "files of a deleted run could not be removed");
                return false;
            }
        }
        true
    }
}

impl Drop for TrashedDirectories {
    fn drop(&mut self) {
        let are_deleted = self.are_deleted.load(Ordering::Relaxed);
        for ((tenant, directory), aside) in std::mem::take(self.aside.get_mut()) {
            let done = if are_deleted { aside.delete() } else { aside.put_back() };
            if let Err(error) = done {
                tracing::error!(
                    %error,
                    tenant,
                    directory,
                    are_deleted,
                    "the files of runs remain in .deleted, and will be deleted in an hour"
                );
            }
        }
    }
}

impl Workspaces {
    /// Moves the directories of runs to the trash, until [`Workspaces::settle`] is called with the outcome of
    /// the deletion.
    pub(in crate::runtime) fn move_to_trash(
        &self,
        runs: &[DeletedRun],
        trashed: &Arc<TrashedDirectories>,
    ) -> BoxFuture<'static, RemovedFiles> {
        if let Some(run) = runs.first() {
            let _ = trashed.run.set(run.id); // one is enough
        }
        let directories: BTreeSet<(String, String)> = runs
            .iter()
            .filter_map(|run| Some((run.tenant.clone(), directory_to_delete(run)?)))
            .collect();
        let directories: Vec<(String, String)> = directories.into_iter().collect();
        let tenants = directories.iter().map(|(tenant, _)| tenant.clone()).collect();
        let (root, files) = (self.root.clone(), self.kept_files().cloned());
        let kept = if files.is_some() { directories.clone() } else { Vec::new() };
        let (changes, trashed) = (self.changes(), Arc::clone(trashed));
        let trash = Arc::clone(&trashed);
        let move_all = move || {
            let moved = directories.iter().filter(|directory_id| match &files {
                Some(files) => files.drop_directory(&directory_id.0, &directory_id.1),
                None => trash.move_in(&root, directory_id),
            });
            moved.count()
        };
        async move {
            trashed.lock(&changes, tenants).await;
            let moved = tokio::task::spawn_blocking(move_all).await.unwrap_or_else(|error| {
                tracing::error!(%error, "files of deleted runs could not be removed");
                0
            });
            RemovedFiles { directories: moved, kept }
        }
        .boxed()
    }

    /// Leaves the directories in the trash to [`Workspaces::empty_bin`] if the runs are deleted, and moves
    /// them back otherwise. A deletion that returned an error may have been
    /// committed nevertheless.
    pub(in crate::runtime) async fn settle(
        &self,
        trashed: Arc<TrashedDirectories>,
        are_deleted: bool,
    ) {
        let are_deleted = are_deleted
            || match trashed.run.get() {
                Some(run) => matches!(self.store.has_run(*run).await, Ok(false)),
                None => false,
            };
        trashed.are_deleted.store(are_deleted, Ordering::Relaxed);
        let _ = tokio::task::spawn_blocking(move || drop(trashed)).await;
    }

    /// Empties the trash.
    pub(in crate::runtime) async fn empty_bin(&self) {
        let root = self.root.clone();
        let emptied = tokio::task::spawn_blocking(move || Workspace::empty_bin(&root)).await;
        if let Err(error) = emptied.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "deleted files are not removed from disk yet");
        }
    }

    /// Deletes staged files that crashes have left, until the service stops.
    pub(super) async fn remove_left(self: Arc<Self>, stop: CancellationToken) {
        let (mut looks, mut search) = (clock::every(POLL_INTERVAL), 0);
        while stop.run_until_cancelled(looks.tick()).await.is_some() {
            let (root, stop, is_deep) = (self.root.clone(), stop.clone(), search == DEEP_SEARCH);
            search += 1;
            let removing = move || StagedFile::remove_abandoned(&root, is_deep, &stop);
            match tokio::task::spawn_blocking(removing).await {
                Ok(Ok(0)) | Err(_) => {}
                Ok(Ok(removed)) => {
                    tracing::info!(removed, "removed files that were left by a crash");
                }
                Ok(Err(error)) => tracing::debug!(%error, "the workspaces cannot be read"),
            }
        }
    }

    /// Deletes what has been in the quarantine for longer than this, until the service stops.
    pub(super) async fn empty_quarantine(
        self: Arc<Self>,
        retention: Duration,
        stop: CancellationToken,
    ) {
        let mut looks = retention::interval(retention);
        while stop.run_until_cancelled(looks.tick()).await.is_some() {
            let root = self.root.clone();
            let forget = move || quarantine::forget(&root, retention);
            match tokio::task::spawn_blocking(forget).await {
                Ok(Ok(0)) | Err(_) => {}
                Ok(Ok(deleted)) => {
                    tracing::info!(deleted, "deleted expired quarantine entries");
                }
                Ok(Err(error)) => tracing::warn!(%error, "the quarantine cannot be read"),
            }
        }
    }
}

/// The directory of a deleted run, relative to its tenant's; `None` if other runs use it. That of a session
/// is deleted with the last run whose definition places it there.
fn directory_to_delete(run: &DeletedRun) -> Option<String> {
    let session = run.session_id.as_deref();
    let workspace = workspace_of(run.definition.as_ref()?)?;
    let left = |with_session| exclusive_directory(&workspace, run.id, session, with_session);
    let of_session = normalise(&left(true)?).ok()?;
    let is_elsewhere = |definition: &Arc<str>| {
        let other = directory_of(&workspace_of(definition)?, Uuid::nil(), session);
        Some(!contains(&of_session, &normalise(&other).ok()?))
    };
    left(run.staying.iter().all(|definition| is_elsewhere(definition) == Some(true)))
}

fn workspace_of(definition: &str) -> Option<String> {
    serde_json::from_str::<DefinedWorkspace>(definition).ok().map(|defined| defined.workspace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_session_goes_with_the_last_run_that_has_it() {
        let definition = |workspace: &str| -> Arc<str> {
            Arc::from(format!("{{\"workspace\": {workspace:?}}}"))
        };
        let run = Uuid::from_u128(7);
        let left = |workspace: &str, staying: &[&str]| {
            directory_to_delete(&DeletedRun {
                id: run,
                tenant: "t".to_owned(),
                session_id: Some("x".to_owned()),
                staying: staying.iter().copied().map(definition).collect(),
                definition: Some(definition(workspace)),
            })
        };
        let of_session = Some("chats/s-x".to_owned());
        let cases: [(&[&str], &Option<String>); 5] = [
            (&[], &of_session),
            (&["newer/{session_id}", "shared", "chats"], &of_session),
            (&["newer/{session_id}", "./chats/{session_id}"], &None),
            (&["chats/{session_id}/deep"], &None),
            (&["chats/s-x"], &None),
        ];
        for (staying, left_behind) in cases {
            assert_eq!(left("chats/{session_id}", staying), *left_behind, "{staying:?}");
        }
        let of_run = Some(format!("chats/s-x/r-{run}"));
        let same = "chats/{session_id}/{run_id}";
        assert_eq!((left(same, &[same]), left(same, &["newer"])), (of_run, of_session));
    }
}
