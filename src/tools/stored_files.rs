//! Files of a workspace as callers reach them: listed, read, put and deleted, each with an entity
//! tag, which is the hash of its content.
//!
//! A path is resolved like that of a tool ([`Workspace`]) and opened without following a link. A file is
//! moved into its place in one step. Which paths a caller may access is decided elsewhere, and so is the
//! serialisation of changes. Everything here blocks.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use cap_fs_ext::DirExt as _;
use cap_std::fs::{Dir, File, Metadata, MetadataExt as _};
use parking_lot::Mutex;

use super::file_content::{Content, Version, modified, strong_tag};
use super::file_locks::FileLock;
use super::file_store::NotStored;
use super::quota::{Growth, OverQuota};
use super::staged_file::StagedFile;
use super::workspace::{
    DestinationPath, Kind, MAX_PATH, ParentDirectories, ParentDirectory, directories_of, is_absent,
};
use super::{Workspace, own_writes};

/// Files and directories that are looked at for one page of a list.
const MAX_WALKED: usize = 200_000;
/// Bytes that are hashed for one page of a list.
const MAX_HASHED: u64 = 256 << 20;
/// Bytes of a file that is hashed: a larger one has a weak tag, of its size, times and place.
pub const MAX_HASHED_FILE: u64 = 64 << 20;
/// Hashes that are kept.
const KEPT: usize = 20_000;
/// How often a file is looked at again that became shorter while it was hashed.
const TRIES: usize = 5;

/// The hashes of files that were read lately; one for the service.
#[derive(Debug, Default)]
pub struct StoredFiles {
    hashes: Mutex<HashMap<Version, Arc<str>>>,
}

/// A file in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedFile {
    pub path: String,
    pub size: u64,
    pub modified: SystemTime,
    /// The quoted SHA-256 of its content; `None` where it cannot be read, or is large.
    pub etag: Option<Arc<str>>,
}

/// A file that is open for reading.
#[derive(Debug)]
pub struct OpenedFile {
    file: std::fs::File,
    /// Its version where another content would show.
    settled: Option<Version>,
    /// Its resolved path.
    pub path: String,
    pub size: u64,
    pub modified: SystemTime,
    /// The quoted SHA-256 of its content; a weak tag where it is large.
    pub etag: Arc<str>,
}

impl OpenedFile {
    /// A part of the content that the tag belongs to.
    pub fn content(self, start: u64, length: u64) -> Content {
        Content::new(self.file, (self.size, self.etag), self.settled, (start, length))
    }
}

/// The precondition of a request that changes a file. It is evaluated with the entity tag of the existing
/// file, or `None` if there is no file.
pub type Condition = Box<dyn Fn(Option<&str>) -> bool + Send>;

/// A complete file that will be moved to a path.
#[derive(Debug)]
pub struct NewFile {
    /// The resolved path.
    pub path: String,
    pub staged: StagedFile,
    pub size: u64,
}

/// How a file was moved to its path. If it replaced another file, the staged file is now the replaced one.
#[derive(Debug)]
pub struct Placement {
    pub is_new: bool,
    /// Its version at its path; `None` if it disappeared at once.
    version: Option<Version>,
}

/// Why files are not listed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    #[error(
        "there are more than {MAX_WALKED} files and directories under `prefix`; a longer `prefix` may \
         match fewer"
    )]
    TooMany,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a file is not changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error("there is no such file")]
    NotFound,
    #[error("the file does not match If-Match or If-None-Match")]
    Condition,
    #[error(transparent)]
    Quota(#[from] OverQuota),
    /// Something else is at the path.
    #[error("{0:?} {1}")]
    InTheWay(String, &'static str),
    #[error(transparent)]
    NotStored(#[from] NotStored),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl ChangeError {
    /// Whether a change of one file was refused, so that the file is as it was.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::NotFound | Self::Condition | Self::Quota(_) | Self::InTheWay(..) => true,
            Self::NotStored(_) | Self::Io(_) => false,
        }
    }
}

