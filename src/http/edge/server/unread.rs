//! Request bodies that a handler did not read to their end.
//!
//! An HTTP/1.1 connection can be reused only after the whole body was read, and closing it while the
//! client is sending resets it before the client has read the response. So the rest of the body is
//! read and discarded, within bounds; beyond them the response says `Connection: close` and the
//! socket lingers (RFC 9112, section 9.6).

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Request, Response, Version};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use parking_lot::{Mutex, MutexGuard};

use super::timing::ConnectionTiming;

/// How much of a body is discarded, and for how long.
const DRAIN_BYTES: u64 = 32 << 20;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// A request's body that leaves its unread rest behind when it is dropped.
#[derive(Debug)]
pub(super) struct TrackedBody {
    body: Option<Incoming>,
    leftover: Arc<Leftover>,
}

#[derive(Debug, Default)]
struct Leftover(Mutex<LeftoverState>);

#[derive(Debug, Default)]
struct LeftoverState {
    rest: Option<Incoming>,
    /// The handler began to read, so that `100 Continue` was sent to a client that waits for it.
    was_read: bool,
}

/// The part of a body that a handler leaves unread.
#[derive(Debug)]
pub(super) struct UnreadBody {
    leftover: Arc<Leftover>,
    version: Version,
    waits_for_continue: bool,
}

pub(super) fn track(request: Request<Incoming>) -> (Request<TrackedBody>, UnreadBody) {
    let leftover = Arc::new(Leftover::default());
    let unread = UnreadBody {
        leftover: Arc::clone(&leftover),
        version: request.version(),
        waits_for_continue: request.headers().contains_key(EXPECT),
    };
    (request.map(|body| TrackedBody { body: Some(body), leftover }), unread)
}

impl UnreadBody {
    /// Discards the rest of the body; if it is too large, closes the connection after this response.
    pub(super) async fn drain_or_close<B>(
        self,
        response: &mut Response<B>,
        timing: &ConnectionTiming,
    ) {
        let (rest, was_read) = {
            let mut state = self.leftover.lock();
            (state.rest.take(), state.was_read)
        };
        let Some(rest) = rest.filter(|rest| !rest.is_end_stream()) else { return };
        // HTTP/2 resets the stream and keeps the connection.
        if self.version >= Version::HTTP_2 {
            return;
        }
        let may_drain =
            rest.size_hint().lower() <= DRAIN_BYTES && (was_read || !self.waits_for_continue);
        if may_drain && matches!(tokio::time::timeout(DRAIN_TIMEOUT, drain(rest)).await, Ok(true)) {
            return;
        }
        close(response, timing);
    }

    /// Closes the connection after this response, whatever is unread. HTTP/2 keeps it.
    pub(super) fn close<B>(self, response: &mut Response<B>, timing: &ConnectionTiming) {
        if self.version < Version::HTTP_2 {
            close(response, timing);
        }
    }
}

fn close<B>(response: &mut Response<B>, timing: &ConnectionTiming) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    timing.linger();
}

/// Whether the body ended within [`DRAIN_BYTES`].
async fn drain(mut body: Incoming) -> bool {
    let mut left = DRAIN_BYTES;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let length = frame.data_ref().map_or(0, |data| data.len() as u64);
        let Some(less) = left.checked_sub(length) else { return false };
        left = less;
    }
    true
}

impl Leftover {
    fn lock(&self) -> MutexGuard<'_, LeftoverState> {
        self.0.lock()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.leftover.lock().rest = self.body.take();
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.leftover.lock().was_read = true;
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}
