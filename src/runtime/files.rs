//! The files of a run, a session or an agent, as callers reach them.
//!
//! A run's are those of the workspace that it used, by the definition that it keeps; a session's and
//! an agent's, by the agent as it is now. A caller sees what the agent's tools may read or write,
//! and nothing that `paths.deny` covers. Work on files is done on the blocking pool, a few at a time
//! where it reads much.

use std::io;
use std::sync::Arc;

use cap_std::fs::File;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::Runtime;
use super::claimed::ResumeError;
use super::loaded::LoadedAgent;
use crate::store::{RunRecord, StoreError};
use crate::tools::Workspace;
use crate::tools::executor::Executor;
use crate::tools::staged::Staged;
use crate::tools::stored_files::{
    ChangeError, Condition, ListedFile, NewFile, OpenedFile, StoredFiles,
};

/// Lists and hashes of all requests at the same time.
static READS: Semaphore = Semaphore::const_new(4);

/// The files of a run, a session or an agent. Cheap to clone.
#[derive(Clone)]
pub struct Files {
    workspace: Workspace,
    executor: Arc<Executor>,
    stored: Arc<StoredFiles>,
}

/// Files that arrived with an invocation, and have no place before the run is accepted.
#[derive(Debug, Default)]
pub struct Uploads(parking_lot::Mutex<Vec<Upload>>);

/// One of them.
#[derive(Debug)]
pub struct Upload {
    /// The path as the caller wrote it.
    pub path: String,
    pub staged: Staged,
    pub size: u64,
    /// The quoted SHA-256 of its content.
    pub etag: String,
}

impl Uploads {
    pub fn new(uploads: Vec<Upload>) -> Self {
        Self(uploads.into())
    }
}

/// Why the files of a workspace cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Unavailable(#[from] io::Error),
}

/// Why an upload has no place.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// Its path cannot be one of this workspace; with its place among the uploads.
    #[error("the file name {1:?} is no path of the run's workspace that the agent can reach")]
    Path(usize, String),
    /// Two have the same path.
    #[error("the file name {1:?} names the same file as an earlier one")]
    Twice(usize, String),
    #[error(transparent)]
    Change(#[from] ChangeError),
}

impl Files {
    /// Files whose paths begin with `prefix` and come after another one, sorted by path.
    ///
    /// # Errors
    /// There are too many files.
    pub async fn list(
        &self,
        prefix: String,
        after: Option<String>,
        limit: usize,
    ) -> io::Result<Vec<ListedFile>> {
        let _place = READS.acquire().await;
        self.blocking(move |files| {
            let may_see = |path: &str| files.may_see(path);
            files.stored.list(&files.workspace, &prefix, after.as_deref(), limit, &may_see)
        })
        .await
    }

    /// Opens a file; none where there is none that a caller may see.
    ///
    /// # Errors
    /// What the system says.
    pub async fn open(&self, path: String) -> io::Result<Option<OpenedFile>> {
        let _place = READS.acquire().await;
        self.blocking(move |files| {
            let Some(path) = files.resolved(&path) else { return Ok(None) };
            match files.stored.open(&files.workspace, path) {
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                    ) =>
                {
                    Ok(None)
                }
                opened => opened.map(Some),
            }
        })
        .await
    }

    /// Puts one file in its place: its resolved path, and whether it is new.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub async fn put(
        &self,
        path: String,
        staged: Staged,
        size: u64,
        condition: Option<Condition>,
    ) -> Result<(String, bool), ChangeError> {
        self.blocking(move |files| {
            let path = files.resolved(&path).ok_or(ChangeError::NotFound)?;
            let new = [NewFile { path, staged, size }];
            let is_new = files.stored.place(&files.workspace, &new, condition.as_ref())?;
            let [NewFile { path, .. }] = new;
            Ok((path, is_new.contains(&true)))
        })
        .await
    }

    /// Deletes a file; its resolved path.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub async fn delete(
        &self,
        path: String,
        condition: Option<Condition>,
    ) -> Result<String, ChangeError> {
        self.blocking(move |files| {
            let path = files.resolved(&path).ok_or(ChangeError::NotFound)?;
            files.stored.delete(&files.workspace, &path, condition.as_ref())?;
            Ok(path)
        })
        .await
    }

    /// Puts all files in their places; what was put there.
    async fn put_all(&self, uploads: Vec<Upload>) -> Result<Vec<(String, String)>, UploadError> {
        self.blocking(move |files| {
            let (mut new, mut put): (Vec<NewFile>, Vec<(String, String)>) =
                (Vec::new(), Vec::new());
            for (number, Upload { path: asked, staged, size, etag }) in
                uploads.into_iter().enumerate()
            {
                let path = files.resolved(&asked);
                let path = path.ok_or_else(|| UploadError::Path(number, asked.clone()))?;
                if new.iter().any(|file| file.path == path) {
                    return Err(UploadError::Twice(number, asked));
                }
                let holds = |dir: &str, file: &str| {
                    file.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
                };
                if new.iter().any(|file| holds(&file.path, &path) || holds(&path, &file.path)) {
                    return Err(UploadError::Path(number, asked));
                }
                put.push((path.clone(), etag));
                new.push(NewFile { path, staged, size });
            }
            files.stored.place(&files.workspace, &new, None)?;
            Ok(put)
        })
        .await
    }

    fn may_see(&self, path: &str) -> bool {
        self.executor.may_reach(&self.workspace.directory(), path)
    }

    fn resolved(&self, path: &str) -> Option<String> {
        StoredFiles::resolved(&self.workspace, path).filter(|path| self.may_see(path))
    }

    async fn blocking<T, E>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<io::Error> + Send + 'static,
    {
        let files = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&files)).await;
        done.unwrap_or_else(|stopped| Err(io::Error::other(stopped).into()))
    }
}

