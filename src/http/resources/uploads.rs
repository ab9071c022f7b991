//! Files that callers send: the body of a `PUT`, and the files of an invocation.
//!
//! An invocation that brings files is `multipart/form-data` (RFC 7578): one part `request` with the
//! JSON body, and parts `files` whose filenames are paths in the run's workspace. Contents are
//! written to disk as they arrive and get into their places when the run is accepted. All of it is
//! bounded: the time, the number of files and of requests, each file, all files of an invocation and of a
//! tenant, and what comes before a part's content.

use std::collections::HashMap;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use futures::{Stream, StreamExt as _};
use multer::{Field, Multipart};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt as _;

use crate::bounds::text::bare_type;
use crate::http::edge::auth::{FilesWrite, Scope as _, forbidden};
use crate::http::edge::extract::{JsonObject, object, refuse_encoding};
use crate::http::edge::large_bodies::BodyPlace;
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::Upload;
use crate::tools::staged_file::StagedFile;

/// Files that are received at the same time, and how many of them of one caller.
const MAX_RECEIVED: usize = 64;
const MAX_RECEIVED_OF_ONE: usize = 32;
/// Bytes of a file that must come in each second, on the average of `server.body_timeout`.
const SLOWEST: u64 = 1 << 10;
/// Files of one invocation.
pub(super) const MAX_FILES: usize = 64;
/// Bytes that are read without a part or its content in them: headers, boundaries.
const MAX_HEADERS: usize = 64 << 10;

/// A received file that is not in a workspace yet.
pub(super) struct Received {
    pub(super) staged: StagedFile,
    pub(super) size: u64,
    /// The quoted SHA-256 of its content.
    pub(super) etag: String,
}

/// How many files are received of each caller, by tenant and subject.
static RECEIVING: LazyLock<Mutex<HashMap<(String, String), usize>>> = LazyLock::new(Mutex::default);

/// A place among the files that are received; free again when it is dropped.
struct Receiving((String, String));

impl Receiving {
    fn place(caller: &Caller) -> Result<Self, Problem> {
        let of = (caller.tenant.clone(), caller.subject.clone());
        let mut receiving = RECEIVING.lock();
        let is_full = receiving.values().sum::<usize>() >= MAX_RECEIVED;
        if is_full || receiving.get(&of).is_some_and(|own| *own >= MAX_RECEIVED_OF_ONE) {
            let detail = "Too many uploads are in progress.";
            return Err(Problem::new(Code::Overloaded, detail));
        }
        *receiving.entry(of.clone()).or_default() += 1;
        Ok(Self(of))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        let mut receiving = RECEIVING.lock();
        if let Some(own) = receiving.get_mut(&self.0) {
            *own -= 1;
            if *own == 0 {
                receiving.remove(&self.0);
            }
        }
    }
}

/// The minimum rate of a body. It may take as long as a request may, while it arrives fast enough.
#[derive(Default)]
pub(super) struct Pace(Arc<AtomicU64>);

impl Pace {
    /// A body whose bytes are counted.
    pub(super) fn of<E, S>(
        &self,
        body: S,
    ) -> impl Stream<Item = Result<Bytes, E>> + Unpin + use<E, S>
    where
        S: Stream<Item = Result<Bytes, E>> + Unpin,
    {
        let came = Arc::clone(&self.0);
        body.inspect(move |chunk| {
            let bytes = chunk.as_ref().map_or(0, Bytes::len);
            came.fetch_add(bytes as u64, Ordering::Relaxed);
        })
    }

    /// Aborts the reception if the body arrives too slowly.
    pub(super) async fn enforce<T>(
        &self,
        patience: Duration,
        receives: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let mut receives = pin!(receives);
        let least = patience.as_millis() * u128::from(SLOWEST) / 1000;
        let least = u64::try_from(least).unwrap_or(u64::MAX);
        loop {
            let before = self.0.load(Ordering::Relaxed);
            match tokio::time::timeout(patience, &mut receives).await {
                Ok(done) => return done,
                Err(_) if self.0.load(Ordering::Relaxed) - before >= least.max(1) => {}
                Err(_) => return Err(Problem::body_timeout()),
            }
        }
    }
}

/// Writes a file to disk as it arrives.
pub(super) async fn received<E: std::fmt::Display>(
    app: &App,
    caller: &Caller,
    mut chunks: impl Stream<Item = Result<Bytes, E>> + Unpin,
) -> Result<Received, Problem> {
    let _place = Receiving::place(caller)?;
    let max = app.runtime.max_file();
    let (mut staged, file) = app.runtime.stage_file(&caller.tenant).await?;
    let mut file = tokio::fs::File::from_std(file.into_std());
    let (mut hash, mut size) = (Sha256::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| Problem::body_incomplete(&error))?;
        size += chunk.len() as u64;
        if size > max {
            let detail = format!("The file has more than {max} bytes.");
            return Err(Problem::new(Code::PayloadTooLarge, detail));
        }
        staged.grow(chunk.len() as u64)?;
        hash.update(&chunk);
        file.write_all(&chunk).await?;
    }
    file.flush().await?;
    file.sync_data().await?;
    Ok(Received { staged, size, etag: format!("\"{}\"", hex::encode(hash.finalize())) })
}

/// The body of an invocation, with the files that come with it.
pub(crate) struct InvocationBody {
    pub(crate) body: Map<String, Value>,
    pub(crate) uploads: Vec<Upload>,
    /// Their paths and hashes, which an idempotency key identifies.
    pub(crate) listed: Value,
}

