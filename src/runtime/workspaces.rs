//! The workspace directories of runs: opened for runs and callers, monitored, and deleted with their runs.
//!
//! A replica takes no runs and reports that it is not ready while it cannot write to its directory, its
//! directory is not the shared volume, or it cannot store files in the object store. It checks this regularly
//! by writing a file, and before a failure is attributed to a run.

mod change_locks;
mod kept_files;
mod shared_volume;
mod trash;

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::kept_files::KeptFiles;
use self::shared_volume::SharedVolume;
use crate::fairness;
use crate::objects::Objects;
use crate::store::Store;
use crate::tools::Workspace;
use crate::tools::file_locks::FileLocks;
use crate::tools::file_store::NotStored;
use crate::tools::quota::Quota;
use crate::tools::staged_bytes::StagedBytes;
use crate::tools::stored_files::StoredFiles;
use crate::tools::workspace::{WorkspaceError, normalise};

pub(super) use change_locks::{ChangeLock, ChangeLocks};
pub use kept_files::object_store_fault;
pub use shared_volume::shared_volume_fault;

/// The pause between two checks.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// A file system that takes longer for one small file hangs.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Where the files of runs are.
#[derive(Debug, Clone)]
pub struct WorkspaceSettings {
    /// The directory that contains all workspaces.
    pub root: PathBuf,
    /// How replicas share them.
    pub sharing: Sharing,
    /// How much each workspace may hold.
    pub quota: Arc<Quota>,
    /// How long quarantined files are kept; for ever if absent.
    pub quarantine_retention: Option<Duration>,
}

/// How the replicas share files.
#[derive(Debug, Clone)]
pub enum Sharing {
    /// Each replica has directories of its own.
    None,
    /// The directory is one volume for all replicas.
    Volume,
    /// Files are stored in an object store, and downloaded from there.
    Objects(Objects),
}

/// How the replicas share files, with its state.
enum SharedFiles {
    No,
    /// A volume that all replicas share. It may hang, which blocks the threads that use it.
    Volume(Arc<SharedVolume>),
    Objects(Arc<KeptFiles>),
}

/// The directories of all runs, as this replica has them.
pub(super) struct Workspaces {
    root: PathBuf,
    shared: SharedFiles,
    quota: Arc<Quota>,
    staged: Arc<StagedBytes>,
    quarantine_retention: Option<Duration>,
    stored: Arc<StoredFiles>,
    changes: Arc<ChangeLocks>,
    locks: FileLocks,
    store: Arc<Store>,
    /// Held during a check whether files can be written, even if the check hangs.
    looking: Arc<AsyncMutex<()>>,
    /// Why no runs can be driven here, by the last check.
    fault: Mutex<Option<String>>,
}

/// For whom a directory is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum User {
    /// Waits while the object store is unavailable.
    Run,
    /// Fails fast.
    Caller,
}

/// Why a directory cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// This replica lacks it; another one may have it.
    #[error("this replica has no workspace: {0}")]
    NotHere(WorkspaceError),
    #[error(transparent)]
    Unusable(WorkspaceError),
}

impl Workspaces {
    pub(super) fn new(
        settings: &WorkspaceSettings,
        store: Arc<Store>,
        owner: &Arc<str>,
        patience: Duration,
    ) -> Self {
        let WorkspaceSettings { root, sharing, quota, quarantine_retention } = settings.clone();
        let shared = match sharing {
            Sharing::None => SharedFiles::No,
            Sharing::Volume => SharedFiles::Volume(Arc::default()),
            Sharing::Objects(objects) => {
                let (store, owner) = (Arc::clone(&store), Arc::clone(owner));
                let quota = Arc::clone(&quota);
                let kept = KeptFiles::new(objects, store, owner, root.clone(), quota, patience);
                SharedFiles::Objects(kept)
            }
        };
        let (changes, locks) = match &shared {
            SharedFiles::Volume(_) => {
                (ChangeLocks::on_volume(root.clone()), FileLocks::on_volume(root.clone()))
            }
            SharedFiles::No | SharedFiles::Objects(_) => Default::default(),
        };
        let [bytes, _] = quota.bounds();
        let of_tenant = bytes.max(quota.max_file()).saturating_mul(2);
        Self {
            root,
            shared,
            changes: Arc::new(changes),
            locks,
            quota,
            staged: Arc::new(StagedBytes::new(of_tenant)),
            quarantine_retention,
            stored: Arc::default(),
            store,
            looking: Arc::default(),
            fault: Mutex::default(),
        }
    }

