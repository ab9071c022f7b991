//! The directory that a run's files lie beneath, and the only way from a path to a file.
//!
//! Paths are relative text with `/`. [`Workspace::resolve`] turns what a model wrote into the path
//! that it really names, symbolic links followed, so that rules judge the real thing. What is
//! judged is then opened component by component without following any link ([`Workspace::holder`]):
//! a link that is swapped in between is refused and never followed. Everything goes through
//! `cap-std` directory handles, so even a wrong path cannot leave the workspace.
//!
//! It does not decide what may be read or written, and knows no operation.

mod bin;
mod destination_path;

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

use cap_fs_ext::{DirExt, FollowSymlinks, OpenOptionsFollowExt, OpenOptionsSyncExt};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, Metadata, OpenOptions};

use uuid::Uuid;

use super::file_locks::{FileLock, FileLocks};
use super::file_store::{ChangeInProgress, ChangedPaths, FileStore, NotStored};
use super::quarantine::Quarantine;
use super::quota::{Admitted, Growth, OverQuota, Quota};
pub use bin::Aside;
pub use destination_path::{DestinationPath, ParentDirectories, ParentDirectory, directories_of};

/// Bytes of a path.
pub const MAX_PATH: usize = 4096;
/// Bytes of one name in a path; file systems have this limit.
const MAX_NAME: usize = 255;
/// The file that a probe writes; no tenant can have its name.
const PROBE: &str = ".probe";
/// Links followed for one path, as many as Linux follows.
const MAX_LINKS: usize = 40;

/// A directory of one tenant. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Workspace {
    root: Arc<Dir>,
    /// Its path relative to the tenant's directory, links resolved; `.` for that directory itself.
    directory: Arc<str>,
    quota: Arc<Quota>,
    quarantine: Quarantine,
    locks: FileLocks,
    /// The durable store of its files, if that is not the directory.
    store: Option<Arc<dyn FileStore>>,
}

/// Why a workspace could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// The tenant or the directory is not a plain relative path.
    #[error("the workspace directory {0:?} must be a relative path without `..`")]
    InvalidDirectory(String),
    /// Its directory is not the volume that the other replicas use.
    #[error("the workspace is not the one that the replicas share")]
    NotShared,
    /// Its files cannot be copied from the durable store.
    #[error(transparent)]
    NotStored(#[from] NotStored),
    /// The directory cannot be made or opened.
    #[error("the workspace {path:?} cannot be opened: {source}")]
    Io {
        /// Beneath the root of all workspaces.
        path: String,
        /// Why.
        source: io::Error,
    },
}

/// Why a path names nothing that a tool may touch.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("the path {0:?} is absolute; give a path relative to the workspace")]
    Absolute(String),
    #[error("the path {0:?} leaves the workspace")]
    Leaves(String),
    #[error("the path has the control character {0:?}")]
    ControlCharacter(char),
    #[error("the path is {0} bytes long; at most {MAX_PATH} are possible")]
    TooLong(usize),
    #[error("the path has a name of {0} bytes; at most {MAX_NAME} are possible")]
    NameTooLong(usize),
    #[error("{0:?} is a symbolic link that leaves the workspace")]
    LinkLeaves(String),
    #[error("{0:?} goes through more than {MAX_LINKS} symbolic links")]
    LinkLoop(String),
    #[error("{path:?} cannot be looked up: {reason}")]
    Unreadable { path: String, reason: String },
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link that was not followed.
    Link,
    /// A device, FIFO or socket.
    Special,
}

impl Kind {
    /// The kind of what was looked at.
    pub fn of(metadata: &Metadata) -> Self {
        if metadata.is_file() {
            Self::File
        } else if metadata.is_dir() {
            Self::Directory
        } else if metadata.is_symlink() {
            Self::Link
        } else {
            Self::Special
        }
    }
}

