//! The body of an answer on its way to the client: it keeps its request open, and notes when it
//! waits for the client to take more.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Error;
use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};

use super::pace::OpenRequest;
use super::stall;

/// The body of an answer; its request is open for as long as it exists.
#[derive(Debug)]
pub(super) struct Answer {
    body: Body,
    _open: OpenRequest,
}

impl Answer {
    pub(super) fn new(body: Body, open: OpenRequest) -> Self {
        stall::untaken(true);
        Self { body, _open: open }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        stall::untaken(matches!(frame, Poll::Ready(Some(_))));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
