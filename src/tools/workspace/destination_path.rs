//! The missing directories above a path, which are created before it is written.
//!
//! The missing directories are known before any is created, so that they can be counted against the quota
//! and refused. Created directories are removed again if the change fails for which they were created.

use std::io;
use std::sync::Arc;

use cap_fs_ext::DirExt;
use cap_std::fs::Dir;

use crate::tools::own_writes;

/// A resolved path whose directories may be missing.
#[derive(Debug)]
pub struct DestinationPath<'p> {
    /// The last directory that is there.
    base: Arc<Dir>,
    path: &'p str,
    /// Where the paths of the missing directories end.
    missing: Vec<usize>,
}

/// The directory that holds a path's last name. If it is dropped without [`ParentDirectory::keep`], the created
/// directories are removed.
#[derive(Debug)]
pub struct ParentDirectory<'p> {
    dir: Arc<Dir>,
    destination: DestinationPath<'p>,
    /// Index of the first missing directory that was created here.
    from: usize,
    is_kept: bool,
}

/// The paths of the directories that a resolved path lies in, the upper ones first.
pub fn directories_of(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end])
}

impl<'p> DestinationPath<'p> {
    pub(super) fn to(root: &Arc<Dir>, path: &'p str) -> io::Result<Self> {
        if path == "." {
            let message = "this is the workspace itself";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let mut destination = Self { base: Arc::clone(root), path, missing: Vec::new() };
        let mut start = 0;
        for (end, _) in path.match_indices('/') {
            if destination.missing.is_empty() {
                match destination.base.open_dir_nofollow(&path[start..end]) {
                    Ok(dir) => destination.base = Arc::new(dir),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => destination.missing.push(end),
                    Err(e) => return Err(e),
                }
            } else {
                destination.missing.push(end);
            }
            start = end + 1;
        }
        Ok(destination)
    }

    /// The directory that holds the last name, where it is there.
    pub fn holder(&self) -> Option<&Arc<Dir>> {
        self.missing.is_empty().then_some(&self.base)
    }

    /// The whole path.
    pub fn path(&self) -> &'p str {
        self.path
    }

    /// The path's last name.
    pub fn name(&self) -> &'p str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }

    /// The paths of the directories that are missing, the upper ones first.
    pub fn missing(&self) -> impl ExactSizeIterator<Item = &'p str> {
        let path = self.path;
        self.missing.iter().map(move |end| &path[..*end])
    }

    /// Creates the missing directories, for a write to the path.
    ///
    /// # Errors
    /// The system refuses it; directories that were created are removed again.
    pub fn make(self) -> io::Result<ParentDirectory<'p>> {
        let mut made = ParentDirectory {
            dir: Arc::clone(&self.base),
            destination: self,
            from: 0,
            is_kept: false,
        };
        for index in 0..made.destination.missing.len() {
            let name = made.destination.name_of(index);
            own_writes::note(&made.dir, name);
            match made.dir.create_dir(name) {
                Ok(()) => {}
                // Another writer created it, and so all directories above it.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => made.from = index + 1,
                Err(e) => {
                    made.destination.missing.truncate(index);
                    return Err(e);
                }
            }
            let next = made.dir.open_dir_nofollow(name);
            match next {
                Ok(dir) => made.dir = Arc::new(dir),
                Err(e) => {
                    made.destination.missing.truncate(index + 1);
                    return Err(e);
                }
            }
        }
        own_writes::note(&made.dir, made.name());
        Ok(made)
    }

    /// The name of a missing directory.
    fn name_of(&self, index: usize) -> &'p str {
        let path = self.missing.get(index).map_or(self.path, |end| &self.path[..*end]);
        path.rsplit('/').next().unwrap_or(path)
    }

    /// The directory above a missing one.
    fn above(&self, index: usize) -> io::Result<Arc<Dir>> {
        (0..index).try_fold(Arc::clone(&self.base), |dir, above| {
            dir.open_dir_nofollow(self.name_of(above)).map(Arc::new)
        })
    }
}

impl<'p> ParentDirectory<'p> {
    pub fn dir(&self) -> &Arc<Dir> {
        &self.dir
    }

    /// The path's last name.
    pub fn name(&self) -> &'p str {
        self.destination.name()
    }

    /// Keeps the created directories.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ParentDirectory<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        for index in (self.from..self.destination.missing.len()).rev() {
            let above = self.destination.above(index);
            // It fails if another writer has put something there in the meantime.
            if above.and_then(|above| above.remove_dir(self.destination.name_of(index))).is_err() {
                return;
            }
        }
    }
}

/// The parent directories of several paths.
#[derive(Debug, Default)]
pub struct ParentDirectories<'p>(Vec<ParentDirectory<'p>>);

impl<'p> ParentDirectories<'p> {
    pub fn add(&mut self, made: ParentDirectory<'p>) {
        self.0.push(made);
    }

    pub fn iter(&self) -> impl Iterator<Item = &ParentDirectory<'p>> {
        self.0.iter()
    }

    /// Keeps the created directories.
    pub fn keep(mut self) {
        self.0.drain(..).for_each(ParentDirectory::keep);
    }
}

impl Drop for ParentDirectories<'_> {
    fn drop(&mut self) {
        // A directory that was created later may lie in an earlier one.
        while self.0.pop().is_some() {}
    }
}
