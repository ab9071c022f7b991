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

use cap_std::fs::{Dir, File, Metadata, MetadataExt as _};
use parking_lot::Mutex;

use super::file_content::{Content, Version, strong_tag};
use super::file_locks::FileLock;
use super::keeping::NotKept;
use super::quota::{Growth, OverQuota};
use super::staged::Staged;
use super::workspace::{Kind, Made, MadeAll, Way, directories_of};
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

/// A complete file on its way to a path.
#[derive(Debug)]
pub struct NewFile {
    /// The resolved path.
    pub path: String,
    pub staged: Staged,
    pub size: u64,
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
    NotKept(#[from] NotKept),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl ChangeError {
    /// Whether a change of one file was refused, so that the file is as it was.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::NotFound | Self::Condition | Self::Quota(_) | Self::InTheWay(..) => true,
            Self::NotKept(_) | Self::Io(_) => false,
        }
    }
}

impl StoredFiles {
    /// Files whose paths begin with `prefix` and come after another one, sorted by path.
    ///
    /// # Errors
    /// There are too many files.
    pub fn list(
        &self,
        workspace: &Workspace,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        may_see: &dyn Fn(&str) -> bool,
    ) -> io::Result<Vec<ListedFile>> {
        let mut paths = Vec::new();
        let mut open = vec![(workspace.root(), String::new())];
        let mut walked = 0;
        while let Some((dir, above)) = open.pop() {
            // What goes away in the meantime is not listed.
            let Ok(entries) = dir.entries() else { continue };
            for entry in entries.filter_map(io::Result::ok) {
                walked += 1;
                if walked > MAX_WALKED {
                    return Err(io::Error::other("there are too many files to list"));
                }
                // A name that is not text cannot be requested either.
                let Ok(name) = entry.file_name().into_string() else { continue };
                let path = format!("{above}{name}");
                let Ok(kind) = entry.file_type() else { continue };
                if kind.is_dir() && leads_to(&path, prefix) {
                    if let Ok(below) = entry.open_dir() {
                        open.push((Arc::new(below), format!("{path}/")));
                    }
                } else if kind.is_file()
                    && path.starts_with(prefix)
                    && !Staged::is_name(&name)
                    && after.is_none_or(|after| path.as_str() > after)
                    && may_see(&path)
                {
                    paths.push(path);
                }
            }
        }
        paths.sort_unstable();
        let mut hashed = 0;
        let listed = paths.into_iter().filter_map(|path| {
            let file = workspace.open_file(&path).ok()?;
            let metadata = file.metadata().ok().filter(Metadata::is_file)?;
            let modified = metadata.modified().ok()?.into_std();
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
        let is_staged = Staged::is_name(resolved.path.rsplit('/').next()?);
        let is_file = may_be_file && resolved.path != "." && !is_staged && !path.ends_with('/');
        is_file.then_some(resolved.path)
    }

    /// A file by its resolved path.
    ///
    /// # Errors
    /// What the system says.
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
        let (size, modified) = (metadata.len(), metadata.modified()?.into_std());
        Ok(OpenedFile { settled: Version::settled(&metadata)?, file, path, size, modified, etag })
    }

    /// Puts files in their places, all or none of them; whether each is new.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn place(
        &self,
        workspace: &Workspace,
        files: &[NewFile],
        condition: Option<&Condition>,
    ) -> Result<Vec<bool>, ChangeError> {
        let there = files.iter().map(|file| current(workspace, &file.path));
        let there = there.collect::<Result<Vec<_>, _>>()?;
        for before in &there {
            self.check(before.as_ref(), condition)?;
        }
        let pairs = || files.iter().zip(&there);
        let ways = files.iter().map(|file| way_to(workspace, &file.path));
        let ways = ways.collect::<Result<Vec<_>, ChangeError>>()?;
        let directories: BTreeSet<&str> = ways.iter().flat_map(Way::missing).collect();
        let grown = pairs().map(|(file, before)| {
            Growth::of_file(before.as_ref().map(|(metadata, _)| metadata.len()), file.size)
        });
        workspace.admit_all(grown.chain([Growth::of_directories(directories.len())]))?;
        let mut places = MadeAll::default();
        for way in ways {
            let path = way.path();
            places.add(way.make().map_err(|error| blocked(error, path))?);
        }
        for ((file, before), place) in pairs().zip(places.iter()) {
            let (dir, name) = (place.dir(), place.name());
            if let Some((metadata, _)) = before {
                file.staged.inherit(metadata)?;
                let _lock = locked(workspace, (dir, name), before.as_ref(), condition)?;
                replace(file, dir, name)?;
            } else {
                let _lock = workspace.lock(&[(dir, name)])?;
                place_new(workspace, file, place, condition.is_some())?;
            }
        }
        places.keep();
        Ok(there.iter().map(Option::is_none).collect())
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
            missing.extend(way_to(workspace, path)?.missing());
        }
        growths.push(Growth::of_directories(missing.len()));
        Ok(workspace.has_room(growths)?)
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

    /// The entity tag of what a file had when this was looked up.
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

fn way_to<'p>(workspace: &Workspace, path: &'p str) -> Result<Way<'p>, ChangeError> {
    workspace.way(path).map_err(|error| blocked(error, path))
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

/// Puts a file where there was none. A run or a program may have made one in the meantime.
fn place_new(
    workspace: &Workspace,
    file: &NewFile,
    place: &Made<'_>,
    is_conditional: bool,
) -> Result<(), ChangeError> {
    match file.staged.place(place.dir(), place.name()) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_conditional => {
            Err(ChangeError::Condition)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if let Some((metadata, _)) = current(workspace, &file.path)? {
                file.staged.inherit(&metadata)?;
            }
            replace(file, place.dir(), place.name())
        }
        placed => Ok(placed?),
    }
}

fn replace(file: &NewFile, dir: &Dir, name: &str) -> Result<(), ChangeError> {
    let replaced = file.staged.replace(dir, name);
    replaced.map_err(|error| match error.kind() {
        io::ErrorKind::IsADirectory | io::ErrorKind::DirectoryNotEmpty => is_directory(&file.path),
        _ => error.into(),
    })
}

/// Why there is no way to a path.
fn blocked(error: io::Error, path: &str) -> ChangeError {
    match error.kind() {
        io::ErrorKind::NotADirectory => through_file(path),
        _ => error.into(),
    }
}

fn is_directory(path: &str) -> ChangeError {
    ChangeError::InTheWay(path.to_owned(), "is a directory")
}

/// Removes the directories above a file that is gone which nothing is in any more; their paths.
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

/// The file that is there.
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
