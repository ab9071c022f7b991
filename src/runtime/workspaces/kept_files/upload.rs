//! Stores what a call, or a caller, has changed: contents in the object store first, then their paths in the
//! database, under the fence of the run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use uuid::Uuid;

use super::{
    FIRST_PAUSE, Failure, KeptFiles, KnownPath, WorkspaceDir, Writer, contains, known_beneath,
};
use crate::objects::PART;
use crate::store::writer::crash;
use crate::store::{
    FileWriter, FileWrites, KeptContent, KeptFile, ObjectClaim, Ownership, PathWrite, PathsWritten,
};
use crate::tools::Workspace;
use crate::tools::file_store::{ChangedPaths, NotStored};
use crate::tools::layout::{self, Found, FoundFile, Stamp};

/// Files that are uploaded at the same time for one workspace.
const AT_ONCE: usize = 4;
/// How often a file is read again if it changes while it is read.
const TRIES: usize = 5;

/// A path that may have changed, with the version that its change is based on.
struct ChangedPath {
    path: String,
    base: i64,
}

/// A path that is to be written, with the stamp of its file.
type PreparedWrite = (PathWrite, Option<Stamp>);

/// A path with something that cannot be stored, such as a socket.
struct Unstorable(String);

impl WorkspaceDir {
    /// Stores changes. Returns the paths that other replicas have changed in the meantime, whose changes here
    /// are undone, and the paths that cannot be stored.
    pub(super) async fn store_changes(
        &self,
        by: Writer,
        touched: ChangedPaths,
    ) -> Result<Vec<String>, NotStored> {
        let mut synced = self.synced.lock().await;
        *self.used.lock() = Instant::now();
        let (since, mut pause) = (Instant::now(), FIRST_PAUSE);
        let id = Uuid::new_v4();
        loop {
            match self.try_to_store(&mut synced, by, id, &touched).await {
                Ok(refused) => return Ok(refused),
                Err(Failure::Fenced) => return Err(NotStored::Fenced),
                Err(Failure::Orphaned) => return Err(NotStored::Orphaned),
                Err(failure) if self.kept.may_retry(since, &mut pause, &failure).await => {}
                Err(_) => return Err(NotStored::Unavailable),
            }
        }
    }

    async fn try_to_store(
        &self,
        synced: &mut Option<i64>,
        by: Writer,
        id: Uuid,
        touched: &ChangedPaths,
    ) -> Result<Vec<String>, Failure> {
        let (kept, tenant) = (&self.kept, &self.tenant);
        let directory = kept.directory_of(&tenant.name)?;
        let changed = self.changed(directory.clone(), touched).await?;
        crash::point("before_files");
        let written = stream::iter(changed)
            .map(|changed| kept.upload_content(&tenant.name, &directory, changed));
        let written: Vec<Result<PreparedWrite, Unstorable>> =
            written.buffer_unordered(AT_ONCE).try_collect().await?;
        let mut stamps: BTreeMap<String, Option<Stamp>> = BTreeMap::new();
        let (mut writes, mut unstorable) = (Vec::new(), BTreeSet::new());
        for written in written {
            let (write, stamp) = match written {
                Ok(written) => written,
                Err(Unstorable(path)) => {
                    unstorable.insert(path);
                    continue;
                }
            };
            stamps.insert(write.path.clone(), stamp);
            if !self.is_known(&write, stamp) {
                writes.push(write);
            }
        }
        let above = format!("{}/", self.directory);
        let shown = |path: &String| path.strip_prefix(&above).unwrap_or(path).to_owned();
        let mut refused: Vec<String> = unstorable.iter().map(shown).collect();
        if writes.is_empty() {
            return Ok(refused);
        }
        crash::point("after_contents");
        let by = match by {
            Writer::Run(run, epoch) => {
                FileWriter::Run(run, Ownership { owner: &kept.owner, epoch })
            }
            Writer::Caller(run) => FileWriter::Caller(run),
        };
        let all = FileWrites { id, is_whole: touched.is_whole, paths: &writes };
        let versions_lock = tenant.versions_lock.lock().await;
        let (version, others) = match kept.store.write_files(&tenant.name, by, all).await? {
            PathsWritten::Done { version, changed_by_others } => (version, changed_by_others),
            PathsWritten::Fenced => return Err(Failure::Fenced),
            PathsWritten::Orphaned => return Err(Failure::Orphaned),
            PathsWritten::Lost => {
                return Err(Failure::Outdated("the object is being garbage-collected".to_owned()));
            }
        };
        crash::point("after_files");
        let others: BTreeSet<String> = others.into_iter().collect();
        let mut outdated_here = false;
        {
            let mut known = tenant.known.lock();
            for write in writes {
                if others.contains(&write.path) {
                    // A workspace of this replica that contains this one may have stored it.
                    let here = known.get(&write.path).map_or(0, |known| known.version);
                    outdated_here |= here != write.base;
                    continue;
                }
                let stamp = stamps.remove(&write.path).flatten();
                match write.content {
                    Some(content) => {
                        known.insert(write.path, KnownPath { version, content, stamp })
                    }
                    None => known.remove(&write.path),
                };
            }
        }
        drop(versions_lock);
        if *synced == Some(version - 1) {
            *synced = Some(version);
        }
        if outdated_here {
            return Err(Failure::Outdated("files were kept at the same time".to_owned()));
        }
        if !others.is_empty() {
            refused.extend(others.iter().map(shown));
            // They are downloaded, after the changes in progress, before a change of them can be stored.
            self.outdated.lock().extend(others);
        }
        Ok(refused)
    }

