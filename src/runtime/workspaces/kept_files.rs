//! Files of workspaces that are kept in an object store, where `[tools.workspace] store` says so: what is
//! kept counts, and the directory of this replica holds copies.
//!
//! A scope is the directory of one workspace. Before its files are used, what others have changed is
//! brought into it (`bringing`); what a call or a caller has changed is put into the object store and
//! then, under the run's fence, into the database (`storing`) before the call is answered. What was changed
//! and is not kept, because the run was lost in the middle, is undone before the scope is used again.

mod bringing;
mod collecting;
mod directory_locks;
mod storing;

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
use crate::tools::keeping::{Keeper, NotKept, Touched};
use crate::tools::layout::{self, Stamp};
use crate::tools::quota::Quota;

/// The name of the id in the store that identifies the object store.
const NAME: &str = "object_store";
/// How long the object store may take for a small content.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Contents that are put or brought at the same time, for all runs.
const TRANSFERS: usize = 16;
/// How long a caller waits for an object store that is away, and between two looks whether it is.
const CALLERS_PATIENCE: Duration = Duration::from_secs(2);
const CALLERS_LOOK: Duration = Duration::from_millis(200);
/// The pause before something is tried again; it doubles.
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
    /// The id that the store knows.
    id: OnceLock<String>,
    /// Whether the object store failed when it was used last.
    is_failing: AtomicBool,
    /// Whether it was not there at the last look.
    is_away: AtomicBool,
}

/// The files of one tenant, as they are on this replica.
struct Tenant {
    name: String,
    known: Mutex<BTreeMap<String, Known>>,
    scopes: Mutex<BTreeMap<String, Arc<WorkspaceDir>>>,
    /// Held while files of it are put into their places.
    placing: Mutex<()>,
    /// Held from a write of paths until what it made of them is known here.
    noting: tokio::sync::Mutex<()>,
    locks: DirectoryLocks,
}

/// A path that this replica has as it is kept.
#[derive(Debug, Clone)]
struct Known {
    version: i64,
    content: KeptContent,
    /// Of a file, as it was when it was brought or kept.
    stamp: Option<Stamp>,
}

/// The directory of a workspace.
struct WorkspaceDir {
    kept: Arc<KeptFiles>,
    tenant: Arc<Tenant>,
    directory: String,
    /// Up to which version everything has been brought; `None` where nothing has. Held by the task
    /// that brings or keeps something.
    turn: tokio::sync::Mutex<Option<i64>>,
    /// Paths that others have changed and that could not be brought yet.
    behind: Mutex<BTreeSet<String>>,
    /// Whether something may be there that is not kept.
    is_tainted: AtomicBool,
    /// Whether what is known of it may not be true any more.
    is_stale: AtomicBool,
    used: Mutex<Instant>,
}

/// Who keeps the files of a scope, for a run or for callers.
struct ScopeKeeper {
    scope: Arc<WorkspaceDir>,
    writer: Writer,
    user: User,
}

/// For whom files are kept.
#[derive(Debug, Clone, Copy)]
enum Writer {
    /// A run, under an epoch.
    Run(Uuid, i64),
    /// A caller, while that run is there.
    Caller(Option<Uuid>),
}

/// Why something is tried again, or not.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Objects(#[from] ObjectsError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// What was to be done is out of date; it is begun anew.
    #[error("{0}")]
    Overtaken(String),
    #[error("another replica owns the run")]
    Fenced,
    #[error("the run or session of the files was deleted")]
    Orphaned,
    /// It can only be done while no call changes files here.
    #[error("others are changing files of the workspace")]
    NotAlone,
}

