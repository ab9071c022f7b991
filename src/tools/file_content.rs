//! The content of a file as it is hashed, and as it is sent.
//!
//! Runs and programs may change files while they are read. Sending completes only if the sent content is
//! the hashed one; bytes that were appended since are left out. Everything here blocks.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cap_std::fs::{Metadata, MetadataExt};
use sha2::{Digest, Sha256};

/// Bytes that are read at once.
pub const PIECE: u32 = 32 << 10;
/// A file that was changed this lately may change again without its time showing it.
const SETTLED: Duration = Duration::from_secs(2);

/// The end of the year 9999, in seconds since 1970.
const LATEST: Duration = Duration::from_secs(253_402_300_799);

/// When a file was last changed. A program can set a time that no calendar has: the nearest one is taken then.
///
/// # Errors
/// What the system says.
pub(super) fn modified(metadata: &Metadata) -> io::Result<SystemTime> {
    Ok(dated(metadata.modified()?.into_std()))
}

fn dated(time: SystemTime) -> SystemTime {
    time.clamp(UNIX_EPOCH, UNIX_EPOCH + LATEST)
}

/// One content of one file, as far as the file system shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Version {
    place: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            place: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// The same where another content would show.
    pub(super) fn settled(metadata: &Metadata) -> io::Result<Option<Self>> {
        let age = SystemTime::now().duration_since(metadata.modified()?.into_std());
        Ok(age.is_ok_and(|age| age > SETTLED).then(|| Self::of(metadata)))
    }

    pub(super) fn weak_tag(&self) -> Arc<str> {
        let Self { place: (device, inode), size, modified, changed } = self;
        let (modified, changed) = (
            format!("{:x}.{:x}", modified.0, modified.1),
            format!("{:x}.{:x}", changed.0, changed.1),
        );
        format!("W/\"{size:x}-{modified}-{changed}-{device:x}.{inode:x}\"").into()
    }
}

/// The entity tag of the first `size` bytes of a file, wherever it is read from.
pub(super) fn strong_tag(file: &File, size: u64) -> io::Result<Arc<str>> {
    let (mut hash, mut at) = (Sha256::new(), 0);
    while at < size {
        let piece = piece(file, at, size)?;
        at += piece.len() as u64;
        hash.update(piece);
    }
    Ok(quoted(hash))
}

fn piece(file: &File, at: u64, end: u64) -> io::Result<Vec<u8>> {
    let left = usize::try_from(end - at).unwrap_or(usize::MAX);
    let mut piece = vec![0; left.min(PIECE as usize)];
    file.read_exact_at(&mut piece, at)?;
    Ok(piece)
}

fn quoted(hash: Sha256) -> Arc<str> {
    format!("\"{}\"", hex::encode(hash.finalize())).into()
}

/// How it is verified that the content is still the one that was hashed.
#[derive(Debug)]
enum Proof {
    /// Nothing does: the tag is not of the content.
    None,
    /// The hash of what was read, which is all of it.
    Read(Sha256),
    /// The file's version, or else its hash.
    Version(Option<Version>),
}

/// A part of a file on its way to a caller.
#[derive(Debug)]
pub struct Content {
    file: File,
    /// How much of the file was hashed, and its tag.
    hashed: (u64, Arc<str>),
    at: u64,
    end: u64,
    proof: Proof,
}

impl Content {
    /// From `start`, so many bytes of a file that has this tag.
    pub(super) fn new(
        file: File,
        hashed: (u64, Arc<str>),
        settled: Option<Version>,
        (start, length): (u64, u64),
    ) -> Self {
        let proof = if hashed.1.starts_with("W/") {
            Proof::None
        } else if length == hashed.0 {
            Proof::Read(Sha256::new())
        } else {
            Proof::Version(settled)
        };
        Self { file, hashed, at: start, end: start + length, proof }
    }

    /// The next piece; `None` behind the last one, which comes only if all are of the content that was
    /// hashed.
    ///
    /// # Errors
    /// The file was changed, or errors of the file system.
    pub fn next_piece(&mut self) -> io::Result<Option<Bytes>> {
        if self.at == self.end {
            return Ok(None);
        }
        let piece = piece(&self.file, self.at, self.end)?;
        self.at += piece.len() as u64;
        if let Proof::Read(hash) = &mut self.proof {
            hash.update(&piece);
        }
        if self.at == self.end && !self.is_proved()? {
            return Err(io::Error::other("the file was changed while it was sent"));
        }
        Ok(Some(piece.into()))
    }

