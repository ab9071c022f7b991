//! The files of runs and sessions that are forgotten: directories that no other run uses go with them.
//!
//! They leave their places before the deletion is committed, and are deleted after it; where it fails,
//! they get back. A crash in between leaves runs without their files, or directories in the bin, which
//! the next deletion empties. Where replicas have directories of their own, each deletes what it has when it is the one
//! that forgets.

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
use crate::agents::directories::exclusive_directory;
use crate::clock;
use crate::store::{DeletedRun, LeftFiles};
use crate::tools::staged::Staged;
use crate::tools::workspace::Aside;
use crate::tools::{Workspace, quarantine};

/// The pause between two looks for files that crashes have left.
const POLL_INTERVAL: Duration = Duration::from_mins(30);

/// What of a definition is needed here.
#[derive(Deserialize)]
struct DefinedWorkspace {
    workspace: String,
}

/// Directories that were taken out of their places, with the locks of their tenants, until it is known
/// what became of the runs. They get back unless those are deleted.
#[derive(Debug, Default)]
pub(in crate::runtime) struct Throwing {
    locks: AsyncMutex<BTreeMap<String, ChangeLock>>,
    aside: Mutex<Vec<((String, String), Aside)>>,
    /// One of the runs.
    run: OnceLock<Uuid>,
    are_deleted: AtomicBool,
}

impl Throwing {
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

    /// Takes a directory out of its place; whether it is out, also by a try before.
    fn take(&self, root: &Path, place: &(String, String)) -> bool {
        let (tenant, directory) = place;
        let mut aside = self.aside.lock();
        match Workspace::move_aside(root, tenant, directory) {
            Ok(Some(moved)) => aside.push((place.clone(), moved)),
            Ok(None) => return aside.iter().any(|(taken, _)| taken == place),
            Err(error) => {
                tracing::warn!(%error, "files of a deleted run could not be removed");
                return false;
            }
        }
        true
    }
}

impl Drop for Throwing {
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
                    "the files of runs are left in .deleted, and are gone in an hour"
                );
            }
        }
    }
}

impl Workspaces {
    /// Takes the directories of runs out of their places, until [`Workspaces::settle`] is told what became
    /// of the runs.
    pub(in crate::runtime) fn move_to_trash(
        &self,
        runs: &[DeletedRun],
        throwing: &Arc<Throwing>,
    ) -> BoxFuture<'static, LeftFiles> {
        if let Some(run) = runs.first() {
            let _ = throwing.run.set(run.id); // one is enough
        }
        let directories: BTreeSet<(String, String)> =
            runs.iter().filter_map(|run| Some((run.tenant.clone(), left_by(run)?))).collect();
        let directories: Vec<(String, String)> = directories.into_iter().collect();
        let tenants = directories.iter().map(|(tenant, _)| tenant.clone()).collect();
        let (root, files) = (self.root.clone(), self.kept_files().cloned());
        let kept = if files.is_some() { directories.clone() } else { Vec::new() };
        let (changes, throwing) = (self.changes(), Arc::clone(throwing));
        let taking = Arc::clone(&throwing);
        let throw = move || {
            let thrown = directories.iter().filter(|place| match &files {
                Some(files) => files.drop_directory(&place.0, &place.1),
                None => taking.take(&root, place),
            });
            thrown.count()
        };
        async move {
            throwing.lock(&changes, tenants).await;
            let thrown = tokio::task::spawn_blocking(throw).await.unwrap_or_else(|error| {
                tracing::error!(%error, "files of deleted runs could not be removed");
                0
            });
            LeftFiles { directories: thrown, kept }
        }
        .boxed()
    }

    /// Leaves the directories that were taken out of their places to [`Workspaces::empty_bin`] where the
    /// runs are deleted, and puts them back where they are not. A deletion that failed may have been
    /// committed nevertheless.
    pub(in crate::runtime) async fn settle(&self, throwing: Arc<Throwing>, are_deleted: bool) {
        let are_deleted = are_deleted
            || match throwing.run.get() {
                Some(run) => matches!(self.store.has_run(*run).await, Ok(false)),
                None => false,
            };
        throwing.are_deleted.store(are_deleted, Ordering::Relaxed);
        let _ = tokio::task::spawn_blocking(move || drop(throwing)).await;
    }

    /// Deletes what was thrown away.
    pub(in crate::runtime) async fn empty_bin(&self) {
        let root = self.root.clone();
        let emptied = tokio::task::spawn_blocking(move || Workspace::empty_bin(&root)).await;
        if let Err(error) = emptied.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "deleted files are not removed from disk yet");
        }
    }

    /// Deletes files that crashes have left on their way into workspaces, until the service stops.
    pub(super) async fn remove_left(self: Arc<Self>, stop: CancellationToken) {
        let mut looks = clock::every(POLL_INTERVAL);
        while stop.run_until_cancelled(looks.tick()).await.is_some() {
            let root = self.root.clone();
            match tokio::task::spawn_blocking(move || Staged::remove_left(&root)).await {
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
        let mut looks = retention::looks(retention);
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

/// The directory that no other run uses, relative to its tenant's.
fn left_by(run: &DeletedRun) -> Option<String> {
    let kept: DefinedWorkspace = serde_json::from_str(run.definition.as_ref()?).ok()?;
    exclusive_directory(&kept.workspace, run.id, run.session_id.as_deref(), run.ends_session)
}