impl StoredFiles {
    /// Files whose paths begin with `prefix` and come after another one, sorted by path.
    ///
    /// # Errors
    /// [`ListError`].
    pub fn list(
        &self,
        workspace: &Workspace,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        may_see: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedFile>, ListError> {
        let mut paths = paths(workspace, prefix, MAX_WALKED)?;
        paths.retain(|path| after.is_none_or(|after| path.as_str() > after) && may_see(path));
        paths.sort_unstable();
        let mut hashed = 0;
        let listed = paths.into_iter().filter_map(|path| {
            let file = workspace.open_file(&path).ok()?;
            let metadata = file.metadata().ok().filter(Metadata::is_file)?;
            let modified = modified(&metadata).ok()?;
            let is_hashed = metadata.len() <= MAX_HASHED_FILE;
            let etag = self.known(&metadata).or_else(|| {
                hashed += if is_hashed { metadata.len() } else { 0 };
                (is_hashed && hashed <= MAX_HASHED)
                    .then(|| self.etag(&file.into_std(), &metadata).ok())?
            });
            Some(ListedFile { path, size: metadata.len(), modified, etag })
        });
        Ok(listed.take(limit).collect())
    }

    /// The resolved path of a request; `None` if no file can exist at it.
    pub fn resolved(workspace: &Workspace, path: &str) -> Option<String> {
        let resolved = workspace.resolve(path).ok()?;
        let may_be_file = matches!(resolved.kind, Some(Kind::File) | None);
        let is_staged = StagedFile::is_name(resolved.path.rsplit('/').next()?);
        let is_file = may_be_file && resolved.path != "." && !is_staged && !path.ends_with('/');
        is_file.then_some(resolved.path)
    }

    /// A file by its resolved path.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(&self, workspace: &Workspace, path: String) -> io::Result<OpenedFile> {
        let file = workspace.open_file(&path)?.into_std();
        let mut tries = 0;
        let (metadata, etag) = loop {
            let metadata = Metadata::from_file(&file)?;
            if !metadata.is_file() {
                return Err(io::ErrorKind::NotFound.into());
            }
            tries += 1;
            match self.etag(&file, &metadata) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && tries < TRIES => {}
                etag => break (metadata, etag?),
            }
        };
        let (size, modified) = (metadata.len(), modified(&metadata)?);
        Ok(OpenedFile { settled: Version::settled(&metadata)?, file, path, size, modified, etag })
    }

    /// Puts files in their places, all or none of them.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn place(
        &self,
        workspace: &Workspace,
        files: &[NewFile],
        condition: Option<&Condition>,
    ) -> Result<Vec<Placement>, ChangeError> {
        let there = files.iter().map(|file| current(workspace, &file.path));
        let there = there.collect::<Result<Vec<_>, _>>()?;
        for before in &there {
            self.check(before.as_ref(), condition)?;
        }
        let pairs = || files.iter().zip(&there);
        let destinations = files.iter().map(|file| destination_of(workspace, &file.path));
        let destinations = destinations.collect::<Result<Vec<_>, ChangeError>>()?;
        let directories: BTreeSet<&str> =
            destinations.iter().flat_map(DestinationPath::missing).collect();
        let grown = pairs().map(|(file, before)| {
            Growth::of_file(before.as_ref().map(|(metadata, _)| metadata.len()), file.size)
        });
        let grown = grown.chain([Growth::of_directories(directories.len())]);
        let _room = workspace.admit_all(grown)?;
        let mut places = ParentDirectories::default();
        for destination in destinations {
            let path = destination.path();
            places.add(destination.make().map_err(|error| blocked(error, path))?);
        }
        let mut placements = Vec::with_capacity(files.len());
        for ((file, before), place) in pairs().zip(places.iter()) {
            match put(workspace, (file, place), before.as_ref(), condition) {
                Ok(placement) => placements.push(placement),
                Err(error) => {
                    for (file, placement) in files.iter().zip(&placements) {
                        undo(workspace, file, placement);
                    }
                    return Err(error);
                }
            }
        }
        places.keep();
        Ok(placements)
    }

    /// Undoes placements whose files have not changed since, and restores what they replaced. Returns the paths that
    /// were changed.
    pub fn take_back(workspace: &Workspace, placed: &[(NewFile, Placement)]) -> Vec<String> {
        let mut changed = Vec::new();
        for (file, placement) in placed {
            if undo(workspace, file, placement) {
                changed.push(file.path.clone());
                if placement.is_new {
                    changed.extend(remove_emptied(workspace, &file.path));
                }
            }
        }
        changed
    }

    /// Whether files of these sizes could be put at these resolved paths.
    ///
    /// # Errors
    /// [`ChangeError`], why not.
    pub fn could_place(workspace: &Workspace, files: &[(String, u64)]) -> Result<(), ChangeError> {
        let mut missing = BTreeSet::new();
        let mut growths = Vec::with_capacity(files.len() + 1);
        for (path, size) in files {
            let before = current(workspace, path)?.map(|(metadata, _)| metadata.len());
            growths.push(Growth::of_file(before, *size));
            missing.extend(destination_of(workspace, path)?.missing());
        }
        growths.push(Growth::of_directories(missing.len()));
        Ok(workspace.has_room(growths)?)
    }

    /// Whether a file at a resolved path could be put with this size, or deleted if that is `None`.
    ///
    /// # Errors
    /// [`ChangeError`], why not.
    pub fn could_change(
        &self,
        workspace: &Workspace,
        path: &str,
        size: Option<u64>,
        condition: Option<&Condition>,
    ) -> Result<(), ChangeError> {
        let before = current(workspace, path)?;
        if before.is_none() && size.is_none() {
            return Err(ChangeError::NotFound);
        }
        self.check(before.as_ref(), condition)?;
        let put = size.map(|size| (path.to_owned(), size));
        put.map_or(Ok(()), |put| Self::could_place(workspace, &[put]))
    }

    /// Deletes a file, and the directories above it that are empty then; what was deleted.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn delete(
        &self,
        workspace: &Workspace,
        path: &str,
        condition: Option<&Condition>,
    ) -> Result<Vec<String>, ChangeError> {
        let before = current(workspace, path)?.ok_or(ChangeError::NotFound)?;
        self.check(Some(&before), condition)?;
        let (dir, name) = workspace.holder(path)?;
        let lock = locked(workspace, (&dir, name), Some(&before), condition)?;
        dir.remove_file(name)?;
        drop(lock);
        workspace.freed(before.0.len());
        let mut deleted = vec![path.to_owned()];
        deleted.extend(remove_emptied(workspace, path));
        Ok(deleted)
    }

    fn check(
        &self,
        before: Option<&(Metadata, File)>,
        condition: Option<&Condition>,
    ) -> Result<(), ChangeError> {
        let Some(holds) = condition else { return Ok(()) };
        let etag = match before {
            Some((metadata, file)) => Some(self.etag(&file.try_clone()?.into_std(), metadata)?),
            None => None,
        };
        if holds(etag.as_deref()) { Ok(()) } else { Err(ChangeError::Condition) }
    }

    fn known(&self, metadata: &Metadata) -> Option<Arc<str>> {
        self.hashes.lock().get(&Version::of(metadata)).cloned()
    }

    /// The entity tag of the content that a file had when it was looked up.
    fn etag(&self, file: &std::fs::File, metadata: &Metadata) -> io::Result<Arc<str>> {
        if let Some(known) = self.known(metadata) {
            return Ok(known);
        }
        if metadata.len() > MAX_HASHED_FILE {
            return Ok(Version::of(metadata).weak_tag());
        }
        let etag = strong_tag(file, metadata.len())?;
        if let Some(version) = Version::settled(metadata)? {
            let mut hashes = self.hashes.lock();
            if hashes.len() >= KEPT {
                hashes.clear();
            }
            hashes.insert(version, Arc::clone(&etag));
        }
        Ok(etag)
    }
}

