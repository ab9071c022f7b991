//! Files that come with an invocation: received with the request, or copied from another workspace
//! of the tenant.
//!
//! They are placed when the run is accepted, all of them or none. A file can be copied if the caller can read
//! it by its owner's route; its content at that moment is copied. A crash between that and the run's first
//! commit leaves files without a run; the repeated request places them again. Placed files are recorded in the
//! audit log, even if the client disconnects.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};

use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Runtime;
use super::files::{FileOwner, FileUsers, Files, FilesError, READS};
use super::loaded::LoadedAgent;
use crate::tools::quota::{Growth, OverQuota};
use crate::tools::staged::Staged;
use crate::tools::stored_files::{ChangeError, NewFile, StoredFiles};
use crate::tools::workspace::{directories_of, is_absent, normalise};

const CHUNK: usize = 64 << 10;

/// A file of another workspace that the run gets a copy of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileCopy {
    /// Where the copy lies, as the caller wrote it.
    pub path: String,
    pub owner: FileOwner,
    /// Where the file lies in its owner's workspace.
    pub source: String,
}

/// A file that was received.
#[derive(Debug)]
pub struct Upload {
    /// The path as the caller wrote it.
    pub path: String,
    pub staged: Staged,
    pub size: u64,
    /// The quoted SHA-256 of its content.
    pub etag: String,
}

/// The files of one invocation.
#[derive(Debug, Default)]
pub struct Uploads(Mutex<Waiting>);

/// The files that are not placed yet.
#[derive(Debug, Default)]
struct Waiting {
    received: Vec<Upload>,
    copies: Vec<FileCopy>,
}

impl Uploads {
    pub fn new(received: Vec<Upload>, copies: Vec<FileCopy>) -> Self {
        Self(Waiting { received, copies }.into())
    }
}

/// Why files of an invocation cannot be placed. Pointers are into the request's body.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// It cannot be one of this workspace.
    #[error("{path:?} is not a path in the run's workspace that the agent may access")]
    Path { pointer: String, path: String },
    /// Two have the same path.
    #[error("the file name {path:?} names the same file as an earlier one")]
    Twice { pointer: String, path: String },
    /// Something else is there.
    #[error("the file name {path:?} {what}")]
    InTheWay { pointer: String, path: String, what: &'static str },
    /// There is nothing to copy.
    #[error("there is no such {what}")]
    Source { pointer: String, what: &'static str },
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error(transparent)]
    Files(FilesError),
}

impl UploadError {
    /// Whether no file was placed.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Path { .. } | Self::Twice { .. } | Self::Change(ChangeError::Quota(_)))
    }

    /// From the error of a change, with a pointer if something is in the way of one of these files.
    fn of_change(error: ChangeError, asked: &[RequestedFile], targets: &[(String, u64)]) -> Self {
        match error {
            ChangeError::InTheWay(path, what) => {
                let mut places = asked.iter().zip(targets);
                match places.find(|(_, (target, _))| *target == path) {
                    Some(((pointer, path, _), _)) => {
                        Self::InTheWay { pointer: pointer.clone(), path: path.clone(), what }
                    }
                    None => ChangeError::InTheWay(path, what).into(),
                }
            }
            other => other.into(),
        }
    }
}

impl From<io::Error> for UploadError {
    fn from(error: io::Error) -> Self {
        Self::Change(error.into())
    }
}

/// A placed file.
pub(super) struct Placed {
    path: String,
    etag: String,
    /// Where it was copied from.
    from: Option<Value>,
}

impl Placed {
    /// Its details in the audit log. The run has no row yet.
    pub(super) fn details(self, agent: &str, session: Option<&str>) -> Value {
        let mut details = json!({"path": self.path, "etag": self.etag, "agent": agent});
        if let Some(session) = session {
            details["session_id"] = session.into();
        }
        if let Some(from) = self.from {
            details["from"] = from;
        }
        details
    }
}

/// A requested file: its pointer, its path as it was written, and its size.
type RequestedFile = (String, String, u64);

/// A complete file on its way to a path.
struct Given {
    pointer: String,
    upload: Upload,
    from: Option<Value>,
}

impl FileCopy {
    /// Where it comes from, for the audit log.
    fn origin(&self) -> Value {
        let mut from = json!({"path": self.source});
        let (kind, owner) = match &self.owner {
            FileOwner::Run(id) => ("run_id", id.to_string()),
            FileOwner::Session(id) => ("session_id", id.clone()),
            FileOwner::Agent(name) => ("agent", name.clone()),
        };
        from[kind] = owner.into();
        from
    }

