//! `read` and `stat`.
//!
//! A small file is read at once, on the caller's thread: that is what most calls do, and it is
//! quicker than handing it over. A large one is read in pages of whole lines, with a note that says
//! how to go on; no file is ever held whole. Only text is shown, that of PDF documents too (`pdf`): a
//! NUL byte or a bad UTF-8 sequence makes a file binary.

use std::io::{self, BufRead, BufReader, Read, Seek};

use cap_std::fs::File;
use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{Kind, ToolError, Workspace, refused, special, stopped};
use crate::tools::file_content::modified;
use crate::tools::pdf;

/// Bytes of a file that is read on the caller's thread.
const SMALL: u64 = 64 * 1024;
/// Bytes at the start of a larger one by which its format is recognised.
const PEEKED: u64 = 16;
/// Bytes of text in one answer.
const PAGE: usize = 1024 * 1024;
/// Bytes that a large file has in memory while it is read: a page, and the answer that is made of it.
pub(super) const HELD: u64 = 3 * PAGE as u64;
/// Bytes looked at in one call, skipped lines included.
const MAX_SCANNED: usize = 256 * 1024 * 1024;

/// The kind of content that was found in a file.
pub(super) enum FirstRead {
    /// It is small; these are the requested lines.
    Text(String),
    /// A document, from its beginning.
    Pdf(std::fs::File),
    /// It must be read by [`read`].
    Large,
}

/// Reads a file that is small text.
pub(super) fn begin(
    workspace: &Workspace,
    path: &str,
    offset: Option<u64>,
    limit: Option<u64>,
) -> Result<FirstRead, ToolError> {
    let (mut file, length) = open(workspace, path)?;
    let failed = |e: io::Error| refused(path, &e);
    // One byte more than it had: a file that grows in the meantime is a case for `read`.
    let looked_at = if length > SMALL { PEEKED } else { SMALL + 1 };
    let mut bytes = Vec::with_capacity(usize::try_from(length.min(looked_at)).unwrap_or(0) + 1);
    (&mut file).take(looked_at).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.starts_with(pdf::MAGIC) {
        let mut document = file.into_std();
        document.rewind().map_err(failed)?;
        return Ok(FirstRead::Pdf(document));
    }
    if length > SMALL || bytes.len() as u64 > SMALL {
        return Ok(FirstRead::Large);
    }
    if offset.unwrap_or(1) == 1 && limit.is_none() {
        return whole(path, bytes).map(FirstRead::Text);
    }
    page(path, bytes.as_slice(), offset, limit, &CancellationToken::new()).map(FirstRead::Text)
}

/// Lines of a text that was made from a file.
pub(super) fn page_of(
    path: &str,
    text: &str,
    offset: Option<u64>,
    limit: Option<u64>,
) -> Result<String, ToolError> {
    page(path, text.as_bytes(), offset, limit, &CancellationToken::new())
}

/// Reads lines of a file of any size.
pub(super) fn read(
    workspace: &Workspace,
    path: &str,
    offset: Option<u64>,
    limit: Option<u64>,
    stop: &CancellationToken,
) -> Result<String, ToolError> {
    let (file, _) = open(workspace, path)?;
    page(path, BufReader::with_capacity(64 * 1024, file), offset, limit, stop)
}

/// Kind, size and time of change.
pub(super) fn stat(workspace: &Workspace, path: &str) -> Result<String, ToolError> {
    let metadata = if path == "." {
        workspace.open_dir(path).and_then(|dir| dir.dir_metadata())
    } else {
        workspace.holder(path).and_then(|(dir, name)| dir.symlink_metadata(name))
    };
    let metadata = metadata.map_err(|e| refused(path, &e))?;
    let kind = match Kind::of(&metadata) {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Link => "link",
        Kind::Special => return Err(special(path)),
    };
    let modified = modified(&metadata).map(DateTime::<Utc>::from);
    let modified = modified.ok().map(|t| t.to_rfc3339_opts(SecondsFormat::Millis, true));
    Ok(json!({"path": path, "type": kind, "size": metadata.len(), "modified": modified})
        .to_string())
}

/// A regular file, and its length.
fn open(workspace: &Workspace, path: &str) -> Result<(File, u64), ToolError> {
    let directory =
        || ToolError::ForModel(format!("{path:?} is a directory; use list to see what is in it"));
    if path == "." {
        return Err(directory());
    }
    let file = workspace.open_file(path).map_err(|e| refused(path, &e))?;
    let metadata = file.metadata().map_err(|e| refused(path, &e))?;
    match Kind::of(&metadata) {
        Kind::File => Ok((file, metadata.len())),
        Kind::Directory => Err(directory()),
        Kind::Link | Kind::Special => Err(special(path)),
    }
}