/// The paths of files that begin with a prefix; an error if more than the maximum of entries is inspected.
fn paths(workspace: &Workspace, prefix: &str, most: usize) -> Result<Vec<String>, ListError> {
    let mut paths = Vec::new();
    // A directory is opened when its turn comes, so that few are open at the same time.
    let mut waiting: Vec<(Arc<Dir>, Option<String>, String)> =
        vec![(workspace.root(), None, String::new())];
    let mut walked = 0;
    while let Some((parent, name, above)) = waiting.pop() {
        let opened = match name {
            Some(name) => parent.open_dir_nofollow(name).map(Arc::new),
            None => Ok(parent),
        };
        // Files that disappear in the meantime are not listed.
        let Ok(dir) = opened else { continue };
        let Ok(entries) = dir.entries() else { continue };
        for entry in entries.filter_map(io::Result::ok) {
            walked += 1;
            if walked > most {
                return Err(ListError::TooMany);
            }
            // A name that is not text cannot be requested either.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{above}{name}");
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                if path.len() < MAX_PATH && leads_to(&path, prefix) {
                    waiting.push((Arc::clone(&dir), Some(name), format!("{path}/")));
                }
            } else if kind.is_file() && path.starts_with(prefix) && !StagedFile::is_name(&name) {
                paths.push(path);
            }
        }
    }
    Ok(paths)
}

fn destination_of<'p>(
    workspace: &Workspace,
    path: &'p str,
) -> Result<DestinationPath<'p>, ChangeError> {
    workspace.destination(path).map_err(|error| blocked(error, path))
}

/// Locks a file, and checks that it is still the one for which the condition was evaluated. That file is
/// held open, so that its inode cannot be reused for another file.
fn locked(
    workspace: &Workspace,
    (dir, name): (&Dir, &str),
    before: Option<&(Metadata, File)>,
    condition: Option<&Condition>,
) -> Result<FileLock, ChangeError> {
    let lock = workspace.lock(&[(dir, name)])?;
    let is_same = || {
        let now = dir.symlink_metadata(name).ok();
        now.as_ref().map(Version::of) == before.map(|(metadata, _)| Version::of(metadata))
    };
    if condition.is_none() || is_same() { Ok(lock) } else { Err(ChangeError::Condition) }
}