impl fmt::Debug for ScopeKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ScopeKeeper")
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
            is_away: AtomicBool::new(false),
        })
    }

    /// Whether the directory is this process's, and holds nothing but copies.
    pub(super) fn is_ready(&self) -> bool {
        self.lock.get().is_some()
    }

    /// What is wrong, if something is.
    pub(super) async fn fault(&self) -> Option<String> {
        let look = async {
            if !self.is_ready() {
                let root = self.root.clone();
                let taken = tokio::task::spawn_blocking(move || layout::take_over(&root)).await;
                let _ = self.lock.set(taken.map_err(|e| e.to_string())??);
            }
            self.difference().await
        };
        let fault = in_time(&self.objects, look).await.err();
        self.is_away.store(fault.is_some(), Ordering::Relaxed);
        fault
    }

    /// Resolves when a caller has waited for long enough, once the object store is known to be away.
    async fn tells_callers(&self) {
        tokio::time::sleep(CALLERS_PATIENCE).await;
        while !(self.is_failing.load(Ordering::Relaxed) || self.is_away.load(Ordering::Relaxed)) {
            tokio::time::sleep(CALLERS_LOOK).await;
        }
    }

    /// Whether it is the object store that all replicas use, and takes what it is given.
    async fn difference(&self) -> Result<(), String> {
        has_marker(&self.objects, self.id().await?).await?;
        if self.is_failing.load(Ordering::Relaxed) {
            let probe = format!(".probe/{}", self.owner);
            let put = self.objects.put(&probe, Bytes::from_static(b"probe\n")).await;
            put.map_err(|error| format!("{}: {error}", self.objects))?;
            let _ = self.objects.delete(&probe).await; // it would be written over
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

    /// Fails where the directory of the object store is away, as that of a volume that is not mounted.
    /// What is changed there counts only if it was there before and is there afterwards.
    async fn is_mounted(&self) -> Result<(), ObjectsError> {
        if !self.objects.is_directory() {
            return Ok(());
        }
        let id = self.id().await.map_err(ObjectsError::Unavailable)?;
        has_marker(&self.objects, id).await.map_err(ObjectsError::Unavailable)
    }

    /// Who keeps the files of a directory of a tenant, of no run yet.
    pub(super) fn keeper(
        self: &Arc<Self>,
        tenant: &str,
        directory: &str,
        user: User,
    ) -> Arc<dyn Keeper> {
        Arc::new(ScopeKeeper {
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
                placing: Mutex::default(),
                noting: tokio::sync::Mutex::default(),
                locks: DirectoryLocks::default(),
            })
        }));
        let mut scopes = tenant.scopes.lock();
        let scope = scopes.entry(directory.to_owned()).or_insert_with(|| {
            Arc::new(WorkspaceDir {
                kept: Arc::clone(self),
                tenant: Arc::clone(&tenant),
                directory: directory.to_owned(),
                turn: tokio::sync::Mutex::default(),
                behind: Mutex::default(),
                is_tainted: AtomicBool::new(false),
                is_stale: AtomicBool::new(false),
                used: Mutex::new(Instant::now()),
            })
        });
        *scope.used.lock() = Instant::now();
        Arc::clone(scope)
    }

    /// The directory of a tenant, for what is done in it by itself.
    fn directory_of(&self, tenant: &str) -> Result<Workspace, Failure> {
        let opened = Workspace::open(&self.root, tenant, ".");
        opened.map_err(|error| Failure::Io(std::io::Error::other(error)))
    }

    /// Waits a little where it may still help; whether it may.
    async fn may_retry(&self, since: Instant, pause: &mut Duration, failure: &Failure) -> bool {
        let is_of_objects = matches!(failure, Failure::Objects(_));
        if is_of_objects {
            self.is_failing.store(true, Ordering::Relaxed);
        }
        let is_passing = match failure {
            Failure::Store(error) => error.is_transient(),
            Failure::Io(error) => !is_layout(error),
            Failure::Objects(_) | Failure::Overtaken(_) => true,
            Failure::Fenced | Failure::Orphaned | Failure::NotAlone => false,
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

/// Whether something else is at a path or above it, which trying again does not change.
fn is_layout(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as Kind;
    let kinds =
        [Kind::NotADirectory, Kind::IsADirectory, Kind::InvalidInput, Kind::InvalidFilename];
    kinds.contains(&error.kind())
}

/// Whether a path is that directory or lies beneath it.
fn contains(directory: &str, path: &str) -> bool {
    directory == "."
        || path == directory
        || path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

/// The known paths beneath a directory.
fn known_beneath(known: &BTreeMap<String, Known>, directory: &str) -> Vec<String> {
    if directory == "." {
        return known.keys().cloned().collect();
    }
    known.range(beneath(directory)).map(|(path, _)| path.clone()).collect()
}

fn has_beneath(known: &BTreeMap<String, Known>, directory: &str) -> bool {
    known.range(beneath(directory)).next().is_some()
}

/// Where the paths beneath a directory are among all.
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
        let _ = objects.delete(&marker(&mine)).await; // it means nothing
    }
    Ok(id)
}

/// What is wrong with an object store, if something is. Changes nothing.
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

/// Whether it is the object store of that id, which all replicas use.
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

/// A look that has to end in time.
async fn in_time(
    objects: &Objects,
    look: impl Future<Output = Result<(), String>>,
) -> Result<(), String> {
    let late = || Err(format!("the object store {objects} does not answer"));
    timeout(MAX_WAIT, look).await.unwrap_or_else(|_| late())
}

impl ScopeKeeper {
    /// A run waits as long as it may, a caller not for an object store that is away.
    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, NotKept>>,
    ) -> Result<T, NotKept> {
        match self.user {
            User::Run => work.await,
            User::Caller => tokio::select! {
                done = work => done,
                () = self.scope.kept.tells_callers() => Err(NotKept::Unavailable),
            },
        }
    }
}

#[async_trait]
impl Keeper for ScopeKeeper {
    fn of_run(&self, run: Uuid, epoch: i64) -> Arc<dyn Keeper> {
        let (scope, writer) = (Arc::clone(&self.scope), Writer::Run(run, epoch));
        Arc::new(Self { scope, writer, user: User::Run })
    }

    fn while_there(&self, run: Uuid) -> Arc<dyn Keeper> {
        let (scope, writer) = (Arc::clone(&self.scope), Writer::Caller(Some(run)));
        Arc::new(Self { scope, writer, user: self.user })
    }

    async fn refresh(&self) -> Result<(), NotKept> {
        self.in_time(self.scope.refresh()).await
    }

    async fn begun(&self) {
        self.scope.tenant.locks.lock_shared(&self.scope.directory).await;
    }

    fn ended(&self, is_kept: bool) {
        if !is_kept {
            self.scope.is_tainted.store(true, Ordering::SeqCst);
        }
        self.scope.tenant.locks.unlock_shared(&self.scope.directory);
    }

    async fn keep(&self, touched: Touched) -> Result<Vec<String>, NotKept> {
        self.in_time(self.scope.keep(self.writer, touched)).await
    }
}