fn whole(path: &str, bytes: Vec<u8>) -> Result<String, ToolError> {
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        Ok(text) => Err(binary(path, text.as_bytes())),
        Err(error) => Err(binary(path, error.as_bytes())),
    }
}

/// The name of a format of images as people write it.
fn format_of(kind: imagesize::ImageType) -> String {
    match kind {
        imagesize::ImageType::Webp => "WebP".to_owned(),
        // Some have details in parentheses.
        other => {
            let name = format!("{other:?}");
            name.split('(').next().unwrap_or_default().to_uppercase()
        }
    }
}

/// A file that is not text, by its first bytes.
fn binary(path: &str, bytes: &[u8]) -> ToolError {
    let image = imagesize::image_type(bytes).ok().zip(imagesize::blob_size(bytes).ok());
    ToolError::ForModel(match image {
        Some((kind, size)) => {
            let (format, width, height) = (format_of(kind), size.width, size.height);
            format!(
                "{path:?} is an image ({format}, {width} x {height} pixels); only text can be read"
            )
        }
        None => format!("{path:?} is a binary file; only text can be read"),
    })
}

/// The lines from `offset` on, at most `limit` of them and at most a page, and how to go on.
fn page(
    path: &str,
    input: impl BufRead,
    offset: Option<u64>,
    limit: Option<u64>,
    stop: &CancellationToken,
) -> Result<String, ToolError> {
    let first = offset.unwrap_or(1).max(1);
    let end = limit.map_or(u64::MAX, |lines| first.saturating_add(lines));
    let Lines { mut text, line, at_line_start, more } = lines(path, input, first, end, stop)?;
    if text.is_empty() && first > 1 {
        let has = if at_line_start { line - 1 } else { line };
        return Err(ToolError::ForModel(format!(
            "{path:?} has only {has} lines; line {first} is beyond its end"
        )));
    }
    if !more {
        return whole(path, text);
    }
    // A line that does not fit any more is left for the next page, unless it is the only one.
    let (next, note) = if let Some(newline) = text.iter().rposition(|byte| *byte == b'\n') {
        text.truncate(newline + 1);
        (line, String::new())
    } else {
        if let Some(e) = std::str::from_utf8(&text).err().filter(|e| e.error_len().is_none()) {
            text.truncate(e.valid_up_to());
        }
        (line + 1, format!("\n[Line {line} is cut here: it is longer than {PAGE} bytes.]\n"))
    };
    let last = next - 1;
    Ok(whole(path, text)?
        + &note
        + &format!("[Lines {first} to {last}. The file continues: read it with offset {next}.]"))
}

/// Some lines of a file, the last one perhaps cut.
struct Lines {
    text: Vec<u8>,
    /// The line that comes next, or that is cut.
    line: u64,
    /// Whether no line is cut.
    at_line_start: bool,
    /// Whether the file continues.
    more: bool,
}

/// The lines `first..end`, and not more than a page of them.
fn lines(
    path: &str,
    mut input: impl BufRead,
    first: u64,
    end: u64,
    stop: &CancellationToken,
) -> Result<Lines, ToolError> {
    let (mut line, mut at_line_start, mut text) = (1, true, Vec::new());
    let mut scanned = 0;
    loop {
        let chunk = match input.fill_buf() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(|e| refused(path, &e))?,
        };
        if chunk.is_empty() || line >= end || text.len() >= PAGE {
            return Ok(Lines { text, line, at_line_start, more: !chunk.is_empty() });
        }
        let newline = chunk.iter().position(|byte| *byte == b'\n');
        let mut part = &chunk[..newline.map_or(chunk.len(), |at| at + 1)];
        if part.contains(&0) {
            return Err(binary(path, if scanned == 0 { chunk } else { &[] }));
        }
        if line >= first {
            part = &part[..part.len().min(PAGE - text.len())];
            text.extend_from_slice(part);
        }
        at_line_start = part.ends_with(b"\n");
        line += u64::from(at_line_start);
        scanned += part.len();
        let taken = part.len();
        input.consume(taken);
        if newline.is_none() && stop.is_cancelled() {
            return Err(stopped());
        }
        if scanned > MAX_SCANNED {
            return Err(ToolError::ForModel(format!(
                "line {first} of {path:?} is beyond its first {MAX_SCANNED} bytes, which is as far as read looks"
            )));
        }
    }
}
