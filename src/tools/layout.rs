//! The local directory of workspaces whose files are stored elsewhere: places and removes copies, and
//! finds what was changed.
//!
//! Paths are relative to the directory of a tenant, and are opened without following a link. Nothing
//! here knows where files are kept. Everything blocks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, Metadata, MetadataExt, Permissions, PermissionsExt};
use rustix::fs::{Timespec, Timestamps, futimens};
use sha2::{Digest, Sha256};

use super::sandbox::walk::{WalkEntry, WalkLimit, walk};
use super::staged_file::StagedFile;
use super::workspace::{Kind, is_absent, normalise};
use super::{Workspace, own_writes, removal};

/// The file that marks a directory as one of copies; the process that uses the directory locks it. No
/// tenant can have its name.
const MARKER: &str = ".copies";
/// Entries of a directory that are looked at.
const MAX_WALKED: usize = 12_000_000;
const CHUNK: usize = 64 << 10;

/// One content of one file, as far as the file system shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    place: (u64, u64),
    size: u64,
    modified: (i64, i64),
}

/// What is at a path.
#[derive(Debug)]
pub enum Found {
    File(FoundFile),
    Directory,
    /// A symbolic link, and its target.
    Link(String),
    Nothing,
    /// Something that cannot be stored.
    Other,
}

/// An existing file.
#[derive(Debug)]
pub struct FoundFile {
    pub file: File,
    pub stamp: Stamp,
    pub size: u64,
    pub mode: u32,
    pub modified_ns: i64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            place: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Takes the directory over for this process, and deletes the copies of earlier processes. The lock is
/// held until the returned file is dropped.
///
/// # Errors
/// Why that is not possible.
pub fn take_over(root: &Path) -> Result<File, String> {
    let shown = root.display();
    let failed = |error: io::Error| format!("{shown}: {error}");
    std::fs::create_dir_all(root).map_err(failed)?;
    let dir = Dir::open_ambient_dir(root, ambient_authority()).map_err(failed)?;
    let names = removal::listed(&dir).map_err(failed)?;
    let is_of_tenant = |name: &std::ffi::OsStr| !name.as_encoded_bytes().starts_with(b".");
    let is_marked = names.iter().any(|(name, _)| name == MARKER);
    if !is_marked && names.iter().any(|(name, _)| is_of_tenant(name)) {
        return Err(format!(
            "{shown} holds files that are no copies of what the object store keeps; name an empty directory"
        ));
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let marker = options.open(root.join(MARKER)).map_err(failed)?;
    marker.try_lock().map_err(|_| {
        format!("{shown} is used by another process; each replica needs a directory of its own")
    })?;
    loop {
        let names = removal::listed(&dir).map_err(failed)?;
        let mut of_tenants = names.into_iter().filter(|(name, _)| is_of_tenant(name)).peekable();
        if of_tenants.peek().is_none() {
            return Ok(marker);
        }
        for (name, _) in of_tenants {
            Workspace::move_entry_to_trash(&dir, &dir, &name).map_err(failed)?;
        }
    }
}

/// What is at a path.
///
/// # Errors
/// Errors of the file system.
pub fn look(tenant: &Workspace, path: &str) -> io::Result<Found> {
    let (dir, name) = match tenant.holder(path) {
        Err(e) if is_nothing(&e) => return Ok(Found::Nothing),
        held => held?,
    };
    let metadata = match dir.symlink_metadata(name) {
        Err(e) if is_nothing(&e) => return Ok(Found::Nothing),
        found => found?,
    };
    Ok(match Kind::of(&metadata) {
        Kind::Directory => Found::Directory,
        Kind::Link => match dir.read_link_contents(name)?.into_os_string().into_string() {
            Ok(target) => Found::Link(target),
            Err(_) => Found::Other,
        },
        Kind::Special => Found::Other,
        Kind::File => {
            let file = match tenant.open_file(path) {
                Err(e) if is_nothing(&e) => return Ok(Found::Nothing),
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Ok(Found::Other),
                opened => opened?,
            };
            let metadata = file.metadata()?;
            Found::File(FoundFile {
                stamp: Stamp::of(&metadata),
                size: metadata.len(),
                mode: metadata.mode() & 0o777,
                modified_ns: metadata
                    .mtime()
                    .saturating_mul(1_000_000_000)
                    .saturating_add(metadata.mtime_nsec()),
                file: file.into_std(),
            })
        }
    })
}

fn is_nothing(error: &io::Error) -> bool {
    // A link on the way is none of this workspace's directories.
    let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    is_link || is_absent(error)
}

/// All entries beneath a directory; names that are not UTF-8 are left out.
///
/// # Errors
/// Errors of the file system.
pub fn beneath(tenant: &Workspace, directory: &str) -> io::Result<Vec<String>> {
    let root = match tenant.open_dir(directory) {
        Err(e) if is_nothing(&e) => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut paths = Vec::new();
    let refused = |beyond| io::Error::other(format!("the workspace has too much: {beyond:?}"));
    walk(
        &root,
        (MAX_WALKED, None),
        |beyond: WalkLimit| refused(beyond),
        |entry: &WalkEntry<'_>| {
            if let Some(name) = entry.name.to_str()
                && !StagedFile::is_name(name)
            {
                paths.push(joined(directory, entry.path));
            }
            Ok::<bool, io::Error>(true)
        },
    )?;
    Ok(paths)
}

/// A path of a directory of the tenant.
pub fn joined(directory: &str, path: &str) -> String {
    match (directory, path) {
        (".", path) => path.to_owned(),
        (directory, ".") => directory.to_owned(),
        (directory, path) => format!("{directory}/{path}"),
    }
}

/// Whether a path is a valid one of a workspace: paths in the durable store are not trusted.
pub fn is_path(path: &str) -> bool {
    path != "." && normalise(path).is_ok_and(|plain| plain == path)
}

/// An empty file that is put into a place later.
///
/// # Errors
/// Errors of the file system.
pub fn stage(tenant: &Workspace) -> io::Result<(StagedFile, File)> {
    let (staged, file) = StagedFile::create(&tenant.root())?;
    Ok((staged, file.into_std()))
}

/// Gives a staged file its permissions and its time; returns the stamp that it will have in its place.
///
/// # Errors
/// Errors of the file system.
pub fn finish(file: &File, (mode, modified_ns): (u32, i64)) -> io::Result<Stamp> {
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode & 0o777))?;
    let time = Timespec {
        tv_sec: modified_ns.div_euclid(1_000_000_000),
        tv_nsec: modified_ns.rem_euclid(1_000_000_000),
    };
    futimens(file, &Timestamps { last_access: time, last_modification: time })?;
    Ok(Stamp::of(&Metadata::from_file(file)?))
}