    fn is_proved(&self) -> io::Result<bool> {
        let (size, etag) = &self.hashed;
        let version = || Metadata::from_file(&self.file).map(|now| Version::of(&now));
        Ok(match &self.proof {
            Proof::None => true,
            Proof::Read(hash) => quoted(hash.clone()) == *etag,
            Proof::Version(Some(settled)) if version()? == *settled => true,
            Proof::Version(_) => strong_tag(&self.file, *size)? == *etag,
        })
    }
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, SecondsFormat, Utc};

    use super::*;

    const CHUNK: usize = PIECE as usize;

    fn file_of(content: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(content, 0).unwrap();
        file
    }

    fn sent(mut content: Content) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(piece) = content.next_piece()? {
            all.extend(piece);
        }
        Ok(all)
    }

    #[test]
    fn a_time_that_no_calendar_has_becomes_the_nearest_one() {
        let far = Duration::from_secs(1 << 50);
        for (time, shown) in
            [(UNIX_EPOCH + far, "9999-12-31T23:59:59Z"), (UNIX_EPOCH - far, "1970-01-01T00:00:00Z")]
        {
            let shown_time = DateTime::<Utc>::from(dated(time));
            assert_eq!(shown_time.to_rfc3339_opts(SecondsFormat::Secs, true), shown);
        }
    }

    #[test]
    fn a_tag_is_of_so_many_bytes_whatever_comes_behind_them() {
        for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1] {
            let whole = file_of(&vec![b'x'; size]);
            let appended = file_of(&vec![b'x'; size + CHUNK + 1]);
            let tag = strong_tag(&whole, size as u64).unwrap();
            assert_eq!(*tag, *quoted(Sha256::new_with_prefix(vec![b'x'; size])), "{size}");
            assert_eq!(strong_tag(&appended, size as u64).unwrap(), tag, "{size}");
            let cut = strong_tag(&whole, size as u64 + 1).unwrap_err();
            assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof, "{size}");
        }
    }

    #[test]
    fn what_is_sent_is_what_was_hashed_or_breaks_off() {
        type Change = fn(&File);
        const LENGTH: usize = 3 * CHUNK + 5;
        const SIZE: u64 = LENGTH as u64;
        let nothing: Change = |_| {};
        let append: Change = |file| file.write_all_at(b"more", SIZE).unwrap();
        let edit: Change = |file| file.write_all_at(b"y", SIZE - 1).unwrap();
        let edit_outside: Change = |file| file.write_all_at(b"y", 0).unwrap();
        let cut: Change = |file| file.set_len(SIZE - 1).unwrap();
        let (all, part) = ((0, SIZE), (SIZE - 10, 10));
        for (name, change, range, ends_well) in [
            ("nothing", nothing, all, true),
            ("nothing", nothing, part, true),
            ("append", append, all, true),
            ("append", append, part, true),
            ("edit", edit, all, false),
            ("edit", edit, part, false),
            ("edit outside", edit_outside, all, false),
            ("edit outside", edit_outside, part, false),
            ("cut", cut, all, false),
            ("cut", cut, part, false),
        ] {
            let before = vec![b'x'; LENGTH];
            let file = file_of(&before);
            let tag = strong_tag(&file, SIZE).unwrap();
            let old = Some(Version::of(&Metadata::from_file(&file).unwrap()));
            let settled = old.filter(|_| name == "nothing");
            let content =
                |tag, settled| Content::new(file.try_clone().unwrap(), (SIZE, tag), settled, range);
            let (strong, weak) = (content(tag, settled), content("W/\"x\"".into(), None));
            change(&file);
            let expected = &before[usize::try_from(range.0).unwrap()..];
            match sent(strong) {
                Ok(sent) => assert!(ends_well && sent == expected, "{name} {range:?}"),
                Err(error) => assert!(!ends_well, "{name} {range:?}: {error}"),
            }
            assert_eq!(sent(weak).is_ok(), name != "cut", "{name} {range:?}");
        }
    }
}
