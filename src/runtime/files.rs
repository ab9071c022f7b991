//! Access of callers to the files of a run, a session or an agent.
//!
//! The workspace of a run is determined by the run's own definition; that of a session or an agent by the
//! present definition. A caller sees what the agent's tools may read or write, and nothing that `paths.deny`
//! covers. Work on files is done on blocking threads; work that reads much, a few at a time.

use std::io;
use std::sync::Arc;

use cap_std::fs::File;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::Runtime;
use super::loaded_agents::LoadedAgent;
use super::workspaces::{ChangeLock, ChangeLocks, OpenError, User};
use crate::agents::Agent;
use crate::fairness;
use crate::store::{RunRecord, Store, StoreError};
use crate::tools::Workspace;
use crate::tools::executor::Executor;
use crate::tools::file_store::{ChangedPaths, NotStored};
use crate::tools::quota::OverQuota;
use crate::tools::staged_file::StagedFile;
use crate::tools::stored_files::{
    ChangeError, Condition, ListError, ListedFile, NewFile, OpenedFile, StoredFiles,
};
use crate::tools::workspace::{Kind, is_absent};

/// Limits the listings and hashes that are computed at the same time.
pub(super) static READS: Semaphore = Semaphore::const_new(4);

/// The owner of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileOwner {
    Run(Uuid),
    Session(String),
    Agent(String),
}

/// The files of a run, a session or an agent. Cheap to clone.
#[derive(Clone)]
pub struct Files {
    pub(super) workspace: Workspace,
    executor: Arc<Executor>,
    pub(super) stored: Arc<StoredFiles>,
    users: FileUsers,
    tenant: Arc<str>,
    changes: Arc<ChangeLocks>,
    store: Arc<Store>,
    /// The run that must exist when a file is changed: the files are deleted with it, or with its session.
    while_run_exists: Option<Uuid>,
}

/// The runs that use a workspace, as far as its path tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileUsers {
    pub run: Option<Uuid>,
    /// All runs of it.
    pub session: Option<String>,
    /// All runs of it.
    pub agent: Option<String>,
}

impl FileUsers {
    fn of_run(agent: &Agent, run: &RunRecord) -> Self {
        let workspace = &agent.definition.workspace;
        let is_own = workspace.contains("{run_id}");
        let is_shared = !workspace.contains('{');
        let in_session = workspace.contains("{session_id}") && !is_own;
        Self {
            run: Some(run.id),
            session: run.session_id.clone().filter(|_| in_session),
            agent: is_shared.then(|| run.agent.clone()),
        }
    }
}

/// Why the files of a workspace cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// Something does not exist; the field names it.
    #[error("there is no such {0}")]
    Missing(&'static str),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Unavailable(#[from] io::Error),
}

impl Files {
    /// The same files, which can be changed only while this run exists.
    fn while_run_exists(self, run: Uuid) -> Self {
        let workspace = self.workspace.while_run_exists(run);
        Self { workspace, while_run_exists: Some(run), ..self }
    }

    /// The runs that use them.
    pub fn users(&self) -> &FileUsers {
        &self.users
    }

    /// Files whose paths begin with `prefix` and come after another one, sorted by path.
    ///
    /// # Errors
    /// [`ListError`].
    pub async fn list(
        &self,
        prefix: String,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<ListedFile>, ListError> {
        let _permit = READS.acquire().await;
        self.blocking(move |files| {
            let may_see = |path: &str| files.may_see(path);
            files.stored.list(&files.workspace, &prefix, after.as_deref(), limit, &may_see)
        })
        .await
    }

    /// Opens a file; `None` if the caller cannot see it.
    ///
    /// # Errors
    /// What the system says.
    pub async fn open(&self, path: String) -> io::Result<Option<OpenedFile>> {
        let _permit = READS.acquire().await;
        self.blocking(move |files| {
            let Some(path) = files.resolved(&path) else { return Ok(None) };
            match files.stored.open(&files.workspace, path) {
                Err(e) if is_absent(&e) => Ok(None),
                opened => opened.map(Some),
            }
        })
        .await
    }

    /// Judges a change of one file, which gets this size, or is deleted if that is `None`. Returns its resolved
    /// path, and the condition again. Changes nothing.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub async fn judge(
        &self,
        path: String,
        size: Option<u64>,
        condition: Option<Condition>,
    ) -> Result<(String, Option<Condition>), ChangeError> {
        self.check_existence().await?;
        self.blocking(move |files| {
            let path = files.resolved(&path).ok_or_else(|| files.without_file(path))?;
            files.stored.could_change(&files.workspace, &path, size, condition.as_ref())?;
            Ok((path, condition))
        })
        .await
    }

