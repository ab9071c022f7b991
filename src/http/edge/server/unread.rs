//! What a handler left unread of a request's body.
//!
//! An HTTP/1.1 connection can only be used again once the whole body was read, and closing one on
//! which the client still sends resets it before the answer is read. So a refusal that needs no
//! body reads the rest and drops it, within bounds; beyond them the answer says
//! `Connection: close`, and the socket lingers (RFC 9112, section 9.6).

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

use super::pace::Pace;

/// How much of a body is read and dropped, and for how long.
const DRAIN_BYTES: u64 = 32 << 20;
const DRAIN_PATIENCE: Duration = Duration::from_secs(3);

/// A request's body on loan to its handler: what is not read comes back.
#[derive(Debug)]
pub(super) struct LentBody {
    body: Option<Incoming>,
    lender: Arc<Lender>,
}

#[derive(Debug, Default)]
struct Lender(Mutex<Loan>);

#[derive(Debug, Default)]
struct Loan {
    returned: Option<Incoming>,
    /// The handler began to read, so a client that waits for `100 Continue` was told to go on.
    was_read: bool,
}

/// The claim to what a handler leaves unread.
#[derive(Debug)]
pub(super) struct Unread {
    lender: Arc<Lender>,
    version: Version,
    waits_for_continue: bool,
}

/// Lends the body of a request.
pub(super) fn lend(request: Request<Incoming>) -> (Request<LentBody>, Unread) {
    let lender = Arc::new(Lender::default());
    let unread = Unread {
        lender: Arc::clone(&lender),
        version: request.version(),
        waits_for_continue: request.headers().contains_key(EXPECT),
    };
    (request.map(|body| LentBody { body: Some(body), lender }), unread)
}

impl Unread {
    /// Reads the rest of the body and drops it. Where that is too much, the connection ends with
    /// this answer.
    pub(super) async fn settle<B>(self, response: &mut Response<B>, pace: &Pace) {
        let (rest, was_read) = {
            let mut loan = self.lender.lock();
            (loan.returned.take(), loan.was_read)
        };
        let Some(rest) = rest.filter(|rest| !rest.is_end_stream()) else { return };
        // HTTP/2 resets the stream and keeps the connection.
        if self.version >= Version::HTTP_2 {
            return;
        }
        let may_drain =
            rest.size_hint().lower() <= DRAIN_BYTES && (was_read || !self.waits_for_continue);
        if may_drain && matches!(tokio::time::timeout(DRAIN_PATIENCE, drain(rest)).await, Ok(true))
        {
            return;
        }
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        pace.linger();
    }
}

/// Whether the body ended within the bound.
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

impl Lender {
    fn lock(&self) -> MutexGuard<'_, Loan> {
        self.0.lock()
    }
}

impl Drop for LentBody {
    fn drop(&mut self) {
        self.lender.lock().returned = self.body.take();
    }
}

impl Body for LentBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.lender.lock().was_read = true;
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
