//! The files of runs and sessions that are forgotten: directories that no other run uses go with them.
//!
//! They leave their places before the deletion is committed, and are deleted after it. A crash in
//! between leaves runs without their files, or directories in the bin, which the next deletion
//! empties. Where replicas have directories of their own, each deletes what it has when it is the one
//! that forgets.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use tokio::sync::Mutex as AsyncMutex;
use tokio_util::sync::CancellationToken;

use super::super::retention;
use super::Workspaces;
use super::change_locks::{ChangeLock, ChangeLocks};
use crate::agents::directories::left_alone;
use crate::store::{DeletedRun, LeftFiles};
use crate::tools::{Workspace, quarantine};

/// What of a definition is needed here.
#[derive(Deserialize)]
struct DefinedWorkspace {
    workspace: String,
}

/// The locks of the tenants whose directories were taken out of their places, to be held until that is
/// committed.
#[derive(Debug, Default)]
pub(in crate::runtime) struct Throwing(AsyncMutex<BTreeMap<String, ChangeLock>>);

impl Throwing {
    /// Waits until no file of these tenants is being changed.
    async fn lock(&self, locks: &ChangeLocks, tenants: BTreeSet<String>) {
        let mut held = self.0.lock().await;
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
}

impl Workspaces {
    /// Takes the directories of runs out of their places.
    pub(in crate::runtime) fn throw_away(
        &self,
        runs: &[DeletedRun],
        throwing: &Arc<Throwing>,
    ) -> BoxFuture<'static, LeftFiles> {
        let directories: BTreeSet<(String, String)> =
            runs.iter().filter_map(|run| Some((run.tenant.clone(), left_by(run)?))).collect();
        let directories: Vec<(String, String)> = directories.into_iter().collect();
        let tenants = directories.iter().map(|(tenant, _)| tenant.clone()).collect();
        let (root, files) = (self.root.clone(), self.kept_files().cloned());
        let kept = if files.is_some() { directories.clone() } else { Vec::new() };
        let throw = move || {
            let thrown = directories.iter().filter(|(tenant, directory)| match &files {
                Some(files) => files.drop_directory(tenant, directory),
                None => Workspace::throw_away(&root, tenant, directory).unwrap_or_else(|error| {
                    tracing::warn!(%error, "files of a deleted run could not be removed");
                    false
                }),
            });
            thrown.count()
        };
        let (changes, throwing) = (self.changes(), Arc::clone(throwing));
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

    /// Deletes what was thrown away.
    pub(in crate::runtime) async fn empty_bin(&self) {
        let root = self.root.clone();
        let emptied = tokio::task::spawn_blocking(move || Workspace::empty_bin(&root)).await;
        if let Err(error) = emptied.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "deleted files are not removed from disk yet");
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
    left_alone(&kept.workspace, run.id, run.session_id.as_deref(), run.ends_session)
}