    /// Whether the path is already stored with this content; if so, updates its stamp.
    fn is_known(&self, write: &PathWrite, stamp: Option<Stamp>) -> bool {
        let mut known = self.tenant.known.lock();
        match (known.get_mut(&write.path), &write.content) {
            (Some(known), Some(content)) if known.content.is_same(content) => {
                known.stamp = stamp;
                true
            }
            (None, None) => true,
            _ => false,
        }
    }

    /// The reported paths, and other paths that may have changed.
    async fn changed(
        &self,
        directory: Workspace,
        touched: &ChangedPaths,
    ) -> Result<Vec<ChangedPath>, Failure> {
        let (tenant, scope, touched) =
            (Arc::clone(&self.tenant), self.directory.clone(), touched.clone());
        let look = move || {
            let reported: BTreeSet<String> = touched
                .paths
                .iter()
                .map(|path| layout::joined(&scope, path))
                .filter(|path| layout::is_path(path) && contains(&scope, path))
                .collect();
            let mut paths = reported.clone();
            if !touched.is_all {
                paths.extend(layout::beneath(&directory, &scope)?);
                paths.extend(known_beneath(&tenant.known.lock(), &scope));
            }
            let mut below = BTreeSet::new();
            for path in &paths {
                below.extend(known_beneath(&tenant.known.lock(), path));
                if touched.is_all && matches!(layout::look(&directory, path)?, Found::Directory) {
                    below.extend(layout::beneath(&directory, path)?);
                }
            }
            paths.extend(below);
            let mut changed = Vec::new();
            for path in paths {
                let known = tenant.known.lock().get(&path).cloned();
                // The stamp shows changes that were not reported.
                let is_reported = touched.is_all || reported.contains(&path);
                if !is_reported
                    && let Some(known) = &known
                    && known.is_here(&layout::look(&directory, &path)?)
                {
                    continue;
                }
                let base = known.map_or(0, |known| known.version);
                changed.push(ChangedPath { path, base });
            }
            Ok::<_, io::Error>(changed)
        };
        Ok(tokio::task::spawn_blocking(look).await.map_err(io::Error::other)??)
    }
}

impl KeptFiles {
    /// Uploads the content of a path. Its file is open during the upload.
    async fn upload_content(
        &self,
        tenant: &str,
        directory: &Workspace,
        ChangedPath { path, base }: ChangedPath,
    ) -> Result<Result<PreparedWrite, Unstorable>, Failure> {
        let (looking, looked_at) = (directory.clone(), path.clone());
        let (content, stamp) = match blocking(move || layout::look(&looking, &looked_at)).await? {
            Found::Nothing => (None, None),
            Found::Directory => (Some(KeptContent::Directory), None),
            Found::Link(target) => (Some(KeptContent::Link(target)), None),
            Found::File(found) => {
                let FoundFile { file, stamp, mode, modified_ns, .. } = found;
                let (object, hash, size) = self.put(tenant, Arc::new(file)).await?;
                let file = KeptFile { object, hash, size, mode, modified_ns };
                (Some(KeptContent::File(file)), Some(stamp))
            }
            Found::Other => return Ok(Err(Unstorable(path))),
        };
        Ok(Ok((PathWrite { path, base, content }, stamp)))
    }

    /// Uploads the content of a file, unless the object store has it; returns its object name, hash and size.
    async fn put(&self, tenant: &str, file: Arc<File>) -> Result<(String, String, u64), Failure> {
        let _permit = self.transfers.acquire().await;
        for _ in 0..TRIES {
            let reading = Arc::clone(&file);
            let read = blocking(move || layout::piece(&reading, 0, PART + 1)).await?;
            if read.len() <= PART {
                let hash = hex::encode(Sha256::digest(&read));
                let size = read.len() as u64;
                let object = match self.store.claim_object(tenant, &hash).await? {
                    ObjectClaim::Stored(object) => object,
                    ObjectClaim::New(object) => {
                        self.is_mounted().await?;
                        self.objects.put(&object, Bytes::from(read)).await?;
                        self.confirm_stored(object).await?
                    }
                };
                return Ok((object, hash, size));
            }
            drop(read);
            let reading = Arc::clone(&file);
            let (hash, size) = blocking(move || layout::hashed(&reading, u64::MAX - 1)).await?;
            let object = match self.store.claim_object(tenant, &hash).await? {
                ObjectClaim::Stored(object) => return Ok((object, hash, size)),
                ObjectClaim::New(object) => object,
            };
            if self.put_large(&object, &file, &hash).await? {
                return Ok((self.confirm_stored(object).await?, hash, size));
            }
        }
        Err(Failure::Outdated("the file kept changing while it was read".to_owned()))
    }

    async fn confirm_stored(&self, object: String) -> Result<String, Failure> {
        self.is_mounted().await?;
        if self.store.object_stored(&object).await? {
            Ok(object)
        } else {
            Err(Failure::Outdated("the object was stored too late".to_owned()))
        }
    }

    /// Uploads a file part by part; returns whether its content still had that hash.
    async fn put_large(&self, object: &str, file: &Arc<File>, hash: &str) -> Result<bool, Failure> {
        self.is_mounted().await?;
        let mut parts = self.objects.put_parts(object).await?;
        let (mut hasher, mut at) = (Sha256::new(), 0);
        loop {
            let reading = Arc::clone(file);
            let piece = blocking(move || layout::piece(&reading, at, PART)).await?;
            let is_last = piece.len() < PART;
            if !piece.is_empty() {
                hasher.update(&piece);
                at += piece.len() as u64;
                parts.put(Bytes::from(piece)).await?;
            }
            if is_last {
                break;
            }
        }
        if hex::encode(hasher.finalize()) != hash {
            parts.abort().await;
            return Ok(false);
        }
        parts.complete().await?;
        Ok(true)
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