/// A path as it really is: no symbolic link in it, `.` for the workspace itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// Relative to the workspace, normalised.
    pub path: String,
    /// What is there; `None` where there is nothing yet.
    pub kind: Option<Kind>,
}

impl Workspace {
    /// Opens `root/tenant/directory`, made where it is missing. `directory` may be `.`. It has the
    /// default quota.
    ///
    /// # Errors
    /// [`WorkspaceError`]; a symbolic link that leads out of the tenant's directory is one.
    pub fn open(root: &Path, tenant: &str, directory: &str) -> Result<Self, WorkspaceError> {
        let beneath = plain(tenant, directory)?;
        let failed = |source| WorkspaceError::Io { path: format!("{tenant}/{directory}"), source };
        let quarantine = Quarantine::of(root, tenant);
        let open_root = || Dir::open_ambient_dir(root, ambient_authority());
        let root = match open_root() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Dir::create_ambient_dir_all(root, ambient_authority()).and_then(|()| open_root())
            }
            opened => opened,
        };
        let tenant = open_or_make(&root.map_err(failed)?, tenant).map_err(failed)?;
        let (root, quota, locks) = (Arc::new(tenant), Arc::default(), FileLocks::default());
        let tenant = Self { root, directory: ".".into(), quota, quarantine, locks, store: None };
        if beneath == "." {
            return Ok(tenant);
        }
        open_or_make(&tenant.root, &beneath).map_err(failed)?;
        let real = tenant.resolve(&beneath).map_err(|e| failed(io::Error::other(e)))?.path;
        let root = tenant.open_dir(&real).map_err(failed)?;
        Ok(Self { root, directory: real.into(), ..tenant })
    }

    /// The same, of which nothing is made; `None` where it is not there.
    ///
    /// # Errors
    /// [`WorkspaceError`].
    pub fn find(
        root: &Path,
        tenant: &str,
        directory: &str,
    ) -> Result<Option<Self>, WorkspaceError> {
        let beneath = plain(tenant, directory)?;
        let failed = |source| WorkspaceError::Io { path: format!("{tenant}/{directory}"), source };
        let found = Dir::open_ambient_dir(root, ambient_authority())
            .and_then(|root| root.open_dir(tenant))
            .and_then(|tenant| tenant.symlink_metadata(&beneath));
        match found {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
            Ok(_) => Self::open(root, tenant, directory).map(Some),
        }
    }

    /// The same with another quota.
    #[must_use]
    pub fn within(self, quota: &Arc<Quota>) -> Self {
        Self { quota: Arc::clone(quota), ..self }
    }

    /// The same with other locks of its files.
    #[must_use]
    pub fn locked_by(self, locks: &FileLocks) -> Self {
        Self { locks: locks.clone(), ..self }
    }

    /// Whether it is on a volume that replicas share. The volume may hang.
    pub fn is_shared(&self) -> bool {
        self.locks.are_shared()
    }

    /// Locks these names in its directories; waits until no other task holds one of them. Blocks.
    ///
    /// # Errors
    /// It takes too long, or the volume cannot be used.
    pub fn lock(&self, names: &[(&Dir, &str)]) -> io::Result<FileLock> {
        self.locks.lock(names)
    }

    /// The same with a durable store of its files.
    #[must_use]
    pub fn stored_in(self, store: Arc<dyn FileStore>) -> Self {
        Self { store: Some(store), ..self }
    }

    /// The same for a run that this replica owns under an epoch.
    #[must_use]
    pub fn of_run(self, run: Uuid, epoch: i64) -> Self {
        let store = self.store.as_ref().map(|store| store.of_run(run, epoch));
        Self { store, ..self }
    }

    /// The same for a caller. Changes are refused once this run is deleted.
    #[must_use]
    pub fn while_run_exists(self, run: Uuid) -> Self {
        let store = self.store.as_ref().map(|store| store.while_run_exists(run));
        Self { store, ..self }
    }

    /// Copies changes of other replicas into the directory.
    ///
    /// # Errors
    /// [`NotStored`].
    pub async fn refresh(&self) -> Result<(), NotStored> {
        match &self.store {
            Some(store) => store.refresh().await,
            None => Ok(()),
        }
    }

    /// Begins a change of files that must be stored durably; `None` if the directory is the store.
    pub async fn begin_change(&self) -> Option<ChangeInProgress> {
        match &self.store {
            Some(store) => Some(ChangeInProgress::begin(store).await),
            None => None,
        }
    }

    /// Stores changed paths durably; returns those that another replica has changed in the meantime.
    ///
    /// # Errors
    /// [`NotStored`].
    pub async fn save(
        &self,
        paths: impl IntoIterator<Item = String>,
    ) -> Result<Vec<String>, NotStored> {
        match self.begin_change().await {
            Some(change) => {
                let paths = paths.into_iter().collect();
                change.save(ChangedPaths { paths, is_all: true, is_whole: false }).await
            }
            None => Ok(Vec::new()),
        }
    }

    /// Counts what a change adds, if there is room for it. May walk the workspace. What is returned is to be held
    /// until the change is made.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn admit(&self, growth: Growth) -> Result<Option<Admitted>, OverQuota> {
        self.admit_all([growth])
    }

    /// The same for several files, all or none.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn admit_all(
        &self,
        growths: impl IntoIterator<Item = Growth>,
    ) -> Result<Option<Admitted>, OverQuota> {
        self.quota.admit(&self.root, growths)
    }

    /// Whether there is room for changes, without counting them. May walk the workspace.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn has_room(&self, growths: impl IntoIterator<Item = Growth>) -> Result<(), OverQuota> {
        self.quota.has_room(Some(&self.root), growths)
    }

    /// Whether it holds more than it may, programs' files included. Walks it, so it belongs on the
    /// blocking pool.
    pub fn excess(&self) -> Option<OverQuota> {
        self.quota.excess(&self.root)
    }

    /// Bytes, and files and directories, that it may hold.
    pub(super) fn bounds(&self) -> [u64; 2] {
        self.quota.bounds()
    }

    /// Bytes and files that the file system has room for, where it says so.
    pub(super) fn room(&self) -> Option<[u64; 2]> {
        let stats = rustix::fs::fstatvfs(&*self.root).ok()?;
        Some([stats.f_bfree.saturating_mul(stats.f_frsize), stats.f_ffree])
    }

    /// Moves the entry of one of its directories at that path to the quarantine. Returns its new path,
    /// relative to the directory of all workspaces.
    ///
    /// # Errors
    /// Errors of the file system; the entry then stays at its path.
    pub(super) fn put_aside(&self, dir: &Dir, name: &OsStr, path: &str) -> io::Result<String> {
        let beneath = match &*self.directory {
            "." => path.to_owned(),
            directory => format!("{directory}/{path}"),
        };
        let kept = self.quarantine.take(dir, name, &beneath)?;
        if let Some(aside) = self.quarantine.opened() {
            self.quota.forget(&aside);
        }
        Ok(kept)
    }

    /// Whether the quarantine holds as much as a workspace may hold, by a measurement that may be a minute
    /// old. May walk it.
    pub(super) fn quarantine_is_full(&self) -> bool {
        let aside = self.quarantine.opened();
        aside.is_some_and(|aside| self.quota.known_excess(&aside).is_some())
    }

    /// Subtracts a deleted file.
    pub fn freed(&self, bytes: u64) {
        self.quota.freed(&self.root, bytes);
    }

    /// The directory itself.
    pub fn root(&self) -> Arc<Dir> {
        Arc::clone(&self.root)
    }

    /// Its path relative to the tenant's directory, links resolved; `.` for that directory itself.
    pub fn directory(&self) -> Arc<str> {
        Arc::clone(&self.directory)
    }

    /// Whether files can be written beneath a root: found out by writing one.
    ///
    /// # Errors
    /// Why not.
    pub fn probe(root: &Path) -> io::Result<()> {
        let root = Dir::open_ambient_dir(root, ambient_authority())?;
        root.write(PROBE, b"written to find out whether files can be\n")
    }

    /// The real path that a path of a model names; a link in the last place is followed, too.
    ///
    /// # Errors
    /// [`PathError`], before anything is touched.
    pub fn resolve(&self, path: &str) -> Result<Resolved, PathError> {
        let asked = path;
        let mut path = normalise(path)?;
        for _ in 0..MAX_LINKS {
            match self.first_link(&path)? {
                Found::End(kind) => return Ok(Resolved { path, kind }),
                Found::Link(end) => path = self.through_link(&path, end)?,
            }
        }
        Err(PathError::LinkLoop(asked.to_owned()))
    }

    /// As [`Workspace::resolve`], but a link in the last place is named and not followed.
    ///
    /// # Errors
    /// [`PathError`].
    pub fn resolve_entry(&self, path: &str) -> Result<Resolved, PathError> {
        let path = normalise(path)?;
        let (parent, name) = split(&path);
        let parent = self.resolve(parent)?.path;
        let path = if parent == "." { name.to_owned() } else { format!("{parent}/{name}") };
        let kind = self.look(&path)?;
        Ok(Resolved { path, kind })
    }

    /// The directory that holds a resolved path's last name, opened without following a link.
    ///
    /// # Errors
    /// Errors of the file system; `.` has no holder and is invalid input.
    pub fn holder<'p>(&self, path: &'p str) -> io::Result<(Arc<Dir>, &'p str)> {
        let (parent, name) = split(path);
        if name == "." {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "this is the workspace itself",
            ));
        }
        let mut dir = Arc::clone(&self.root);
        for part in parent.split('/').filter(|part| *part != ".") {
            dir = Arc::new(dir.open_dir_nofollow(part)?);
        }
        Ok((dir, name))
    }

    /// The same for a path whose directories may be missing; they are not created yet.
    ///
    /// # Errors
    /// Errors of the file system; `.` has no holder and is invalid input.
    pub fn destination<'p>(&self, path: &'p str) -> io::Result<DestinationPath<'p>> {
        DestinationPath::to(&self.root, path)
    }

    /// A resolved path opened for reading. Never waits (for the other end of a FIFO, say).
    ///
    /// # Errors
    /// Errors of the file system; a link is an error.
    pub fn open_file(&self, path: &str) -> io::Result<File> {
        let (dir, name) = self.holder(path)?;
        open_for_reading(&dir, name)
    }

    /// A resolved path opened as a directory.
    ///
    /// # Errors
    /// Errors of the file system; a link is an error.
    pub fn open_dir(&self, path: &str) -> io::Result<Arc<Dir>> {
        if path == "." {
            return Ok(Arc::clone(&self.root));
        }
        let (dir, name) = self.holder(path)?;
        dir.open_dir_nofollow(name).map(Arc::new)
    }

    /// What is at a path whose directories are resolved.
    fn look(&self, path: &str) -> Result<Option<Kind>, PathError> {
        match self.root.symlink_metadata(path) {
            Ok(metadata) => Ok(Some(Kind::of(&metadata))),
            Err(e) if is_absent(&e) => Ok(None),
            Err(e) => {
                Err(PathError::Unreadable { path: path.to_owned(), reason: e.kind().to_string() })
            }
        }
    }

    /// Walks a normalised path to its end or to the first link on it.
    fn first_link(&self, path: &str) -> Result<Found, PathError> {
        let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
        let mut kind = None;
        for end in ends {
            kind = self.look(&path[..end])?;
            match kind {
                Some(Kind::Link) => return Ok(Found::Link(end)),
                Some(Kind::Directory) => {}
                Some(Kind::File | Kind::Special) if end < path.len() => {
                    return Ok(Found::End(None));
                }
                Some(Kind::File | Kind::Special) | None => return Ok(Found::End(kind)),
            }
        }
        Ok(Found::End(kind))
    }

    /// The path that one leads to by way of the link at `path[..end]`.
    fn through_link(&self, path: &str, end: usize) -> Result<String, PathError> {
        let (link, rest) = path.split_at(end);
        let leaves = || PathError::LinkLeaves(link.to_owned());
        let target = self.root.read_link_contents(link).map_err(|e| PathError::Unreadable {
            path: link.to_owned(),
            reason: e.kind().to_string(),
        })?;
        let target = target.to_str().filter(|t| !t.starts_with('/')).ok_or_else(leaves)?;
        normalise(&format!("{}/{target}{rest}", split(link).0)).map_err(|e| match e {
            PathError::Leaves(_) => leaves(),
            other => other,
        })
    }
}