    /// Places one file that was judged; returns whether it is new.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub async fn put(
        &self,
        path: String,
        staged: StagedFile,
        size: u64,
        condition: Option<Condition>,
    ) -> Result<bool, ChangeError> {
        let changed = vec![path.clone()];
        let paths = |_: &bool| changed;
        self.changing(paths, ChangeError::is_refusal, move |files| {
            let path = files.still_at(path)?;
            let new = [NewFile { path, staged, size }];
            let placed = files.stored.place(&files.workspace, &new, condition.as_ref())?;
            Ok(placed.iter().any(|placement| placement.is_new))
        })
        .await
    }

    /// Deletes a file whose deletion was judged.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub async fn delete(
        &self,
        path: String,
        condition: Option<Condition>,
    ) -> Result<(), ChangeError> {
        let deleting = self.changing(Vec::clone, ChangeError::is_refusal, move |files| {
            let path = files.still_at(path)?;
            files.stored.delete(&files.workspace, &path, condition.as_ref())
        });
        deleting.await.map(drop)
    }

    /// A resolved path that still leads to the same place.
    fn still_at(&self, path: String) -> Result<String, ChangeError> {
        let now = self.resolved(&path).filter(|now| *now == path);
        now.ok_or_else(|| self.without_file(path))
    }

    /// Why there can be no file at a path.
    fn without_file(&self, path: String) -> ChangeError {
        let is_directory = self.workspace.resolve(&path).is_ok_and(|resolved| {
            // A rule for the files beneath is one for the directory.
            let is_seen = [&resolved.path, &format!("{}/file", resolved.path)];
            resolved.kind == Some(Kind::Directory) && is_seen.iter().any(|path| self.may_see(path))
        });
        if is_directory {
            ChangeError::InTheWay(path, "is a directory")
        } else {
            ChangeError::NotFound
        }
    }

    fn may_see(&self, path: &str) -> bool {
        self.executor.may_reach(&self.workspace.directory(), path)
    }

    pub(super) fn resolved(&self, path: &str) -> Option<String> {
        StoredFiles::resolved(&self.workspace, path).filter(|path| self.may_see(path))
    }

    /// Waits for the tenant's lock for changes of files; fails if the files were deleted.
    async fn alone(&self) -> Result<ChangeLock, ChangeError> {
        let lock = self.changes.lock(&self.tenant).await?;
        self.check_existence().await?;
        Ok(lock)
    }

    /// Fails if the files were deleted.
    async fn check_existence(&self) -> Result<(), ChangeError> {
        if let Some(run) = self.while_run_exists
            && !self.store.has_run(run).await.map_err(io::Error::other)?
        {
            return Err(NotStored::Orphaned.into());
        }
        Ok(())
    }

    /// Changes files, and stores the changes. A refusal has changed nothing.
    pub(super) async fn changing<T, E>(
        &self,
        paths: impl FnOnce(&T) -> Vec<String> + Send,
        is_refusal: fn(&E) -> bool,
        work: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<io::Error> + From<ChangeError> + Send + 'static,
    {
        let change = self.workspace.begin_change().await;
        let result = match self.alone().await {
            Ok(lock) => {
                let alone = move |files: &Self| {
                    let _lock = lock;
                    work(files)
                };
                self.blocking(alone).await.map_err(|error| {
                    let is_unchanged = is_refusal(&error);
                    (error, is_unchanged)
                })
            }
            Err(error) => Err((error.into(), true)),
        };
        let done = match result {
            Ok(done) => done,
            Err((error, is_unchanged)) => {
                if let (Some(change), true) = (change, is_unchanged) {
                    change.unchanged();
                }
                return Err(error);
            }
        };
        if let Some(change) = change {
            let paths = paths(&done).into_iter().collect();
            let changes = ChangedPaths { paths, is_all: true, is_whole: true };
            let refused = change.save(changes).await.map_err(ChangeError::from)?;
            if let Some(path) = refused.into_iter().next() {
                return Err(ChangeError::InTheWay(
                    path,
                    "was changed by another run in the meantime",
                )
                .into());
            }
        }
        Ok(done)
    }

    pub(super) async fn blocking<T, E>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<io::Error> + Send + 'static,
    {
        let files = self.clone();
        let done = fairness::on_files(move || work(&files)).await;
        done.unwrap_or_else(|stopped| Err(io::Error::other(stopped.to_string()).into()))
    }
}

impl Runtime {
    /// The files of a run, a session or an agent.
    ///
    /// # Errors
    /// [`FilesError`].
    pub async fn files_of(&self, tenant: &str, owner: &FileOwner) -> Result<Files, FilesError> {
        let (files, what) = match owner {
            FileOwner::Run(id) => {
                let run = self.inner.store.run(tenant, *id).await?;
                let run = run.ok_or(FilesError::Missing("run"))?;
                (self.files_of_run(&run).await?, "workspace")
            }
            FileOwner::Session(id) => {
                (self.files_of_session(tenant, id).await?, "workspace of a session")
            }
            FileOwner::Agent(name) => {
                (self.files_of_agent(tenant, name).await?, "shared workspace")
            }
        };
        files.ok_or(FilesError::Missing(what))
    }

