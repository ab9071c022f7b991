//! Downloads the changes of other replicas into the directory of a workspace.
//!
//! A file is complete before it gets its path. Nothing is downloaded while a call changes files here.
//! If the call changes a path that another replica has changed, its change is refused when it is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::directory_locks::ExclusiveLock;
use super::{
    FIRST_PAUSE, Failure, KeptFiles, KnownPath, WorkspaceDir, contains, has_beneath,
    is_path_conflict, known_beneath,
};
use crate::objects::ObjectsError;
use crate::store::{KeptContent, KeptFile, KeptPath};
use crate::tools::Workspace;
use crate::tools::file_store::NotStored;
use crate::tools::layout::{self, Found, Stamp};
use crate::tools::staged_file::StagedFile;
use crate::tools::workspace::directories_of;

/// Files that are downloaded at the same time for one workspace.
const AT_ONCE: usize = 8;

/// How long a download waits for changes in progress.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// A downloaded file that does not have its path yet.
struct Downloaded {
    staged: StagedFile,
    stamp: Stamp,
}

impl WorkspaceDir {
    /// Downloads the changes of other replicas, and undoes changes that were not stored.
    pub(super) async fn refresh(&self) -> Result<(), NotStored> {
        *self.used.lock() = Instant::now();
        let (since, mut pause) = (Instant::now(), FIRST_PAUSE);
        let (mut exclusive, mut is_cleared) = (None, false);
        loop {
            let mut synced = self.synced.lock().await;
            match self.download(&mut synced, exclusive.as_ref()).await {
                Ok(()) => return Ok(()),
                // An unknown file is in the way.
                Err(Failure::Io(error)) if is_path_conflict(&error) && !is_cleared => {
                    tracing::debug!(%error, "workspace files are in the way of a download");
                    is_cleared = true;
                    self.is_tainted.store(true, Ordering::SeqCst);
                }
                Err(Failure::NeedsExclusiveLock) => {
                    let is_complete = synced.is_some();
                    drop(synced); // the changes in progress need the lock
                    exclusive = self.tenant.locks.lock_exclusively(&self.directory, MAX_WAIT).await;
                    if exclusive.is_none() && is_complete {
                        return Ok(());
                    }
                    if exclusive.is_none() {
                        tracing::warn!("the download of workspace files waits for pending changes");
                        return Err(NotStored::Unavailable);
                    }
                }
                Err(failure) if self.kept.may_retry(since, &mut pause, &failure).await => {}
                Err(_) => return Err(NotStored::Unavailable),
            }
        }
    }

    /// One try of [`WorkspaceDir::refresh`].
    pub(super) async fn download(
        &self,
        synced: &mut Option<i64>,
        exclusive: Option<&ExclusiveLock<'_>>,
    ) -> Result<(), Failure> {
        let (kept, tenant) = (&self.kept, &self.tenant);
        if self.is_stale.swap(false, Ordering::SeqCst) {
            *synced = None;
        }
        let version = kept.store.files_version(&tenant.name).await?;
        let is_tainted = self.is_tainted.load(Ordering::SeqCst);
        let outdated: BTreeSet<String> = self.outdated.lock().clone();
        if *synced == Some(version) && outdated.is_empty() && !is_tainted {
            return Ok(());
        }
        if exclusive.is_none() && (is_tainted || !outdated.is_empty()) {
            return Err(Failure::NeedsExclusiveLock);
        }
        let changed = kept.store.files_since(&tenant.name, &self.directory, *synced).await?;
        let mut due: BTreeMap<String, KeptPath> =
            changed.paths.into_iter().map(|path| (path.path.clone(), path)).collect();
        if changed.is_all {
            // Paths that are known here and no longer stored.
            for path in known_beneath(&tenant.known.lock(), &self.directory) {
                due.entry(path).or_insert_with_key(|path| deleted_path(path));
            }
        }
        if !outdated.is_empty() {
            let paths: Vec<String> = outdated.iter().cloned().collect();
            let found = kept.store.files_at(&tenant.name, &paths).await?;
            for path in paths {
                due.insert(path.clone(), deleted_path(&path));
            }
            due.extend(found.into_iter().map(|path| (path.path.clone(), path)));
        }
        let mut undone = BTreeSet::new();
        if is_tainted {
            undone = self.changed_paths().await?;
            let known = tenant.known.lock();
            for path in &undone {
                let as_kept = |path: &String| match known.get(path) {
                    Some(known) => KeptPath {
                        path: path.clone(),
                        version: known.version,
                        content: Some(known.content.clone()),
                    },
                    None => deleted_path(path),
                };
                due.entry(path.clone()).or_insert_with_key(as_kept);
            }
        }
        self.delete_shadowed(&due).await?;
        let forced: BTreeSet<String> = undone.union(&outdated).cloned().collect();
        let has_changed = self.download_all(due, &forced, exclusive).await?;
        if is_tainted {
            self.is_tainted.store(false, Ordering::SeqCst); // the exclusive lock is held
        }
        self.outdated.lock().retain(|path| !outdated.contains(path));
        *synced = Some(changed.version);
        if has_changed {
            let (kept, tenant) = (Arc::clone(kept), tenant.name.clone());
            let directory = self.directory.clone();
            let _ = tokio::task::spawn_blocking(move || kept.remeasure(&tenant, &directory)).await;
        }
        Ok(())
    }