/// Puts a file in its place.
///
/// # Errors
/// Errors of the file system.
pub fn place(tenant: &Workspace, path: &str, staged: &StagedFile) -> io::Result<()> {
    let parent = tenant.destination(path)?.make()?;
    if parent.dir().symlink_metadata(parent.name()).is_ok_and(|there| there.is_dir()) {
        removal::remove(parent.dir(), parent.name().as_ref())?;
    }
    staged.replace(parent.dir(), parent.name())?;
    parent.keep();
    Ok(())
}

/// Makes a directory.
///
/// # Errors
/// Errors of the file system.
pub fn place_directory(tenant: &Workspace, path: &str) -> io::Result<()> {
    let made = tenant.destination(path)?.make()?;
    match made.dir().symlink_metadata(made.name()) {
        Ok(there) if there.is_dir() => {}
        Ok(_) => {
            made.dir().remove_file(made.name())?;
            made.dir().create_dir(made.name())?;
        }
        Err(_) => made.dir().create_dir(made.name())?,
    }
    made.keep();
    Ok(())
}

/// Makes a symbolic link. Where it leads is judged when it is followed.
///
/// # Errors
/// Errors of the file system.
pub fn place_link(tenant: &Workspace, path: &str, target: &str) -> io::Result<()> {
    remove(tenant, path)?;
    let made = tenant.destination(path)?.make()?;
    rustix::fs::symlinkat(target, &**made.dir(), made.name())?;
    made.keep();
    Ok(())
}

/// Removes what is at a path, with all that is in it.
///
/// # Errors
/// Errors of the file system; an absent entry is no error.
pub fn remove(tenant: &Workspace, path: &str) -> io::Result<()> {
    let (dir, name) = match tenant.holder(path) {
        Err(e) if is_nothing(&e) => return Ok(()),
        held => held?,
    };
    own_writes::note(&dir, name);
    match removal::remove(&dir, name.as_ref()) {
        Err(e) if is_nothing(&e) => Ok(()),
        removed => removed,
    }
}