    fn missing(&self, number: usize, what: &'static str) -> UploadError {
        let field = match (what, &self.owner) {
            ("file", _) => "path",
            (_, FileOwner::Run(_)) => "run_id",
            (_, FileOwner::Session(_)) => "session_id",
            (_, FileOwner::Agent(_)) => "agent",
        };
        UploadError::Source { pointer: format!("/files/{number}/from/{field}"), what }
    }
}

fn received_at(number: usize) -> String {
    format!("/files/{number}")
}

fn copied_to(number: usize) -> String {
    format!("/files/{number}/path")
}

impl Runtime {
    /// Puts the files of an invocation into the run's workspace.
    pub(super) async fn place_uploads(
        &self,
        tenant: &str,
        loaded: &LoadedAgent,
        directory: &str,
        uploads: &Uploads,
    ) -> Result<Vec<Placed>, UploadError> {
        let Waiting { received, copies } = std::mem::take(&mut *uploads.0.lock());
        let mut given: Vec<Given> = received
            .into_iter()
            .enumerate()
            .map(|(number, upload)| Given { pointer: received_at(number), upload, from: None })
            .collect();
        for (number, copy) in copies.iter().enumerate() {
            let upload = self.copied(tenant, number, copy).await?;
            given.push(Given { pointer: copied_to(number), upload, from: Some(copy.origin()) });
        }
        if given.is_empty() {
            return Ok(Vec::new());
        }
        if self.inner.workspaces.find(tenant, directory).await?.is_none() {
            // Refused before the workspace is made: an empty one would never be removed.
            self.judge_unmade(loaded, directory, &asked(&given))?;
        }
        match self.files_in(tenant, directory, loaded.clone(), FileUsers::default()).await {
            Ok(Some(files)) => files.put_all(given).await,
            Ok(None) | Err(_) => Err(io::Error::other("the workspace cannot be opened").into()),
        }
    }

    /// Refuses what [`Self::place_uploads`] would refuse, without changing anything.
    pub(super) async fn judge_uploads(
        &self,
        tenant: &str,
        loaded: &LoadedAgent,
        directory: &str,
        uploads: &Uploads,
    ) -> Result<(), UploadError> {
        let Waiting { received, copies } = std::mem::take(&mut *uploads.0.lock());
        let mut asked: Vec<RequestedFile> = received
            .into_iter()
            .enumerate()
            .map(|(number, Upload { path, size, .. })| (received_at(number), path, size))
            .collect();
        for (number, copy) in copies.into_iter().enumerate() {
            let (_, size) = self.source(tenant, number, &copy).await?;
            asked.push((copied_to(number), copy.path, size));
        }
        match self.inner.workspaces.find(tenant, directory).await? {
            None => self.judge_unmade(loaded, directory, &asked),
            Some(workspace) => {
                let files = self.files_of_workspace(
                    tenant,
                    workspace,
                    loaded.clone(),
                    FileUsers::default(),
                );
                files
                    .blocking(move |files| {
                        let sizes = targets(&asked, |path| files.resolved(path))?;
                        StoredFiles::could_place(&files.workspace, &sizes)
                            .map_err(|error| UploadError::of_change(error, &asked, &sizes))
                    })
                    .await
            }
        }
    }

    /// Refuses files that are not possible in a workspace that does not exist yet.
    fn judge_unmade(
        &self,
        loaded: &LoadedAgent,
        directory: &str,
        asked: &[RequestedFile],
    ) -> Result<(), UploadError> {
        let sizes = targets(asked, |path| unmade(loaded, directory, path))?;
        let above = sizes.iter().flat_map(|(path, _)| directories_of(path));
        let directories = Growth::of_directories(above.collect::<BTreeSet<_>>().len());
        let files = sizes.iter().map(|(_, size)| Growth::of_file(None, *size));
        let growths = files.chain([directories]);
        Ok(self.inner.workspaces.quota().has_room(None, growths).map_err(ChangeError::from)?)
    }

    /// A file that is to be copied, and its size.
    async fn source(
        &self,
        tenant: &str,
        number: usize,
        copy: &FileCopy,
    ) -> Result<(std::fs::File, u64), UploadError> {
        let files = self.files_of(tenant, &copy.owner).await.map_err(|error| match error {
            FilesError::Missing(what) => copy.missing(number, what),
            other => UploadError::Files(other),
        })?;
        let file = files.source(copy.source.clone()).await?;
        let (file, size) = file.ok_or_else(|| copy.missing(number, "file"))?;
        let max = self.max_file();
        if size > max {
            return Err(ChangeError::from(OverQuota::File(size, max)).into());
        }
        Ok((file, size))
    }