    /// Deletes files whose path leads through another file, which no directory can hold, so that the
    /// others can be downloaded.
    async fn delete_shadowed(&self, due: &BTreeMap<String, KeptPath>) -> Result<(), Failure> {
        let tenant = &self.tenant;
        let shadowed = shadowed(&tenant.known.lock(), due, &self.directory);
        if shadowed.is_empty() {
            return Ok(());
        }
        let deleted = self.kept.store.delete_shadowed_files(&tenant.name, &shadowed).await?;
        for path in deleted {
            tracing::warn!(path, "a workspace file lay beneath another file and was deleted");
        }
        Err(Failure::Outdated("files lay beneath other files".to_owned()))
    }

    /// Paths whose files in the directory differ from the stored ones.
    async fn changed_paths(&self) -> Result<BTreeSet<String>, Failure> {
        let directory = self.kept.directory_of(&self.tenant.name)?;
        let (tenant, beneath) = (Arc::clone(&self.tenant), self.directory.clone());
        let look = move || {
            let there = layout::beneath(&directory, &beneath)?;
            let mut known: BTreeMap<String, KnownPath> = BTreeMap::new();
            {
                let all = tenant.known.lock();
                let paths = known_beneath(&all, &beneath);
                known.extend(paths.into_iter().filter_map(|path| {
                    let known = all.get(&path)?.clone();
                    Some((path, known))
                }));
            }
            let implied: BTreeSet<&str> =
                known.keys().flat_map(|path| directories_of(path)).collect();
            let mut different = BTreeSet::new();
            for path in &there {
                let found = layout::look(&directory, path)?;
                let is_kept = match known.get(path) {
                    Some(known) => known.is_here(&found),
                    None => matches!(found, Found::Directory) && implied.contains(path.as_str()),
                };
                if !is_kept {
                    different.insert(path.clone());
                }
            }
            let there: BTreeSet<&String> = there.iter().collect();
            different.extend(known.keys().filter(|path| !there.contains(path)).cloned());
            Ok::<_, io::Error>(different)
        };
        Ok(tokio::task::spawn_blocking(look).await.map_err(io::Error::other)??)
    }

    /// Downloads paths; forced ones even if they seem up to date. Returns whether anything was changed.
    async fn download_all(
        &self,
        due: BTreeMap<String, KeptPath>,
        forced: &BTreeSet<String>,
        exclusive: Option<&ExclusiveLock<'_>>,
    ) -> Result<bool, Failure> {
        let directory = self.kept.directory_of(&self.tenant.name)?;
        let due: Vec<KeptPath> = {
            let known = self.tenant.known.lock();
            let is_due = |path: &KeptPath| {
                let here = known.get(&path.path);
                forced.contains(&path.path)
                    || match &path.content {
                        Some(_) => here.is_none_or(|here| here.version != path.version),
                        None => here.is_some(),
                    }
            };
            due.into_values().filter(is_due).collect()
        };
        if due.is_empty() {
            return Ok(false);
        }
        if exclusive.is_none() {
            return Err(Failure::NeedsExclusiveLock);
        }
        let downloaded = stream::iter(due).map(|path| {
            let directory = directory.clone();
            async move {
                if !layout::is_path(&path.path) {
                    return Err(Failure::Io(io::Error::other(
                        "the database holds an invalid path",
                    )));
                }
                let file = match &path.content {
                    Some(KeptContent::File(file)) => {
                        Some(self.kept.download_file(directory, file).await?)
                    }
                    _ => None,
                };
                Ok((path, file))
            }
        });
        let mut downloaded: Vec<_> = downloaded.buffer_unordered(AT_ONCE).try_collect().await?;
        // Deletions come first, to make room; directories come before what they contain.
        downloaded.sort_by(|(one, _), (other, _)| {
            let order = |path: &KeptPath| (path.content.is_some(), path.path.clone());
            order(one).cmp(&order(other))
        });
        let (tenant, beneath) = (Arc::clone(&self.tenant), self.directory.clone());
        let place_all = move || {
            let _lock = tenant.placement_lock.lock();
            let mut removed = Vec::new();
            for (path, file) in downloaded {
                let placed = place_downloaded(&directory, &path, file.as_ref())?;
                let mut known = tenant.known.lock();
                if let Some(now) = placed {
                    known.insert(path.path, now);
                } else {
                    known.remove(&path.path);
                    removed.push(path.path);
                }
            }
            let known = tenant.known.lock();
            remove_emptied(&directory, &beneath, &known, &removed);
            Ok::<_, io::Error>(())
        };
        tokio::task::spawn_blocking(place_all).await.map_err(io::Error::other)??;
        Ok(true)
    }
}