enum Found {
    End(Option<Kind>),
    /// A link at the path's prefix of this many bytes.
    Link(usize),
}

/// A file of a directory opened for reading, neither through a link nor waiting.
///
/// # Errors
/// Errors of the file system.
pub fn open_for_reading(dir: &Dir, name: &str) -> io::Result<File> {
    dir.open_with(name, OpenOptions::new().read(true).follow(FollowSymlinks::No).nonblock(true))
}

/// Whether there is nothing at the path that was opened.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// A path without empty, `.` and `..` parts; `.` where nothing is left.
///
/// # Errors
/// [`PathError`] where the text cannot be a path beneath the workspace.
pub fn normalise(path: &str) -> Result<String, PathError> {
    if path.len() > MAX_PATH {
        return Err(PathError::TooLong(path.len()));
    }
    if let Some(control) = path.chars().find(|c| c.is_control()) {
        return Err(PathError::ControlCharacter(control));
    }
    if path.starts_with('/') {
        return Err(PathError::Absolute(path.to_owned()));
    }
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            ".." if parts.pop().is_none() => return Err(PathError::Leaves(path.to_owned())),
            "" | "." | ".." => {}
            name if name.len() > MAX_NAME => return Err(PathError::NameTooLong(name.len())),
            name => parts.push(name),
        }
    }
    Ok(if parts.is_empty() { ".".to_owned() } else { parts.join("/") })
}

