//! The files of runs and sessions that are forgotten: directories that no other run uses go with them.
//!
//! They leave their places before the deletion is committed, and are deleted after it. A crash in
//! between leaves runs without their files, or directories in the bin, which the next deletion
//! empties. Where replicas have directories of their own, each deletes what it has when it is the one
//! that forgets.

use std::collections::BTreeSet;
use std::io;

use serde::Deserialize;

use super::{FilesError, Runtime};
use crate::agents::directories::left_alone;
use crate::store::{DeletedRun, LeftFiles, SessionDeleted};
use crate::tools::Workspace;

/// What of a definition is needed here.
#[derive(Deserialize)]
struct Kept {
    workspace: String,
}

impl Runtime {
    /// Deletes a session with its runs and files.
    ///
    /// # Errors
    /// [`FilesError`]; nothing was deleted then.
    pub async fn delete_session(
        &self,
        tenant: &str,
        session: &str,
        subject: &str,
    ) -> Result<SessionDeleted, FilesError> {
        if let Some(fault) = self.inner.health.fault() {
            return Err(io::Error::other(fault).into());
        }
        let throw_away = |runs: &[DeletedRun]| self.throw_away(runs);
        let store = &self.inner.store;
        let deleted = store.delete_session(tenant, session, subject, &throw_away).await?;
        if deleted == SessionDeleted::Gone {
            self.empty_bin().await;
        }
        Ok(deleted)
    }

    /// Takes the directories of runs out of their places.
    pub(super) fn throw_away(&self, runs: &[DeletedRun]) -> LeftFiles {
        let directories: BTreeSet<(&str, String)> =
            runs.iter().filter_map(|run| Some((run.tenant.as_str(), left_by(run)?))).collect();
        if let Some(kept) = &self.inner.kept_files {
            let dropped = |(tenant, directory): (&str, String)| {
                kept.drop_directory(tenant, &directory);
                (tenant.to_owned(), directory)
            };
            let kept = directories.into_iter().map(dropped).collect();
            return LeftFiles { directories: 0, kept };
        }
        let root = &self.inner.settings.workspace;
        let thrown = directories.into_iter().filter(|(tenant, directory)| {
            Workspace::throw_away(root, tenant, directory).unwrap_or_else(|error| {
                tracing::warn!(%error, "files of a run that is forgotten are left");
                false
            })
        });
        LeftFiles { directories: thrown.count(), kept: Vec::new() }
    }

    /// Deletes what was thrown away.
    pub(super) async fn empty_bin(&self) {
        let root = self.inner.settings.workspace.clone();
        let emptied = tokio::task::spawn_blocking(move || Workspace::empty_bin(&root)).await;
        if let Err(error) = emptied.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "files that were forgotten are not deleted yet");
        }
    }
}

/// The directory that no other run uses, relative to its tenant's.
fn left_by(run: &DeletedRun) -> Option<String> {
    let kept: Kept = serde_json::from_str(run.definition.as_ref()?).ok()?;
    left_alone(&kept.workspace, run.id, run.session_id.as_deref(), run.ends_session)
}
