//! Files of workspaces that are stored in an object store, if `[tools.workspace] store` says so. The stored
//! files are authoritative; the directory of this replica holds copies.
//!
//! Before the files of a workspace are used, the changes of other replicas are downloaded (`download`). What
//! a call or a caller has changed is uploaded to the object store and then, under the run's fence, recorded
//! in the database (`upload`) before the call is answered. Changes that were not stored, because the run
//! was lost in between, are undone before the workspace is used again.

mod directory_locks;
mod download;
mod garbage_collection;
mod upload;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use self::directory_locks::DirectoryLocks;
use super::User;
use crate::objects::{Objects, ObjectsError};
use crate::store::{KeptContent, Store, StoreError};
use crate::tools::Workspace;
use crate::tools::file_store::{ChangedPaths, FileStore, NotStored};
use crate::tools::layout::{self, Stamp};
use crate::tools::quota::Quota;

/// The name under which the database stores the id of the object store.
const NAME: &str = "object_store";
/// How long the object store may take for a small content.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Contents that are uploaded or downloaded at the same time, for all runs.
const TRANSFERS: usize = 16;
/// How long a caller waits for an unavailable object store, and how often it checks.
const CALLERS_PATIENCE: Duration = Duration::from_secs(2);
const CALLERS_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The first and the longest pause before a retry; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// The files of all tenants.
pub(super) struct KeptFiles {
    objects: Objects,
    store: Arc<Store>,
    root: PathBuf,
    owner: Arc<str>,
    /// How long a run waits.
    patience: Duration,
    tenants: Mutex<HashMap<String, Arc<Tenant>>>,
    transfers: Semaphore,
    quota: Arc<Quota>,
    /// Held while the directory is this process's.
    lock: OnceLock<File>,
    /// The id of the object store, as the database knows it.
    id: OnceLock<String>,
    /// Whether the last use of the object store failed.
    is_failing: AtomicBool,
    /// Whether the object store was unavailable at the last check.
    is_unavailable: AtomicBool,
}

/// The files of one tenant, as they are on this replica.
struct Tenant {
    name: String,
    known: Mutex<BTreeMap<String, KnownPath>>,
    scopes: Mutex<BTreeMap<String, Arc<WorkspaceDir>>>,
    /// Held while downloaded files get their paths.
    placement_lock: Mutex<()>,
    /// Held from a write of paths until their new versions are known here.
    versions_lock: tokio::sync::Mutex<()>,
    locks: DirectoryLocks,
}

/// A path of which this replica has the stored version.
#[derive(Debug, Clone)]
struct KnownPath {
    version: i64,
    content: KeptContent,
    /// Of a file: its stamp when it was downloaded or stored.
    stamp: Option<Stamp>,
}

/// The directory of a workspace.
struct WorkspaceDir {
    kept: Arc<KeptFiles>,
    tenant: Arc<Tenant>,
    directory: String,
    /// The version up to which everything has been downloaded; `None` before the first download. Locked by
    /// the task that downloads or stores.
    synced: tokio::sync::Mutex<Option<i64>>,
    /// Paths that other replicas have changed and that are not downloaded yet.
    outdated: Mutex<BTreeSet<String>>,
    /// Whether the directory may hold changes that are not stored.
    is_tainted: AtomicBool,
    /// Whether `known` may be out of date.
    is_stale: AtomicBool,
    used: Mutex<Instant>,
}

/// Stores the files of a workspace, for a run or for callers.
struct ScopeFileStore {
    scope: Arc<WorkspaceDir>,
    writer: Writer,
    user: User,
}

/// The writer of files.
#[derive(Debug, Clone, Copy)]
enum Writer {
    /// A run, under an epoch.
    Run(Uuid, i64),
    /// A caller; only while that run exists.
    Caller(Option<Uuid>),
}

/// Why an attempt failed, which decides whether it is repeated.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Objects(#[from] ObjectsError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The attempt was based on an outdated version; it is repeated.
    #[error("{0}")]
    Outdated(String),
    #[error("another replica owns the run")]
    Fenced,
    #[error("the run or session of the files was deleted")]
    Orphaned,
    /// The attempt needs the exclusive lock of the directory.
    #[error("others are changing files of the workspace")]
    NeedsExclusiveLock,
}

impl fmt::Debug for ScopeFileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ScopeFileStore")
            .field(&self.scope.tenant.name)
            .field(&self.scope.directory)
            .finish()
    }
}

