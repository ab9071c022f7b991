//! What keeps this replica from driving runs although it lives: a workspace that cannot be written,
//! that is not the one that the replicas share, or whose files cannot be kept in the object store.
//!
//! Such a replica takes no runs and says that it is not ready, so that others take them. It finds
//! out by writing a file every now and then, and before it blames a run.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::timeout;

use super::Runtime;
use crate::tools::Workspace;

/// The pause between two looks.
const LOOK: Duration = Duration::from_secs(2);
/// A file system that takes longer for one small file hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is wrong with this replica.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<Option<String>>);

impl Health {
    /// Why no runs can be driven here, if they cannot.
    pub(super) fn fault(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn found(&self, fault: Option<String>) {
        let before = std::mem::replace(&mut *self.0.lock(), fault.clone());
        match (before, fault) {
            (None, Some(fault)) => {
                tracing::error!(
                    fault,
                    "not ready: the workspace cannot be used; runs are left to other replicas"
                );
            }
            (Some(_), None) => tracing::info!("the workspace can be used again"),
            _ => {}
        }
    }
}

impl Runtime {
    /// Whether this replica can drive runs, as of the last look.
    pub fn has_workspace(&self) -> bool {
        self.inner.health.fault().is_none()
    }

    /// Looks at the workspace before the first run is driven; one that hangs is known then.
    pub(super) async fn look_first(&self) {
        self.make_workspace();
        let _ = timeout(2 * PATIENCE, self.look_at_workspace()).await;
    }

    fn make_workspace(&self) {
        if let Err(error) = std::fs::create_dir_all(&self.inner.settings.workspace) {
            tracing::debug!(%error, "the workspace cannot be made");
        }
    }

    /// Looks at the workspace until the service stops.
    pub(super) async fn watch_workspace(self) {
        self.make_workspace();
        loop {
            self.look_at_workspace().await;
            tokio::select! {
                () = self.inner.stop.cancelled() => return,
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Whether files can be written now, where all replicas see them if they have to.
    pub(super) async fn look_at_workspace(&self) -> bool {
        let root = self.inner.settings.workspace.clone();
        let mut look = tokio::task::spawn_blocking(move || Workspace::probe(&root));
        let answer = if let Ok(answer) = timeout(PATIENCE, &mut look).await {
            answer
        } else {
            self.inner.health.found(Some("it does not answer".to_owned()));
            look.await // one that hangs is not asked again and again
        };
        let is_writable = matches!(answer, Ok(Ok(())));
        let fault = match (answer, &self.inner.shared_volume) {
            (Ok(Ok(())), None) => None,
            (Ok(Ok(())), Some(volume)) => {
                volume.fault(&self.inner.store, &self.inner.settings.workspace).await
            }
            (Ok(Err(error)), _) => Some(error.to_string()),
            (Err(failed), _) => Some(failed.to_string()),
        };
        let fault = match &self.inner.kept_files {
            Some(kept) if is_writable => kept.fault().await,
            _ => fault,
        };
        let is_usable = fault.is_none();
        self.inner.health.found(fault);
        is_usable
    }
}