    /// The files of a run; `None` if its definition can no longer be used.
    async fn files_of_run(&self, run: &RunRecord) -> Result<Option<Files>, FilesError> {
        let Some(definition) = self.inner.store.definition(&run.definition_hash).await? else {
            return Ok(None);
        };
        let loaded = self.inner.agents.of_snapshot(&run.definition_hash, &definition);
        let Ok(loaded) = loaded else { return Ok(None) };
        let directory = loaded.agent.workspace_of(run.id, run.session_id.as_deref());
        let users = FileUsers::of_run(&loaded.agent, run);
        let files = self.files_in(&run.tenant, &directory, loaded, users).await?;
        Ok(files.map(|files| files.while_run_exists(run.id)))
    }

    /// The files of a session; `None` if its agent has no workspace per session.
    async fn files_of_session(
        &self,
        tenant: &str,
        session: &str,
    ) -> Result<Option<Files>, FilesError> {
        let Some(record) = self.inner.store.session(tenant, session, 0).await? else {
            return Ok(None);
        };
        let Some(loaded) = self.loaded_now(&record.agent) else { return Ok(None) };
        let directory = &loaded.agent.definition.workspace;
        if !directory.contains("{session_id}") || directory.contains("{run_id}") {
            return Ok(None);
        }
        let directory = loaded.agent.workspace_of(Uuid::nil(), Some(session));
        let Some(newest) = self.inner.store.newest_run_of(tenant, session).await? else {
            return Ok(None);
        };
        let users = FileUsers { session: Some(session.to_owned()), ..FileUsers::default() };
        let files = self.files_in(tenant, &directory, loaded, users).await?;
        Ok(files.map(|files| files.while_run_exists(newest)))
    }

    /// The files that all runs of an agent share; `None` if they share none.
    async fn files_of_agent(&self, tenant: &str, agent: &str) -> Result<Option<Files>, FilesError> {
        let Some(loaded) = self.loaded_now(agent) else { return Ok(None) };
        let directory = loaded.agent.definition.workspace.clone();
        if directory.contains('{') {
            return Ok(None);
        }
        let users = FileUsers { agent: Some(agent.to_owned()), ..FileUsers::default() };
        self.files_in(tenant, &directory, loaded, users).await
    }

    /// Bytes of a file that is written.
    pub fn max_file(&self) -> u64 {
        self.inner.workspaces.quota().max_file()
    }

    /// Refuses files that have more bytes together than any workspace may hold.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn could_hold(&self, bytes: u64) -> Result<(), ChangeError> {
        let [most, _] = self.inner.workspaces.quota().bounds();
        if bytes > most {
            return Err(OverQuota::Bytes(bytes, most).into());
        }
        Ok(())
    }

    /// A new staged file, beneath the directory of a tenant. What it grows by is counted.
    ///
    /// # Errors
    /// What the system says.
    pub async fn stage_file(&self, tenant: &str) -> io::Result<(StagedFile, File)> {
        let held = self.inner.workspaces.staged().hold(tenant);
        let tenant = self.inner.workspaces.local(tenant, ".").await;
        let tenant = tenant.map_err(|error| io::Error::other(error.to_string()))?;
        let staged = fairness::on_files(move || StagedFile::create(&tenant.root())).await;
        let (mut staged, file) =
            staged.map_err(|failed| io::Error::other(failed.to_string()))??;
        staged.count(held);
        Ok((staged, file))
    }

    fn loaded_now(&self, agent: &str) -> Option<LoadedAgent> {
        let agent = self.inner.agents.named(agent)?;
        self.inner.agents.get(&agent).ok()
    }

    pub(super) async fn files_in(
        &self,
        tenant: &str,
        directory: &str,
        agent: LoadedAgent,
        users: FileUsers,
    ) -> Result<Option<Files>, FilesError> {
        let opened = self.inner.workspaces.open(tenant, directory, User::Caller).await;
        let workspace = match opened {
            Ok(workspace) => workspace,
            Err(OpenError::NotHere(error)) => return Err(io::Error::other(error).into()),
            Err(OpenError::Unusable(_)) => return Ok(None),
        };
        Ok(Some(self.files_of_workspace(tenant, workspace, agent, users)))
    }

    pub(super) fn files_of_workspace(
        &self,
        tenant: &str,
        workspace: Workspace,
        agent: LoadedAgent,
        users: FileUsers,
    ) -> Files {
        let workspaces = &self.inner.workspaces;
        Files {
            workspace,
            executor: agent.executor,
            stored: workspaces.stored(),
            users,
            tenant: tenant.into(),
            changes: workspaces.changes(),
            store: Arc::clone(&self.inner.store),
            while_run_exists: None,
        }
    }
}