impl InvocationBody {
    pub(crate) async fn read(
        app: &App,
        caller: &Caller,
        request: Request,
    ) -> Result<Self, Problem> {
        let Some(boundary) = boundary(request.headers())? else {
            let JsonObject(body) = JsonObject::read(app, request).await?;
            return Ok(Self { body, uploads: Vec::new(), listed: Value::Null });
        };
        refuse_encoding(request.headers())?;
        if !caller.has(FilesWrite::NAME) {
            return Err(forbidden(FilesWrite::NAME));
        }
        let pace = Pace::default();
        let parts = parts(app, caller, pace.of(request.into_body().into_data_stream()), boundary);
        let (body, uploads) = pace.enforce(app.settings.body_timeout, parts).await?;
        let listed = uploads.iter().map(|file| json!([file.path, file.etag])).collect();
        Ok(Self { body, uploads, listed })
    }
}

/// The boundary of a `multipart/form-data` body.
fn boundary(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let named = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if bare_type(named) != "multipart/form-data" {
        return Ok(None);
    }
    multer::parse_boundary(named).map(Some).map_err(|error| malformed(&error))
}

async fn parts(
    app: &App,
    caller: &Caller,
    stream: impl Stream<Item = Result<Bytes, axum::Error>> + Unpin + Send + 'static,
    boundary: String,
) -> Result<(Map<String, Value>, Vec<Upload>), Problem> {
    let unparsed = Arc::<AtomicUsize>::default();
    let stream = Paced { stream, unparsed: Arc::clone(&unparsed), rests: false };
    let mut multipart = Multipart::new(stream, boundary);
    let (mut request, mut uploads) = (None, Vec::new());
    while let Some(part) = multipart.next_field().await.map_err(|error| malformed(&error))? {
        unparsed.store(0, Ordering::Relaxed);
        match part.name() {
            Some("request") if request.is_none() => {
                let mut place = BodyPlace::of(&caller.tenant);
                let limit = app.settings.body_limit;
                request = Some(object(&text(part, &unparsed, limit, &mut place).await?)?);
            }
            Some("files") if uploads.len() < MAX_FILES => {
                uploads.push(upload(app, caller, part, uploads.len(), &unparsed).await?);
                app.runtime.could_hold(uploads.iter().map(|upload| upload.size).sum())?;
            }
            Some("files") => {
                let detail = format!("An invocation can have at most {MAX_FILES} files.");
                return Err(Problem::new(Code::PayloadTooLarge, detail));
            }
            name => {
                let name: String = name.unwrap_or_default().chars().take(64).collect();
                let detail = format!(
                    "Unexpected part {name:?}: a form has one part `request` and parts `files`."
                );
                return Err(Problem::new(Code::MalformedJson, detail));
            }
        }
    }
    Ok((request.unwrap_or_default(), uploads))
}

async fn upload(
    app: &App,
    caller: &Caller,
    part: Field<'_>,
    number: usize,
    unparsed: &AtomicUsize,
) -> Result<Upload, Problem> {
    let Some(path) = part.file_name().map(str::to_owned) else {
        let why = "the part has no filename";
        return Err(Problem::at(Code::InvalidInputs, format!("/files/{number}"), why));
    };
    let Received { staged, size, etag } = received(app, caller, counted(part, unparsed)).await?;
    Ok(Upload { path, staged, size, etag })
}

async fn text(
    part: Field<'_>,
    unparsed: &AtomicUsize,
    limit: usize,
    place: &mut BodyPlace,
) -> Result<Vec<u8>, Problem> {
    let mut chunks = counted(part, unparsed);
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        bytes.extend_from_slice(&chunk.map_err(|error| malformed(&error))?);
        if bytes.len() > limit {
            let detail = format!("The part `request` is larger than {limit} bytes.");
            return Err(Problem::new(Code::PayloadTooLarge, detail));
        }
        place.hold(bytes.len(), limit)?;
    }
    Ok(bytes)
}

/// A part's content; what arrives in it is parsed.
fn counted<'a, 'b>(
    part: Field<'a>,
    unparsed: &'b AtomicUsize,
) -> impl Stream<Item = multer::Result<Bytes>> + Unpin + use<'a, 'b> {
    part.inspect(|_| unparsed.store(0, Ordering::Relaxed))
}

fn malformed(error: &multer::Error) -> Problem {
    Problem::new(Code::MalformedJson, format!("The body is not multipart/form-data: {error}."))
}

/// A body that is given to the parser chunk by chunk. The parser takes all available bytes before it
/// parses them, and searches for the end of headers while there are more.
struct Paced<S> {
    stream: S,
    /// Bytes since the parser last found something.
    unparsed: Arc<AtomicUsize>,
    /// Whether the parser must parse what it has before it gets more.
    rests: bool,
}

impl<S, E> Stream for Paced<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Item = Result<Bytes, Box<dyn std::error::Error + Send + Sync>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::take(&mut self.rests) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let polled = self.stream.poll_next_unpin(context);
        if let Poll::Ready(Some(Ok(chunk))) = &polled {
            self.rests = true;
            let unparsed = self.unparsed.fetch_add(chunk.len(), Ordering::Relaxed);
            if unparsed > MAX_HEADERS {
                let error = format!("a part's headers have more than {MAX_HEADERS} bytes");
                return Poll::Ready(Some(Err(error.into())));
            }
        }
        polled.map(|chunk| chunk.map(|chunk| chunk.map_err(Into::into)))
    }
}