impl KeptFiles {
    pub(super) fn new(
        objects: Objects,
        store: Arc<Store>,
        owner: Arc<str>,
        root: PathBuf,
        quota: Arc<Quota>,
        patience: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            objects,
            store,
            root,
            owner,
            patience,
            quota,
            tenants: Mutex::default(),
            transfers: Semaphore::new(TRANSFERS),
            lock: OnceLock::new(),
            id: OnceLock::new(),
            is_failing: AtomicBool::new(false),
            is_unavailable: AtomicBool::new(false),
        })
    }

    /// Whether the directory is this process's, and holds nothing but copies.
    pub(super) fn is_ready(&self) -> bool {
        self.lock.get().is_some()
    }

    /// Why the files cannot be stored, if so.
    pub(super) async fn fault(&self) -> Option<String> {
        let look = async {
            if !self.is_ready() {
                let root = self.root.clone();
                let taken = tokio::task::spawn_blocking(move || layout::take_over(&root)).await;
                let _ = self.lock.set(taken.map_err(|e| e.to_string())??);
            }
            self.check_access().await
        };
        let fault = in_time(&self.objects, look).await.err();
        self.is_unavailable.store(fault.is_some(), Ordering::Relaxed);
        fault
    }

    /// Resolves when a caller has waited long enough for an object store that is known to be unavailable.
    async fn caller_timeout(&self) {
        tokio::time::sleep(CALLERS_PATIENCE).await;
        while !(self.is_failing.load(Ordering::Relaxed)
            || self.is_unavailable.load(Ordering::Relaxed))
        {
            tokio::time::sleep(CALLERS_POLL_INTERVAL).await;
        }
    }

    /// Checks that the object store is the one that all replicas use, and that it accepts writes.
    async fn check_access(&self) -> Result<(), String> {
        has_marker(&self.objects, self.id().await?).await?;
        if self.is_failing.load(Ordering::Relaxed) {
            let probe = format!(".probe/{}", self.owner);
            let put = self.objects.put(&probe, Bytes::from_static(b"probe\n")).await;
            put.map_err(|error| format!("{}: {error}", self.objects))?;
            let _ = self.objects.delete(&probe).await; // the next probe overwrites it anyway
            self.is_failing.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn id(&self) -> Result<&str, String> {
        if let Some(id) = self.id.get() {
            return Ok(id);
        }
        let id = id_of(&self.store, &self.objects).await?;
        Ok(self.id.get_or_init(|| id))
    }

    /// Fails if the directory of the object store is missing, as on a volume that is not mounted. A change
    /// there counts only if this succeeds before and after it.
    async fn is_mounted(&self) -> Result<(), ObjectsError> {
        if !self.objects.is_directory() {
            return Ok(());
        }
        let id = self.id().await.map_err(ObjectsError::Unavailable)?;
        has_marker(&self.objects, id).await.map_err(ObjectsError::Unavailable)
    }

    /// What stores the files of a tenant's directory, without a run yet.
    pub(super) fn file_store(
        self: &Arc<Self>,
        tenant: &str,
        directory: &str,
        user: User,
    ) -> Arc<dyn FileStore> {
        Arc::new(ScopeFileStore {
            scope: self.scope(tenant, directory),
            writer: Writer::Caller(None),
            user,
        })
    }

    fn scope(self: &Arc<Self>, name: &str, directory: &str) -> Arc<WorkspaceDir> {
        let tenant = Arc::clone(self.tenants.lock().entry(name.to_owned()).or_insert_with(|| {
            Arc::new(Tenant {
                name: name.to_owned(),
                known: Mutex::default(),
                scopes: Mutex::default(),
                placement_lock: Mutex::default(),
                versions_lock: tokio::sync::Mutex::default(),
                locks: DirectoryLocks::default(),
            })
        }));
        let mut scopes = tenant.scopes.lock();
        let scope = scopes.entry(directory.to_owned()).or_insert_with(|| {
            Arc::new(WorkspaceDir {
                kept: Arc::clone(self),
                tenant: Arc::clone(&tenant),
                directory: directory.to_owned(),
                synced: tokio::sync::Mutex::default(),
                outdated: Mutex::default(),
                is_tainted: AtomicBool::new(false),
                is_stale: AtomicBool::new(false),
                used: Mutex::new(Instant::now()),
            })
        });
        *scope.used.lock() = Instant::now();
        Arc::clone(scope)
    }

    /// The directory of a tenant.
    fn directory_of(&self, tenant: &str) -> Result<Workspace, Failure> {
        let opened = Workspace::open(&self.root, tenant, ".");
        opened.map_err(|error| Failure::Io(std::io::Error::other(error)))
    }

    /// Pauses before a retry; false if there is no time left, or a retry cannot help.
    async fn may_retry(&self, since: Instant, pause: &mut Duration, failure: &Failure) -> bool {
        let is_of_objects = matches!(failure, Failure::Objects(_));
        if is_of_objects {
            self.is_failing.store(true, Ordering::Relaxed);
        }
        let is_passing = match failure {
            Failure::Store(error) => error.is_transient(),
            Failure::Io(error) => !is_path_conflict(error),
            Failure::Objects(_) | Failure::Outdated(_) => true,
            Failure::Fenced | Failure::Orphaned | Failure::NeedsExclusiveLock => false,
        };
        if !is_passing || since.elapsed() >= self.patience {
            tracing::warn!(error = %failure, "workspace files could not be synchronised with the object store");
            return false;
        }
        tracing::debug!(error = %failure, "workspace file synchronisation will be retried");
        tokio::time::sleep(*pause).await;
        *pause = LAST_PAUSE.min(*pause * 2);
        true
    }
}

impl WorkspaceDir {
    fn overlaps(&self, directory: &str) -> bool {
        contains(&self.directory, directory) || contains(directory, &self.directory)
    }
}

/// Whether something else is at a path or above it, so that a retry cannot help.
fn is_path_conflict(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as Kind;
    let kinds =
        [Kind::NotADirectory, Kind::IsADirectory, Kind::InvalidInput, Kind::InvalidFilename];
    kinds.contains(&error.kind())
}

/// Whether a path is that directory or in it.
pub(super) fn contains(directory: &str, path: &str) -> bool {
    directory == "."
        || path == directory
        || path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

/// The known paths beneath a directory.
fn known_beneath(known: &BTreeMap<String, KnownPath>, directory: &str) -> Vec<String> {
    if directory == "." {
        return known.keys().cloned().collect();
    }
    known.range(beneath(directory)).map(|(path, _)| path.clone()).collect()
}

fn has_beneath(known: &BTreeMap<String, KnownPath>, directory: &str) -> bool {
    known.range(beneath(directory)).next().is_some()
}

/// The range of the paths beneath a directory, in a sorted map of all paths.
fn beneath(directory: &str) -> Range<String> {
    format!("{directory}/")..format!("{directory}0")
}

fn marker(id: &str) -> String {
    format!(".workspace-id/{id}")
}

/// The id of the object store. The first replica puts the marker there before it stores the id.
async fn id_of(store: &Store, objects: &Objects) -> Result<String, String> {
    let text = |id: Vec<u8>| String::from_utf8_lossy(&id).into_owned();
    let known = store.known_secret(NAME).await.map_err(|e| e.to_string())?;
    if let Some(known) = known {
        return Ok(text(known));
    }
    let mine = Uuid::new_v4().to_string();
    let put = objects.put(&marker(&mine), Bytes::from_static(b"files of toolloop\n")).await;
    put.map_err(|error| format!("{objects}: {error}"))?;
    let id = store.secret(NAME, mine.clone().into_bytes()).await.map_err(|e| e.to_string())?;
    let id = text(id);
    if id != mine {
        let _ = objects.delete(&marker(&mine)).await; // another replica was first
    }
    Ok(id)
}

/// Why an object store cannot be used, if so. Changes nothing.
///
/// # Errors
/// [`StoreError`].
pub async fn object_store_fault(
    store: &Store,
    objects: &Objects,
) -> Result<Option<String>, StoreError> {
    let Some(id) = store.known_secret(NAME).await? else { return Ok(None) };
    let id = String::from_utf8_lossy(&id);
    Ok(in_time(objects, has_marker(objects, &id)).await.err())
}

/// Checks that this is the object store with that id, which all replicas use.
async fn has_marker(objects: &Objects, id: &str) -> Result<(), String> {
    let marker = marker(id);
    match objects.get_small(&marker).await {
        Ok(_) => Ok(()),
        Err(ObjectsError::Missing) => Err(format!(
            "it is not the object store that the replicas share ({objects} has no {marker})"
        )),
        Err(error) => Err(format!("{objects}: {error}")),
    }
}

/// Runs a check with a timeout.
async fn in_time(
    objects: &Objects,
    look: impl Future<Output = Result<(), String>>,
) -> Result<(), String> {
    let late = || Err(format!("the object store {objects} does not answer"));
    timeout(MAX_WAIT, look).await.unwrap_or_else(|_| late())
}

impl ScopeFileStore {
    /// A run waits up to its limit; a caller does not wait for an unavailable object store.
    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, NotStored>>,
    ) -> Result<T, NotStored> {
        match self.user {
            User::Run => work.await,
            User::Caller => tokio::select! {
                done = work => done,
                () = self.scope.kept.caller_timeout() => Err(NotStored::Unavailable),
            },
        }
    }
}

#[async_trait]
impl FileStore for ScopeFileStore {
    fn of_run(&self, run: Uuid, epoch: i64) -> Arc<dyn FileStore> {
        let (scope, writer) = (Arc::clone(&self.scope), Writer::Run(run, epoch));
        Arc::new(Self { scope, writer, user: User::Run })
    }

    fn while_run_exists(&self, run: Uuid) -> Arc<dyn FileStore> {
        let (scope, writer) = (Arc::clone(&self.scope), Writer::Caller(Some(run)));
        Arc::new(Self { scope, writer, user: self.user })
    }

    async fn refresh(&self) -> Result<(), NotStored> {
        self.in_time(self.scope.refresh()).await
    }

    async fn begin(&self) {
        self.scope.tenant.locks.lock_shared(&self.scope.directory).await;
    }

    fn end(&self, is_stored: bool) {
        if !is_stored {
            self.scope.is_tainted.store(true, Ordering::SeqCst);
        }
        self.scope.tenant.locks.unlock_shared(&self.scope.directory);
    }

    async fn save(&self, changes: ChangedPaths) -> Result<Vec<String>, NotStored> {
        self.in_time(self.scope.store_changes(self.writer, changes)).await
    }
}