/// Puts a file in its place.
fn put(
    workspace: &Workspace,
    (file, place): (&NewFile, &ParentDirectory<'_>),
    before: Option<&(Metadata, File)>,
    condition: Option<&Condition>,
) -> Result<Placement, ChangeError> {
    let (dir, name): (&Dir, &str) = (place.dir(), place.name());
    let (is_new, _lock) = if let Some((metadata, _)) = before {
        file.staged.inherit(metadata)?;
        let lock = locked(workspace, (dir, name), before, condition)?;
        (!replace(file, dir, name)?, lock)
    } else {
        let lock = workspace.lock(&[(dir, name)])?;
        (place_new(workspace, file, place, condition.is_some())?, lock)
    };
    let version = dir.symlink_metadata(name).ok().map(|now| Version::of(&now));
    Ok(Placement { is_new, version })
}

/// Undoes a placement, unless its file has changed since; returns whether it was undone.
fn undo(workspace: &Workspace, file: &NewFile, placement: &Placement) -> bool {
    let undone = || -> io::Result<bool> {
        let (dir, name) = workspace.holder(&file.path)?;
        let _lock = workspace.lock(&[(&*dir, name)])?;
        let now = dir.symlink_metadata(name)?;
        if placement.version != Some(Version::of(&now)) {
            return Ok(false);
        }
        own_writes::note(&dir, name);
        if placement.is_new {
            file.staged.take_back(&dir, name)?;
            workspace.freed(now.len());
        } else {
            file.staged.exchange(&dir, name)?;
        }
        Ok(true)
    };
    undone().unwrap_or_else(|error| {
        if !is_absent(&error) {
            tracing::warn!(%error, "a file of a refused request is left in its workspace");
        }
        false
    })
}

/// Puts a file at a path without one; returns whether it is new. A run or a program may have created one in the meantime.
fn place_new(
    workspace: &Workspace,
    file: &NewFile,
    place: &ParentDirectory<'_>,
    is_conditional: bool,
) -> Result<bool, ChangeError> {
    match file.staged.place(place.dir(), place.name()) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_conditional => {
            Err(ChangeError::Condition)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if let Some((metadata, _)) = current(workspace, &file.path)? {
                file.staged.inherit(&metadata)?;
            }
            Ok(!replace(file, place.dir(), place.name())?)
        }
        placed => Ok(placed.map(|()| true)?),
    }
}

/// Replaces another file; returns whether that was still there.
fn replace(file: &NewFile, dir: &Dir, name: &str) -> Result<bool, ChangeError> {
    match file.staged.exchange(dir, name) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(file.staged.place(dir, name).map(|()| false)?)
        }
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => Err(is_directory(&file.path)),
        Err(error) => Err(error.into()),
    }
}

/// Why a path cannot be reached.
fn blocked(error: io::Error, path: &str) -> ChangeError {
    match error.kind() {
        io::ErrorKind::NotADirectory => through_file(path),
        _ => error.into(),
    }
}

fn is_directory(path: &str) -> ChangeError {
    ChangeError::InTheWay(path.to_owned(), "is a directory")
}

/// Removes the empty directories above a deleted file; returns their paths.
fn remove_emptied(workspace: &Workspace, path: &str) -> Vec<String> {
    let mut removed = Vec::new();
    let above: Vec<&str> = directories_of(path).collect();
    for directory in above.into_iter().rev() {
        let Ok((dir, name)) = workspace.holder(directory) else { break };
        own_writes::note(&dir, name);
        if dir.remove_dir(name).is_err() {
            break; // something is in it, and so in those above it
        }
        workspace.freed(0);
        removed.push(directory.to_owned());
    }
    removed
}

/// The existing file.
fn current(workspace: &Workspace, path: &str) -> Result<Option<(Metadata, File)>, ChangeError> {
    let in_the_way = |what| Err(ChangeError::InTheWay(path.to_owned(), what));
    let file = match workspace.open_file(path) {
        Ok(file) => file,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound => Ok(None),
                io::ErrorKind::NotADirectory => Err(through_file(path)),
                _ => Err(error.into()),
            };
        }
    };
    let metadata = file.metadata()?;
    match Kind::of(&metadata) {
        Kind::File if metadata.nlink() > 1 => in_the_way("has more than one hard link"),
        Kind::File => Ok(Some((metadata, file))),
        Kind::Directory => Err(is_directory(path)),
        Kind::Link | Kind::Special => Err(ChangeError::NotFound),
    }
}

fn through_file(path: &str) -> ChangeError {
    ChangeError::InTheWay(path.to_owned(), "leads through a file")
}

/// Whether a path below a directory can begin with the prefix.
fn leads_to(directory: &str, prefix: &str) -> bool {
    directory.starts_with(prefix)
        || prefix.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
#[path = "stored_files_tests.rs"]
mod tests;