/// Removes a directory where nothing is in it.
///
/// # Errors
/// Errors of the file system.
pub fn remove_empty(tenant: &Workspace, path: &str) -> io::Result<()> {
    let (dir, name) = match tenant.holder(path) {
        Err(e) if is_nothing(&e) => return Ok(()),
        held => held?,
    };
    own_writes::note(&dir, name);
    match dir.remove_dir(name) {
        Err(e) if is_nothing(&e) || e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

/// Gives a file other permissions.
///
/// # Errors
/// Errors of the file system.
pub fn set_mode(tenant: &Workspace, path: &str, mode: u32) -> io::Result<()> {
    let (dir, name) = tenant.holder(path)?;
    dir.open_with(name, cap_std::fs::OpenOptions::new().read(true))?
        .set_permissions(Permissions::from_mode(mode & 0o777))
}

/// The SHA-256 of a file in hexadecimal digits, and its size, which may be at most `most` bytes.
///
/// # Errors
/// Errors of the file system.
pub fn hashed(file: &File, most: u64) -> io::Result<(String, u64)> {
    let (mut hash, mut at, mut chunk) = (Sha256::new(), 0, vec![0; CHUNK]);
    while at <= most {
        let read = file.read_at(&mut chunk, at)?;
        if read == 0 {
            break;
        }
        hash.update(&chunk[..read]);
        at += read as u64;
    }
    Ok((hex::encode(hash.finalize()), at))
}

/// A piece of a file, shorter only at its end.
///
/// # Errors
/// Errors of the file system.
pub fn piece(file: &File, at: u64, size: usize) -> io::Result<Vec<u8>> {
    let mut piece = vec![0; size];
    let mut filled = 0;
    while filled < size {
        let read = file.read_at(&mut piece[filled..], at + filled as u64)?;
        if read == 0 {
            break;
        }
        filled += read;
    }
    piece.truncate(filled);
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn tenant() -> (tempfile::TempDir, Workspace) {
        let root = tempfile::tempdir().unwrap();
        let tenant = Workspace::open(root.path(), "t", ".").unwrap();
        (root, tenant)
    }

    fn put(tenant: &Workspace, path: &str, text: &str) -> io::Result<Stamp> {
        let (staged, mut file) = stage(tenant)?;
        file.write_all(text.as_bytes())?;
        let stamp = finish(&file, (0o640, 1_000_000_000_123_456_789))?;
        place(tenant, path, &staged)?;
        Ok(stamp)
    }

    #[test]
    fn what_is_placed_is_found_as_it_is() {
        let (root, tenant) = tenant();
        let stamp = put(&tenant, "a/b/file", "text").unwrap();
        let Found::File(found) = look(&tenant, "a/b/file").unwrap() else { panic!() };
        assert_eq!((found.stamp, found.size, found.mode), (stamp, 4, 0o640));
        assert_eq!(found.modified_ns, 1_000_000_000_123_456_789);
        place_directory(&tenant, "a/empty").unwrap();
        place_link(&tenant, "a/link", "/etc/passwd").unwrap();
        assert!(matches!(look(&tenant, "a/link").unwrap(), Found::Link(to) if to == "/etc/passwd"));
        let mut paths = beneath(&tenant, "a").unwrap();
        paths.sort();
        assert_eq!(paths, ["a/b", "a/b/file", "a/empty", "a/link"]);
        remove(&tenant, "a/b").unwrap();
        remove(&tenant, "a/b/file").unwrap();
        put(&tenant, "a/empty", "in place of a directory").unwrap();
        assert!(!root.path().join("t/a/b").exists());
    }

    #[test]
    fn no_link_is_followed_and_no_path_leads_out() {
        let (root, tenant) = tenant();
        let outside = root.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("file"), "theirs").unwrap();
        std::os::unix::fs::symlink(&outside, root.path().join("t/link")).unwrap();
        assert!(put(&tenant, "link/file", "mine").is_err());
        assert!(put(&tenant, "link/new", "mine").is_err());
        remove(&tenant, "link/file").unwrap();
        assert!(matches!(look(&tenant, "link/file").unwrap(), Found::Nothing));
        assert_eq!(std::fs::read_to_string(outside.join("file")).unwrap(), "theirs");
        for path in ["../x", "/x", "a/../x", "a//x", "a/", ".", "", "a\nb", "./a"] {
            assert!(!is_path(path), "{path}");
        }
        assert!(is_path("a/b c/ü"));
    }

    #[test]
    fn only_copies_are_taken_away() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("default")).unwrap();
        assert!(take_over(root.path()).unwrap_err().contains("no copies"));
        std::fs::remove_dir(root.path().join("default")).unwrap();
        let lock = take_over(root.path()).unwrap();
        assert!(take_over(root.path()).unwrap_err().contains("another process"));
        std::fs::create_dir(root.path().join("default")).unwrap();
        drop(lock);
        take_over(root.path()).unwrap();
        assert!(!root.path().join("default").exists());
    }
}