    /// The directory of a run, with what other replicas have changed in it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(super) async fn open(
        &self,
        tenant: &str,
        directory: &str,
        user: User,
    ) -> Result<Workspace, OpenError> {
        match &self.shared {
            SharedFiles::No | SharedFiles::Volume(_) => self.local(tenant, directory).await,
            SharedFiles::Objects(kept) => {
                let invalid = || WorkspaceError::InvalidDirectory(directory.to_owned());
                let plain = normalise(directory).map_err(|_| OpenError::Unusable(invalid()))?;
                // Before the directory is opened, so that it does not count as idle.
                let store = kept.file_store(tenant, &plain, user);
                let workspace = self.local(tenant, &plain).await?.stored_in(store);
                let refreshed = workspace.refresh().await;
                refreshed.map_err(|error| OpenError::NotHere(error.into()))?;
                Ok(workspace)
            }
        }
    }

    /// Like [`open`](Self::open), without downloading files from the object store.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(super) async fn local(
        &self,
        tenant: &str,
        directory: &str,
    ) -> Result<Workspace, OpenError> {
        if self.kept_files().is_some_and(|kept| !kept.is_ready()) {
            return Err(OpenError::NotHere(NotStored::Unavailable.into()));
        }
        let (owner, path) = (tenant.to_owned(), directory.to_owned());
        let opened = self.on_disk(move |root| Workspace::open(root, &owner, &path)).await;
        match opened.map_err(OpenError::NotHere)? {
            Ok(workspace) => Ok(workspace.within(&self.quota).locked_by(&self.locks)),
            Err(error @ WorkspaceError::Io { .. }) if !self.is_usable().await => {
                Err(OpenError::NotHere(error))
            }
            Err(error) => Err(OpenError::Unusable(error)),
        }
    }

    /// A directory that may not exist yet, for a caller. Files in the object store are downloaded first.
    ///
    /// # Errors
    /// Where it cannot be looked at.
    pub(super) async fn find(
        &self,
        tenant: &str,
        directory: &str,
    ) -> io::Result<Option<Workspace>> {
        if self.kept_files().is_some() {
            let opened = self.open(tenant, directory, User::Caller).await;
            return opened.map(Some).map_err(|error| io::Error::other(error.to_string()));
        }
        let (owner, path) = (tenant.to_owned(), directory.to_owned());
        let found = self.on_disk(move |root| Workspace::find(root, &owner, &path)).await;
        let found = found.flatten().map_err(io::Error::other)?;
        Ok(found.map(|workspace| workspace.within(&self.quota).locked_by(&self.locks)))
    }

    /// Opens something beneath the root. On a volume this uses a blocking thread, with the timeout
    /// [`MAX_WAIT`].
    ///
    /// # Errors
    /// Why the volume cannot be used now, whatever is opened.
    async fn on_disk<T: Send + 'static>(
        &self,
        open: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> Result<T, WorkspaceError> {
        let SharedFiles::Volume(marker) = &self.shared else {
            return Ok(open(&self.root));
        };
        let failed = |source| WorkspaceError::Io { path: self.root.display().to_string(), source };
        if let Some(fault) = self.fault() {
            return Err(failed(io::Error::other(fault)));
        }
        let (marker, root) = (Arc::clone(marker), self.root.clone());
        let opening = fairness::on_files(move || {
            if marker.is_elsewhere(&root) {
                return Err(WorkspaceError::NotShared);
            }
            Ok(open(&root))
        });
        let opened = match timeout(MAX_WAIT, opening).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => Err(failed(io::Error::other(error.to_string()))),
            Err(_) => Err(failed(io::ErrorKind::TimedOut.into())),
        };
        if matches!(opened, Err(WorkspaceError::NotShared)) {
            self.is_usable().await; // so that it is known at once
        }
        opened
    }

    pub(super) fn quota(&self) -> &Quota {
        &self.quota
    }

    pub(super) fn staged(&self) -> &Arc<StagedBytes> {
        &self.staged
    }

    /// The locks for changes of a tenant's files.
    pub(super) fn changes(&self) -> Arc<ChangeLocks> {
        Arc::clone(&self.changes)
    }

    /// The hashes of files.
    pub(super) fn stored(&self) -> Arc<StoredFiles> {
        Arc::clone(&self.stored)
    }

    /// Whether files are downloaded from an object store.
    pub(super) fn are_downloaded(&self) -> bool {
        self.kept_files().is_some()
    }

    /// The files in the object store, if there is one.
    fn kept_files(&self) -> Option<&Arc<KeptFiles>> {
        match &self.shared {
            SharedFiles::No | SharedFiles::Volume(_) => None,
            SharedFiles::Objects(kept) => Some(kept),
        }
    }

    /// Why no runs can be driven here, if so, by the last check.
    pub(super) fn fault(&self) -> Option<String> {
        self.fault.lock().clone()
    }

    /// Creates the directory, and checks it until the service stops. The first check is done when this returns,
    /// so that a hanging volume is known before the first run is driven.
    pub(super) async fn start(self: &Arc<Self>, stop: &CancellationToken) {
        let root = self.root.clone();
        let made = tokio::task::spawn_blocking(move || std::fs::create_dir_all(root));
        if let Ok(Ok(Err(error))) = timeout(MAX_WAIT, made).await {
            tracing::debug!(%error, "the workspace cannot be made");
        }
        match &self.shared {
            SharedFiles::No => {}
            SharedFiles::Volume(_) => drop(self.is_usable().await),
            SharedFiles::Objects(kept) => {
                drop(tokio::spawn(Arc::clone(kept).collect(stop.clone())));
            }
        }
        tokio::spawn(Arc::clone(self).watch(stop.clone()));
        if !self.are_downloaded() {
            tokio::spawn(Arc::clone(self).remove_left(stop.clone())); // else all copies went at the start
        }
        if let Some(retention) = self.quarantine_retention {
            tokio::spawn(Arc::clone(self).empty_quarantine(retention, stop.clone()));
        }
    }

    async fn watch(self: Arc<Self>, stop: CancellationToken) {
        loop {
            self.check().await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Whether files can be written now; false if the check takes too long.
    async fn is_usable(&self) -> bool {
        self.fault().is_none() && timeout(2 * MAX_WAIT, self.check()).await.unwrap_or(false)
    }

    /// Checks whether files can be written where all replicas see them, if they share files. There is one check
    /// at a time: one that hangs is not repeated.
    async fn check(&self) -> bool {
        let looking = Arc::clone(&self.looking).lock_owned().await;
        let mut check = pin!(self.probe(looking));
        let fault = if let Ok(fault) = timeout(MAX_WAIT, &mut check).await {
            fault
        } else {
            self.set_fault(Some("it does not answer".to_owned()));
            check.await
        };
        let is_usable = fault.is_none();
        self.set_fault(fault);
        is_usable
    }

    /// Why files cannot be written, if they cannot.
    async fn probe(&self, looking: OwnedMutexGuard<()>) -> Option<String> {
        let root = self.root.clone();
        let probe = move || (Workspace::probe(&root), looking);
        match tokio::task::spawn_blocking(probe).await {
            Ok((Ok(()), _looking)) => match &self.shared {
                SharedFiles::No => None,
                SharedFiles::Volume(volume) => volume.fault(&self.store, &self.root).await,
                SharedFiles::Objects(kept) => kept.fault().await,
            },
            Ok((Err(error), _)) => Some(error.to_string()),
            Err(failed) => Some(failed.to_string()),
        }
    }

    fn set_fault(&self, fault: Option<String>) {
        let before = std::mem::replace(&mut *self.fault.lock(), fault.clone());
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
