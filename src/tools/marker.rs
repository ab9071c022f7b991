//! The file by which replicas know that their workspace directory is the same volume: it holds an id
//! that they all know.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use cap_std::ambient_authority;
use cap_std::fs::Dir;

use super::staged_file::StagedFile;
use super::workspace::open_for_reading;

/// Its name in the directory; no tenant can have it.
pub const NAME: &str = ".workspace-id";
/// Bytes of it that are read.
const MAX_READ: u64 = 256;

/// The id in the marker of a directory; `None` where there is no marker.
///
/// # Errors
/// Errors of the file system.
pub fn read(root: &Path) -> io::Result<Option<String>> {
    read_in(&Dir::open_ambient_dir(root, ambient_authority())?)
}

/// The id in the marker of a directory; a marker with this one is made where there is none.
///
/// # Errors
/// Errors of the file system.
pub fn read_or_make(root: &Path, id: &str) -> io::Result<String> {
    let dir = Arc::new(Dir::open_ambient_dir(root, ambient_authority())?);
    if let Some(known) = read_in(&dir)? {
        return Ok(known);
    }
    let (staged, mut file) = StagedFile::create(&dir)?;
    writeln!(file, "{id}")?;
    file.sync_all()?;
    match staged.place(&dir, NAME) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    read_in(&dir)?.ok_or_else(|| io::Error::other("the marker is gone"))
}

fn read_in(dir: &Dir) -> io::Result<Option<String>> {
    let file = match open_for_reading(dir, NAME) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut text = String::new();
    file.take(MAX_READ).read_to_string(&mut text)?;
    Ok(Some(text.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_marker_of_a_directory_stays() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        assert_eq!(read_or_make(dir.path(), "a").unwrap(), "a");
        assert_eq!(read_or_make(dir.path(), "b").unwrap(), "a");
        assert_eq!(read(dir.path()).unwrap().as_deref(), Some("a"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(read(&dir.path().join("missing")).is_err());
    }
}