impl KeptFiles {
    /// Downloads a content into a file that does not have its path yet.
    async fn download_file(
        &self,
        directory: Workspace,
        kept: &KeptFile,
    ) -> Result<Downloaded, Failure> {
        let _permit = self.transfers.acquire().await;
        let stage = tokio::task::spawn_blocking(move || layout::stage(&directory));
        let (staged, file) = stage.await.map_err(io::Error::other)??;
        let mut hash = Sha256::new();
        let copy = file.try_clone()?;
        let got = self.objects.get(&kept.object, copy, kept.size, |piece| hash.update(piece)).await;
        let size = match got {
            Err(ObjectsError::Missing) => {
                return Err(Failure::Outdated(format!("the object {} is gone", kept.object)));
            }
            got => got?,
        };
        if size != kept.size || hex::encode(hash.finalize()) != kept.hash {
            let message = format!("the object {} is not what was kept", kept.object);
            return Err(ObjectsError::Unavailable(message).into());
        }
        // It is closed: all files are downloaded before the first one is placed, and they may be many.
        let how = (kept.mode, kept.modified_ns);
        let finish = tokio::task::spawn_blocking(move || layout::finish(&file, how));
        let stamp = finish.await.map_err(io::Error::other)??;
        Ok(Downloaded { staged, stamp })
    }

    fn remeasure(&self, tenant: &str, directory: &str) {
        for directory in [directory, "."] {
            if let Ok(Some(workspace)) = Workspace::find(&self.root, tenant, directory) {
                self.quota.forget(&workspace.root());
            }
        }
    }
}

impl KnownPath {
    /// Whether the directory holds this version of the path.
    pub(super) fn is_here(&self, found: &Found) -> bool {
        match (&self.content, found) {
            (KeptContent::File(file), Found::File(found)) => {
                self.stamp == Some(found.stamp) && file.mode == found.mode
            }
            (KeptContent::Directory, Found::Directory) => true,
            (KeptContent::Link(to), Found::Link(target)) => to == target,
            _ => false,
        }
    }
}

/// Removes the empty directories above deleted paths, up to the directory of the workspace. Directories that
/// are stored themselves stay.
fn remove_emptied(
    tenant: &Workspace,
    workspace: &str,
    known: &BTreeMap<String, KnownPath>,
    removed: &[String],
) {
    let above: BTreeSet<&str> = removed.iter().flat_map(|path| directories_of(path)).collect();
    // Inner directories come first.
    for directory in above.into_iter().rev() {
        let is_inside = contains(workspace, directory) && directory != workspace;
        if !is_inside || known.contains_key(directory) || has_beneath(known, directory) {
            continue;
        }
        if let Err(error) = layout::remove_empty(tenant, directory) {
            tracing::warn!(%error, "an emptied directory of a workspace is left");
        }
    }
}

/// The paths of a workspace that lead through a file or a link of it.
fn shadowed(
    known: &BTreeMap<String, KnownPath>,
    due: &BTreeMap<String, KeptPath>,
    workspace: &str,
) -> Vec<String> {
    let is_closed = |path: &str| {
        let content = match due.get(path) {
            Some(due) => due.content.as_ref(),
            None => known.get(path).map(|known| &known.content),
        };
        content.is_some_and(|content| !matches!(content, KeptContent::Directory))
    };
    let downloaded = || due.iter().filter(|(_, due)| due.content.is_some()).map(|(path, _)| path);
    let is_shadowed = |path: &&String| {
        let mut above = directories_of(path).filter(|above| *above != workspace);
        above.any(|above| contains(workspace, above) && is_closed(above))
    };
    let beneath = downloaded()
        .filter(|path| is_closed(path))
        .flat_map(|path| known_beneath(known, path))
        .filter(|path| !due.contains_key(path));
    downloaded().filter(is_shadowed).cloned().chain(beneath).collect()
}

fn deleted_path(path: &str) -> KeptPath {
    KeptPath { path: path.to_owned(), version: 0, content: None }
}

/// Gives a downloaded file its path.
fn place_downloaded(
    directory: &Workspace,
    path: &KeptPath,
    file: Option<&Downloaded>,
) -> io::Result<Option<KnownPath>> {
    let stamp = match (&path.content, file) {
        (None, _) => {
            layout::remove(directory, &path.path)?;
            return Ok(None);
        }
        (Some(KeptContent::File(_)), Some(Downloaded { staged, stamp })) => {
            layout::place(directory, &path.path, staged)?;
            Some(*stamp)
        }
        (Some(KeptContent::File(_)), None) => return Err(io::ErrorKind::NotFound.into()),
        (Some(KeptContent::Directory), _) => {
            layout::place_directory(directory, &path.path)?;
            None
        }
        (Some(KeptContent::Link(target)), _) => {
            layout::place_link(directory, &path.path, target)?;
            None
        }
    };
    let content = path.content.clone();
    Ok(content.map(|content| KnownPath { version: path.version, content, stamp }))
}
