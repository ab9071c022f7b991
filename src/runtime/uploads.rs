//! Files that come with an invocation: received with the request, or copied from another workspace
//! of the tenant.
//!
//! They are placed when the run is accepted, all of them or none. A file can be copied if the caller can read
//! it by its owner's route; its content at that moment is copied. A crash between that and the run's first
//! commit leaves files without a run; the repeated request places them again. Files are recorded in the audit log
//! before they are placed, so that the log says of each file who sent it, even after a crash. They are taken back
//! if the request is refused after that, for example because another replica was faster in the same session.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};

use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Runtime;
use super::files::{FileOwner, FileUsers, Files, FilesError, READS};
use super::loaded_agents::LoadedAgent;
use crate::tools::quota::{Growth, OverQuota};
use crate::tools::staged_bytes::TooManyStaged;
use crate::tools::staged_file::StagedFile;
use crate::tools::stored_files::{ChangeError, NewFile, Placement, StoredFiles};
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
    pub staged: StagedFile,
    pub size: u64,
    /// The quoted SHA-256 of its content.
    pub etag: String,
}

/// The files of one invocation.
#[derive(Debug, Default)]
pub struct Uploads {
    waiting: Mutex<PendingFiles>,
    placed: Mutex<Vec<PlacedFile>>,
}

/// A file in its place, which can be taken back.
type PlacedFile = (NewFile, Placement);

/// The files that are not placed yet.
#[derive(Debug, Default)]
struct PendingFiles {
    received: Vec<Upload>,
    copies: Vec<FileCopy>,
}

