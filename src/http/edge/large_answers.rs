//! Large answers, while their clients receive them.
//!
//! A client that reads nothing keeps its answer in memory until the write timeout. So large answers have
//! places: all of them together take no more than a part of what the process may have. While others wait
//! for a place, a client that reads nothing for a second loses its own ([`super::server`] closes it).

use std::pin::Pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Error;
use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::SemaphorePermit;
use uuid::Uuid;

use super::problem::{Code, Problem};
use super::responses::X_RUN_ID;
use crate::bounds::memory::MemorySemaphore;

/// Bytes of an answer that needs no place.
const SMALL: u64 = 256 << 10;
/// Bytes that are handed to the connection at once.
const PIECE: usize = 64 << 10;
/// How long an answer waits for its place.
const MAX_WAIT: Duration = Duration::from_secs(5);

static PLACES: LazyLock<MemorySemaphore> = LazyLock::new(MemorySemaphore::of_share);
/// Bytes of the answers that wait for memory.
static WAITING: AtomicU64 = AtomicU64::new(0);

/// In the extensions of a response that holds memory for a large answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct LargeAnswer;

/// Whether answers wait for places that others have.
pub(super) fn others_wait() -> bool {
    WAITING.load(Ordering::Relaxed) > 0
}

/// Counts an answer as one that waits.
struct Waiting(u64);

impl Waiting {
    /// `None` if those that wait have as much memory as those that are sent.
    fn begin(bytes: u64, most: u64) -> Option<Self> {
        let before = WAITING.fetch_add(bytes, Ordering::Relaxed);
        let waiting = Self(bytes);
        (before == 0 || before.saturating_add(bytes) <= most).then_some(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The answer with its place, if it is large.
///
/// # Errors
/// It has waited too long for a place, or too many others wait.
pub(super) async fn with_place(response: Response) -> Result<Response, Problem> {
    match response.body().size_hint().exact() {
        Some(bytes) if bytes > SMALL => placed(response, bytes, &PLACES).await,
        _ => Ok(response),
    }
}

async fn placed(
    mut response: Response,
    bytes: u64,
    places: &'static MemorySemaphore,
) -> Result<Response, Problem> {
    let waiting = Waiting::begin(bytes, places.bytes());
    let place = match &waiting {
        Some(_) => tokio::time::timeout(MAX_WAIT, places.acquire(bytes)).await.ok().flatten(),
        None => None,
    };
    drop(waiting);
    let Some(place) = place else {
        let busy = Problem::new(Code::Overloaded, "Too many large answers are being sent.");
        return Err(match run_of(&response) {
            Some(run) => busy.of_run(run),
            None => busy,
        });
    };
    response.extensions_mut().insert(LargeAnswer);
    Ok(response.map(|body| Body::new(PiecewiseBody { body, rest: Bytes::new(), _place: place })))
}

/// The run that the answer is of, where it answers an invocation.
fn run_of(response: &Response) -> Option<Uuid> {
    let id = response.headers().get(X_RUN_ID)?.to_str().ok()?;
    Uuid::try_parse(id).ok()
}

/// A body whose connection has a piece of it at most: what is not sent yet is dropped with it.
struct PiecewiseBody {
    body: Body,
    rest: Bytes,
    _place: SemaphorePermit<'static>,
}

impl HttpBody for PiecewiseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.rest.is_empty() {
            let next = ready!(Pin::new(&mut self.body).poll_frame(context));
            let Some(Ok(frame)) = next else { return Poll::Ready(next) };
            match frame.into_data() {
                Ok(data) => self.rest = data,
                Err(other) => return Poll::Ready(Some(Ok(other))),
            }
        }
        let length = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.len() as u64;
        self.body
            .size_hint()
            .exact()
            .map_or_else(SizeHint::new, |body| SizeHint::with_exact(body + rest))
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use axum::response::IntoResponse as _;
    use http_body_util::BodyExt as _;

    use super::super::responses::run_id_header;
    use super::*;

    static FEW: MemorySemaphore = MemorySemaphore::of_kib(1024);

    fn answer(bytes: usize) -> Response {
        Response::new(Body::from(vec![b'x'; bytes]))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_waits_for_places_that_others_have() {
        let bytes = 600 << 10;
        let first = placed(answer(bytes), bytes as u64, &FEW).await.unwrap();
        assert!(first.extensions().get::<LargeAnswer>().is_some() && !others_wait());
        assert_eq!(first.body().size_hint().exact(), Some(bytes as u64));

        let mut second = Box::pin(placed(answer(bytes), bytes as u64, &FEW));
        assert!(futures::poll!(&mut second).is_pending() && others_wait());
        let third = placed(answer(bytes), bytes as u64, &FEW).await;
        assert_eq!(third.unwrap_err().code(), Code::Overloaded, "those that wait are bounded, too");

        let mut body = first.into_body();
        let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(piece.len(), PIECE);
        assert_eq!(body.size_hint().exact(), Some((bytes - PIECE) as u64));
        drop(body);
        let second = second.await.unwrap();
        assert!(!others_wait());
        assert_eq!(to_bytes(second.into_body(), usize::MAX).await.unwrap().len(), bytes);

        let held = placed(answer(bytes), bytes as u64, &FEW).await.unwrap();
        let run = run_id_header(Uuid::from_u128(7));
        let mut started = answer(bytes);
        started.headers_mut().insert(X_RUN_ID, run.clone());
        let late = placed(started, bytes as u64, &FEW).await.unwrap_err();
        assert_eq!(late.code(), Code::Overloaded);
        assert_eq!(late.into_response().headers()[X_RUN_ID], run, "it is still found");
        drop(held);
    }

    #[tokio::test]
    async fn a_small_answer_needs_no_place() {
        let response = with_place(answer(256 << 10)).await.unwrap();
        assert!(response.extensions().get::<LargeAnswer>().is_none());
    }
}
