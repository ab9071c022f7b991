//! The text of PDF documents, extracted by a process of its own.
//!
//! Documents are untrusted: they can make a parser recurse, loop, panic or allocate without bound. So the
//! binary is started again as a reader process, which has the document as its standard input and nothing
//! else: no files, no network, little memory and time. This process only reads a bounded text from a
//! pipe. Pages that cannot be read are named in the text, and do not affect the others.

use std::io::{self, Read, Seek, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ExitCode, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use pdf_extract::{Document, PlainTextOutput, output_doc_page};
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use super::sandbox::{self, Limits};
use crate::bounds::memory::TenantSemaphore;

/// The argument that makes the binary a reader.
pub const READER: &str = "pdf-text";

/// What such a file begins with.
pub(super) const MAGIC: &[u8] = b"%PDF-";
/// Bytes of a document.
const MAX_DOCUMENT: u64 = 64 * 1024 * 1024;
/// Bytes of text of one document.
const MAX_TEXT: usize = 8 * 1024 * 1024;
/// Bytes of a reason.
const MAX_REASON: u64 = 300;
/// Pages that are read.
const MAX_PAGES: usize = 10_000;
/// How long one document may take.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Of one reader.
const LIMITS: Limits = Limits {
    memory: 512 * 1024 * 1024,
    cpu_seconds: 20,
    processes: 4,
    file_size: 0,
    open_files: 16,
};
/// How much address space the reader's allocator reserves at a time, in KiB. With the default of 1 GiB,
/// which it reserves before the limit is set, the reader could use 1 GiB in spite of the limit.
const RESERVED: (&str, &str) = ("MIMALLOC_ARENA_RESERVE", "65536");
/// Readers at the same time, half of them of one tenant.
const MAX_READERS: usize = 2;
static READERS: LazyLock<TenantSemaphore> = LazyLock::new(|| TenantSemaphore::new(MAX_READERS));

/// The text of a document in memory, as [`text`] has it.
///
/// # Errors
/// As of [`text`].
pub(super) async fn text_of(document: Vec<u8>, tenant: &str) -> Result<String, String> {
    let file = tokio::task::spawn_blocking(move || {
        let mut file = std::fs::File::from(memfd_create("document", MemfdFlags::CLOEXEC)?);
        file.write_all(&document)?;
        file.rewind()?;
        io::Result::Ok(file)
    });
    match file.await {
        Ok(Ok(file)) => text(file, tenant).await,
        Ok(Err(error)) => Err(format!("cannot be read: {error}")),
        Err(stopped) => Err(format!("cannot be read: {stopped}")),
    }
}

/// The text of an open document for this tenant, each page behind a line with its number.
///
/// # Errors
/// The error: a sentence without its subject.
pub(super) async fn text(document: std::fs::File, tenant: &str) -> Result<String, String> {
    let unusable = |error: io::Error| format!("cannot be read: the reader failed: {error}");
    let _place = READERS.acquire(tenant).await; // never closed
    let mut reader = Command::new("/proc/self/exe")
        .arg(READER)
        .env_clear()
        .env(RESERVED.0, RESERVED.1)
        .stdin(Stdio::from(document))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(unusable)?;
    let (out, err) = (reader.stdout.take(), reader.stderr.take());
    let reading = async {
        let (text, reason, ended) =
            tokio::join!(whole(out, MAX_TEXT as u64 + 1024), whole(err, MAX_REASON), reader.wait());
        io::Result::Ok((text?, reason?, ended?))
    };
    let Ok(read) = tokio::time::timeout(TIMEOUT, reading).await else {
        return Err(format!("cannot be read within {} seconds", TIMEOUT.as_secs()));
    };
    let (text, reason, ended) = read.map_err(unusable)?;
    match ended.code() {
        Some(0) => Ok(text),
        Some(1) if !reason.is_empty() => Err(reason),
        _ => Err("cannot be read: it takes too much memory or time, or is damaged".to_owned()),
    }
}

async fn whole(stream: Option<impl AsyncRead + Unpin>, most: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(most).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The main function of the reader process.
pub fn reader() -> ExitCode {
    if let Err(error) = sandbox::confine(&LIMITS) {
        eprint!("cannot be read: its reader cannot be confined: {error}");
        return ExitCode::FAILURE;
    }
    std::panic::set_hook(Box::new(|_| {}));
    let extracted = catch_unwind(extract).unwrap_or_else(|_| Err(damaged()));
    match extracted.map(|text| io::stdout().write_all(text.as_bytes())) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(_gone)) => ExitCode::from(2),
        Err(reason) => {
            eprint!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn damaged() -> String {
    "is a damaged PDF document".to_owned()
}

fn extract() -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = io::stdin().take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
    if read.map_err(|error| format!("cannot be read: {error}"))? as u64 > MAX_DOCUMENT {
        return Err(format!("is a PDF document of more than {MAX_DOCUMENT} bytes"));
    }
    let mut document = Document::load_mem(&bytes).map_err(|_| damaged())?;
    drop(bytes);
    if document.is_encrypted() && document.decrypt("").is_err() {
        return Err("is a PDF document that needs a password".to_owned());
    }
    let pages: Vec<u32> = document.get_pages().into_keys().collect();
    let mut text = String::new();
    let mut is_empty = true;
    for number in pages.iter().take(MAX_PAGES) {
        let page = catch_unwind(AssertUnwindSafe(|| page(&document, *number)));
        let line = if let Ok(Ok(page)) = page {
            is_empty &= page.is_empty();
            format!("[Page {number}]\n{page}\n")
        } else {
            is_empty = false;
            format!("[Page {number} cannot be read.]\n")
        };
        text.push_str(&line);
        if text.len() > MAX_TEXT {
            text.truncate(text.floor_char_boundary(MAX_TEXT));
            text.push_str("\n[The document continues; the rest was not read.]\n");
            break;
        }
    }
    if is_empty {
        let count = pages.len();
        return Err(format!(
            "is a PDF document of {count} pages without text; it may consist of pictures"
        ));
    }
    if pages.len() > MAX_PAGES {
        let end = format!("[The document has {} pages; no more are read.]\n", pages.len());
        text.push_str(&end);
    }
    Ok(text)
}

/// The text of a page, without what only spreads it over the page.
fn page(document: &Document, number: u32) -> Result<String, pdf_extract::OutputError> {
    let mut text = String::new();
    output_doc_page(document, &mut PlainTextOutput::new(&mut text), number)?;
    let lines = text.lines().map(str::trim_end);
    let mut kept = String::new();
    let mut blank = 0;
    for line in lines {
        blank = if line.is_empty() { blank + 1 } else { 0 };
        if blank < 2 && !(line.is_empty() && kept.is_empty()) {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept.truncate(kept.trim_end().len());
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn no_tenant_has_all_readers() {
        let take = |tenant| READERS.acquire(tenant).now_or_never().flatten();
        let of_one: Vec<_> = std::iter::from_fn(|| take("one")).collect();
        assert_eq!(of_one.len(), MAX_READERS / 2);
        assert!(take("other").is_some());
    }
}