/// The normalised path of a workspace's directory.
fn plain(tenant: &str, directory: &str) -> Result<String, WorkspaceError> {
    let invalid = |path: &str| WorkspaceError::InvalidDirectory(path.to_owned());
    if matches!(tenant, "" | "." | "..") || tenant.contains('/') {
        return Err(invalid(tenant));
    }
    if directory.split('/').any(|part| part == "..") {
        return Err(invalid(directory));
    }
    normalise(directory).map_err(|_| invalid(directory))
}

/// Directory and last name of a normalised path.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or((".", path))
}

fn open_or_make(dir: &Dir, path: &str) -> io::Result<Dir> {
    match dir.open_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            dir.create_dir_all(path)?;
            dir.open_dir(path)
        }
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_are_normalised_or_refused() {
        for (path, normal) in [
            ("a", "a"),
            ("a/b", "a/b"),
            ("./a//b/./c/", "a/b/c"),
            ("a/../b", "b"),
            ("a/b/../../c", "c"),
            ("a/..", "."),
            ("", "."),
            (".", "."),
            ("...", "..."),
            ("a.", "a."),
            ("~/a", "~/a"),
        ] {
            assert_eq!(normalise(path).as_deref(), Ok(normal), "{path:?}");
        }
        let long = "a/".repeat(2500);
        let name = "n".repeat(256);
        for (path, error) in [
            ("/", PathError::Absolute("/".into())),
            ("//a", PathError::Absolute("//a".into())),
            ("..", PathError::Leaves("..".into())),
            ("a/../../b", PathError::Leaves("a/../../b".into())),
            ("a\0", PathError::ControlCharacter('\0')),
            ("a\nb", PathError::ControlCharacter('\n')),
            (&long, PathError::TooLong(5000)),
            (&name, PathError::NameTooLong(256)),
        ] {
            assert_eq!(normalise(path), Err(error), "{path:?}");
        }
    }

    proptest! {
        #[test]
        fn a_normalised_path_is_its_own_normal_form_and_goes_only_down(path in "(\\.{0,3}|[a-c]|/|\\PC){0,12}") {
            if let Ok(normal) = normalise(&path) {
                prop_assert_eq!(normalise(&normal), Ok(normal.clone()));
                prop_assert!(normal == "." || normal.split('/').all(|part| !matches!(part, "" | "." | "..")));
            }
        }
    }

    #[test]
    fn a_workspace_is_made_beneath_its_tenant_and_nowhere_else() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("not/there/yet");
        for directory in [".", "", "reports", "a/b/c", "./x/"] {
            Workspace::open(&root, "acme", directory).unwrap();
        }
        assert!(root.join("acme/a/b/c").is_dir());
        assert!(Workspace::find(&root, "acme", "a/b").unwrap().is_some());
        for (tenant, directory) in [("acme", "a/new"), ("new", ".")] {
            assert!(Workspace::find(&root, tenant, directory).unwrap().is_none(), "{directory:?}");
            assert!(!root.join(tenant).join(directory).join(".").exists(), "it is not made");
        }
        for (tenant, directory) in [
            ("", "."),
            (".", "."),
            ("..", "."),
            ("a/b", "."),
            ("acme", ".."),
            ("acme", "a/../.."),
            ("acme", "a/../b"),
            ("acme", "/etc"),
            ("acme", "a\0b"),
        ] {
            let refused = Workspace::open(&root, tenant, directory);
            assert!(
                matches!(refused, Err(WorkspaceError::InvalidDirectory(_))),
                "{tenant:?} {directory:?}"
            );
        }
        std::os::unix::fs::symlink("..", root.join("acme/up")).unwrap();
        std::os::unix::fs::symlink("/", root.join("acme/top")).unwrap();
        std::fs::write(root.join("acme/file"), "").unwrap();
        for directory in ["up", "top", "up/other", "file", "file/x"] {
            let refused = Workspace::open(&root, "acme", directory);
            assert!(matches!(refused, Err(WorkspaceError::Io { .. })), "{directory:?}");
        }
        assert!(!root.join("other").exists());
    }

    #[test]
    fn links_are_followed_when_a_path_is_resolved_and_never_afterwards() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(root.path(), "t", ".").unwrap();
        let at = root.path().join("t");
        std::fs::create_dir_all(at.join("real/deep")).unwrap();
        std::fs::write(at.join("real/deep/file"), "text").unwrap();
        for (link, target) in [
            ("dir", "real"),
            ("real/back", "../real/./deep"),
            ("file", "dir/back/file"),
            ("new", "real/new"),
        ] {
            std::os::unix::fs::symlink(target, at.join(link)).unwrap();
        }
        for (path, resolved, kind) in [
            ("dir/deep/file", "real/deep/file", Some(Kind::File)),
            ("file", "real/deep/file", Some(Kind::File)),
            ("dir/back", "real/deep", Some(Kind::Directory)),
            ("new", "real/new", None),
            ("new/below", "real/new/below", None),
            ("real/deep/file/below", "real/deep/file/below", None),
            (".", ".", Some(Kind::Directory)),
        ] {
            assert_eq!(
                workspace.resolve(path),
                Ok(Resolved { path: resolved.into(), kind }),
                "{path}"
            );
        }
        let entry = workspace.resolve_entry("dir/back").unwrap();
        assert_eq!(entry, Resolved { path: "real/back".into(), kind: Some(Kind::Link) });
        assert!(workspace.open_file("real/deep/file").is_ok());
        for path in ["file", "dir/deep/file", "real/back/file"] {
            assert!(workspace.open_file(path).is_err(), "{path} goes through a link");
        }
        assert!(workspace.open_dir("dir").is_err());
    }
}