impl From<io::Error> for UploadError {
    fn from(error: io::Error) -> Self {
        Self::Change(error.into())
    }
}

impl Runtime {
    /// The files of a run; none where its definition cannot be used any more.
    ///
    /// # Errors
    /// [`FilesError`].
    pub async fn files_of_run(&self, run: &RunRecord) -> Result<Option<Files>, FilesError> {
        let Some(definition) = self.inner.store.definition(&run.definition_hash).await? else {
            return Ok(None);
        };
        let loaded = self.inner.loaded.of_snapshot(&run.definition_hash, &definition);
        let Ok(loaded) = loaded else { return Ok(None) };
        let directory = loaded.agent.workspace_of(run.id, run.session_id.as_deref());
        self.files_in(&run.tenant, &directory, loaded).await
    }

    /// The files of a session; none where its agent keeps none for a session.
    ///
    /// # Errors
    /// [`FilesError`].
    pub async fn files_of_session(
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
        self.files_in(tenant, &directory, loaded).await
    }

    /// The files that all runs of an agent share; none where they share none.
    ///
    /// # Errors
    /// [`FilesError`].
    pub async fn files_of_agent(
        &self,
        tenant: &str,
        agent: &str,
    ) -> Result<Option<Files>, FilesError> {
        let Some(loaded) = self.loaded_now(agent) else { return Ok(None) };
        let directory = loaded.agent.definition.workspace.clone();
        if directory.contains('{') {
            return Ok(None);
        }
        self.files_in(tenant, &directory, loaded).await
    }

    /// Bytes of a file that is written.
    pub fn max_file(&self) -> u64 {
        self.inner.settings.quota.max_file()
    }

    /// A new file that has no place yet, beneath the directory of a tenant.
    ///
    /// # Errors
    /// What the system says.
    pub async fn stage_file(&self, tenant: &str) -> io::Result<(Staged, File)> {
        let unavailable = |why: String| io::Error::other(why);
        let tenant = self.workspace(tenant, ".").await.map_err(|e| unavailable(e.to_string()))?;
        let staged = tokio::task::spawn_blocking(move || Staged::create(&tenant.root()));
        staged.await.map_err(io::Error::other)?
    }

    /// Puts the files that came with an invocation into the run's workspace; what was put where.
    pub(super) async fn place_uploads(
        &self,
        tenant: &str,
        directory: &str,
        agent: &LoadedAgent,
        uploads: &Uploads,
    ) -> Result<Vec<(String, String)>, UploadError> {
        let uploads = std::mem::take(&mut *uploads.0.lock());
        if uploads.is_empty() {
            return Ok(Vec::new());
        }
        match self.files_in(tenant, directory, agent.clone()).await {
            Ok(Some(files)) => files.put_all(uploads).await,
            Ok(None) | Err(_) => Err(io::Error::other("the workspace cannot be opened").into()),
        }
    }

    fn loaded_now(&self, agent: &str) -> Option<LoadedAgent> {
        let agent = self.inner.catalogue.agent(agent)?;
        self.inner.loaded.get(&agent).ok()
    }

    async fn files_in(
        &self,
        tenant: &str,
        directory: &str,
        agent: LoadedAgent,
    ) -> Result<Option<Files>, FilesError> {
        let workspace = match self.workspace(tenant, directory).await {
            Ok(workspace) => workspace,
            Err(ResumeError::NoWorkspace(error)) => return Err(io::Error::other(error).into()),
            Err(_) => return Ok(None),
        };
        let stored = Arc::clone(&self.inner.files);
        Ok(Some(Files { workspace, executor: agent.executor, stored }))
    }
}