    async fn copied(
        &self,
        tenant: &str,
        number: usize,
        copy: &FileCopy,
    ) -> Result<Upload, UploadError> {
        let (source, _) = self.source(tenant, number, copy).await?;
        let (staged, file) = self.stage_file(tenant).await?;
        let max = self.max_file();
        let place = READS.acquire().await;
        let copied = tokio::task::spawn_blocking(move || {
            let _place = place;
            copied(&source, &file.into_std(), max)
        });
        let (size, etag) = copied.await.map_err(io::Error::other)??;
        Ok(Upload { path: copy.path.clone(), staged, size, etag })
    }
}

impl Files {
    /// Opens a file for copying; `None` if the caller cannot see it.
    async fn source(&self, path: String) -> io::Result<Option<(std::fs::File, u64)>> {
        self.blocking(move |files| {
            let Some(path) = files.resolved(&path) else { return Ok(None) };
            let file = match files.workspace.open_file(&path) {
                Err(e) if is_absent(&e) => return Ok(None),
                opened => opened?,
            };
            let metadata = file.metadata()?;
            Ok(metadata.is_file().then(|| (file.into_std(), metadata.len())))
        })
        .await
    }

    /// Puts all files in their places.
    async fn put_all(&self, given: Vec<Given>) -> Result<Vec<Placed>, UploadError> {
        let paths = |placed: &Vec<Placed>| placed.iter().map(|it| it.path.clone()).collect();
        self.changing(paths, UploadError::is_refusal, move |files| {
            let asked = asked(&given);
            let targets = targets(&asked, |path| files.resolved(path))?;
            let (mut new, mut placed) = (Vec::new(), Vec::new());
            for (Given { upload, from, .. }, (path, size)) in given.into_iter().zip(targets.clone())
            {
                let Upload { staged, etag, .. } = upload;
                placed.push(Placed { path: path.clone(), etag, from });
                new.push(NewFile { path, staged, size });
            }
            let done = files.stored.place(&files.workspace, &new, None);
            done.map_err(|error| UploadError::of_change(error, &asked, &targets))?;
            Ok(placed)
        })
        .await
    }
}

fn asked(given: &[Given]) -> Vec<RequestedFile> {
    let asked = given
        .iter()
        .map(|Given { pointer, upload, .. }| (pointer.clone(), upload.path.clone(), upload.size));
    asked.collect()
}

/// The resolved paths of files, and their sizes.
fn targets(
    asked: &[RequestedFile],
    resolved: impl Fn(&str) -> Option<String>,
) -> Result<Vec<(String, u64)>, UploadError> {
    let mut targets: Vec<(String, u64)> = Vec::new();
    for (pointer, asked, size) in asked.iter().cloned() {
        let Some(path) = resolved(&asked) else {
            return Err(UploadError::Path { pointer, path: asked });
        };
        if targets.iter().any(|(other, _)| *other == path) {
            return Err(UploadError::Twice { pointer, path: asked });
        }
        let holds = |dir: &str, file: &str| {
            file.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
        };
        if targets.iter().any(|(other, _)| holds(other, &path) || holds(&path, other)) {
            return Err(UploadError::Path { pointer, path: asked });
        }
        targets.push((path, size));
    }
    Ok(targets)
}

/// The path of a file in a workspace that does not exist yet.
fn unmade(agent: &LoadedAgent, directory: &str, asked: &str) -> Option<String> {
    let path = normalise(asked).ok()?;
    let is_file = path != "." && !asked.ends_with('/');
    let is_staged = Staged::is_name(path.rsplit('/').next()?);
    let directory = normalise(directory).ok()?;
    (is_file && !is_staged && agent.executor.may_reach(&directory, &path)).then_some(path)
}

/// The bytes of a copy, and the quoted SHA-256 of its content.
fn copied(
    mut source: &std::fs::File,
    mut file: &std::fs::File,
    max: u64,
) -> Result<(u64, String), ChangeError> {
    let (mut hash, mut size, mut chunk) = (Sha256::new(), 0, vec![0; CHUNK]);
    loop {
        let read = source.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        size += read as u64;
        // It may have grown since it was opened.
        if size > max {
            return Err(OverQuota::File(size, max).into());
        }
        hash.update(&chunk[..read]);
        file.write_all(&chunk[..read])?;
    }
    file.sync_data()?;
    Ok((size, format!("\"{}\"", hex::encode(hash.finalize()))))
}