impl Uploads {
    pub fn new(received: Vec<Upload>, copies: Vec<FileCopy>) -> Self {
        Self { waiting: PendingFiles { received, copies }.into(), placed: Mutex::default() }
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
    TooMany(#[from] TooManyStaged),
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
                let mut pairs = asked.iter().zip(targets);
                match pairs.find(|(_, (target, _))| *target == path) {
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

/// Files of an invocation that are complete, and may be placed.
pub(super) struct ReadyUploads {
    given: Vec<StagedUpload>,
    /// Their resolved paths.
    paths: Vec<String>,
}

impl ReadyUploads {
    /// Their details in the audit log. The run has no row yet.
    pub(super) fn details(&self, agent: &str, session: Option<&str>) -> Vec<Value> {
        let files = self.paths.iter().zip(&self.given);
        let details = files.map(|(path, StagedUpload { upload, from, .. })| {
            let mut details = json!({"path": path, "etag": upload.etag, "agent": agent});
            if let Some(session) = session {
                details["session_id"] = session.into();
            }
            if let Some(from) = from {
                details["from"] = from.clone();
            }
            details
        });
        details.collect()
    }
}

/// A requested file: its pointer, its path as it was written, and its size.
type RequestedFile = (String, String, u64);

/// A complete file on its way to a path.
struct StagedUpload {
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

fn upload_pointer(number: usize) -> String {
    format!("/files/{number}")
}

fn copy_pointer(number: usize) -> String {
    format!("/files/{number}/path")
}

impl Runtime {
    /// The files of an invocation, complete and judged. Changes nothing.
    pub(super) async fn ready_uploads(
        &self,
        tenant: &str,
        loaded: &LoadedAgent,
        directory: &str,
        uploads: &Uploads,
    ) -> Result<ReadyUploads, UploadError> {
        let PendingFiles { received, copies } = std::mem::take(&mut *uploads.waiting.lock());
        let mut given: Vec<StagedUpload> = received
            .into_iter()
            .enumerate()
            .map(|(number, upload)| StagedUpload {
                pointer: upload_pointer(number),
                upload,
                from: None,
            })
            .collect();
        for (number, copy) in copies.iter().enumerate() {
            let upload = self.stage_copy(tenant, number, copy).await?;
            given.push(StagedUpload {
                pointer: copy_pointer(number),
                upload,
                from: Some(copy.origin()),
            });
            self.could_hold(given.iter().map(|file| file.upload.size).sum())?;
        }
        if given.is_empty() {
            return Ok(ReadyUploads { given, paths: Vec::new() });
        }
        let targets = self.judged(tenant, loaded, directory, requested_files(&given)).await?;
        let paths = targets.into_iter().map(|(path, _)| path).collect();
        Ok(ReadyUploads { given, paths })
    }

    /// Puts the files of an invocation into the run's workspace.
    pub(super) async fn place_uploads(
        &self,
        tenant: &str,
        loaded: &LoadedAgent,
        directory: &str,
        uploads: &Uploads,
        ReadyUploads { given, .. }: ReadyUploads,
    ) -> Result<(), UploadError> {
        if given.is_empty() {
            return Ok(());
        }
        let files = self.files_in(tenant, directory, loaded.clone(), FileUsers::default()).await;
        let Ok(Some(files)) = files else {
            return Err(io::Error::other("the workspace cannot be opened").into());
        };
        let placed = files.put_all(given).await?;
        *uploads.placed.lock() = placed;
        Ok(())
    }

    /// Takes the files of a refused request back, where nothing has changed since.
    pub(super) async fn take_back_uploads(
        &self,
        tenant: &str,
        loaded: &LoadedAgent,
        directory: &str,
        uploads: &Uploads,
    ) {
        let placed = std::mem::take(&mut *uploads.placed.lock());
        if placed.is_empty() {
            return;
        }
        let (loaded, users) = (loaded.clone(), FileUsers::default());
        let taken = match self.inner.workspaces.find(tenant, directory).await {
            Ok(Some(workspace)) => {
                let files = self.files_of_workspace(tenant, workspace, loaded, users);
                files.take_back(placed).await
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = taken {
            tracing::warn!(%error, "files of a refused request are left in its workspace");
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
        let PendingFiles { received, copies } = std::mem::take(&mut *uploads.waiting.lock());
        let mut asked: Vec<RequestedFile> = received
            .into_iter()
            .enumerate()
            .map(|(number, Upload { path, size, .. })| (upload_pointer(number), path, size))
            .collect();
        for (number, copy) in copies.into_iter().enumerate() {
            let (_, size) = self.source(tenant, number, &copy).await?;
            asked.push((copy_pointer(number), copy.path, size));
        }
        self.judged(tenant, loaded, directory, asked).await.map(drop)
    }

    /// The resolved paths and sizes of files that could be placed. Changes nothing.
    async fn judged(
        &self,
        tenant: &str,
        loaded: &LoadedAgent,
        directory: &str,
        asked: Vec<RequestedFile>,
    ) -> Result<Vec<(String, u64)>, UploadError> {
        match self.inner.workspaces.find(tenant, directory).await? {
            // Judged before the workspace is made: an empty one would never be removed.
            None => self.judge_for_new_workspace(loaded, directory, &asked),
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
                            .map_err(|error| UploadError::of_change(error, &asked, &sizes))?;
                        Ok(sizes)
                    })
                    .await
            }
        }
    }

    /// Refuses files that are not possible in a workspace that does not exist yet.
    fn judge_for_new_workspace(
        &self,
        loaded: &LoadedAgent,
        directory: &str,
        asked: &[RequestedFile],
    ) -> Result<Vec<(String, u64)>, UploadError> {
        let sizes = targets(asked, |path| resolve_in_new_workspace(loaded, directory, path))?;
        let above = sizes.iter().flat_map(|(path, _)| directories_of(path));
        let directories = Growth::of_directories(above.collect::<BTreeSet<_>>().len());
        let files = sizes.iter().map(|(_, size)| Growth::of_file(None, *size));
        let growths = files.chain([directories]);
        self.inner.workspaces.quota().has_room(None, growths).map_err(ChangeError::from)?;
        Ok(sizes)
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

    async fn stage_copy(
        &self,
        tenant: &str,
        number: usize,
        copy: &FileCopy,
    ) -> Result<Upload, UploadError> {
        let (source, _) = self.source(tenant, number, copy).await?;
        let (mut staged, file) = self.stage_file(tenant).await?;
        let max = self.max_file();
        let permit = READS.acquire().await;
        let copied = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let (size, etag) = copy_content(&source, &file.into_std(), max, &mut staged)?;
            Ok::<_, UploadError>((staged, size, etag))
        });
        let (staged, size, etag) = copied.await.map_err(io::Error::other)??;
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
    async fn put_all(&self, given: Vec<StagedUpload>) -> Result<Vec<PlacedFile>, UploadError> {
        let paths =
            |placed: &Vec<PlacedFile>| placed.iter().map(|(file, _)| file.path.clone()).collect();
        self.changing(paths, UploadError::is_refusal, move |files| {
            let asked = requested_files(&given);
            let targets = targets(&asked, |path| files.resolved(path))?;
            let new: Vec<NewFile> = given
                .into_iter()
                .zip(&targets)
                .map(|(StagedUpload { upload: Upload { staged, size, .. }, .. }, (path, _))| {
                    NewFile { path: path.clone(), staged, size }
                })
                .collect();
            let placements = files
                .stored
                .place(&files.workspace, &new, None)
                .map_err(|error| UploadError::of_change(error, &asked, &targets))?;
            Ok(new.into_iter().zip(placements).collect())
        })
        .await
    }

    /// Takes files back, where nothing has changed since.
    async fn take_back(&self, placed: Vec<PlacedFile>) -> Result<(), ChangeError> {
        let taken = self.changing(Vec::clone, ChangeError::is_refusal, move |files| {
            Ok::<_, ChangeError>(StoredFiles::take_back(&files.workspace, &placed))
        });
        taken.await.map(drop)
    }
}

fn requested_files(given: &[StagedUpload]) -> Vec<RequestedFile> {
    let asked = given.iter().map(|StagedUpload { pointer, upload, .. }| {
        (pointer.clone(), upload.path.clone(), upload.size)
    });
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
fn resolve_in_new_workspace(agent: &LoadedAgent, directory: &str, asked: &str) -> Option<String> {
    let path = normalise(asked).ok()?;
    let is_file = path != "." && !asked.ends_with('/');
    let is_staged = StagedFile::is_name(path.rsplit('/').next()?);
    let directory = normalise(directory).ok()?;
    (is_file && !is_staged && agent.executor.may_reach(&directory, &path)).then_some(path)
}

/// The bytes of a copy, and the quoted SHA-256 of its content.
fn copy_content(
    mut source: &std::fs::File,
    mut file: &std::fs::File,
    max: u64,
    staged: &mut StagedFile,
) -> Result<(u64, String), UploadError> {
    let (mut hash, mut size, mut chunk) = (Sha256::new(), 0, vec![0; CHUNK]);
    loop {
        let read = source.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        size += read as u64;
        // It may have grown since it was opened.
        if size > max {
            return Err(ChangeError::from(OverQuota::File(size, max)).into());
        }
        staged.grow(read as u64)?;
        hash.update(&chunk[..read]);
        file.write_all(&chunk[..read])?;
    }
    file.sync_data()?;
    Ok((size, format!("\"{}\"", hex::encode(hash.finalize()))))
}
