//! Response bodies that keep their request open for [`super::timing`], and record for
//! [`super::stall`] whether the client is being waited for.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Error;
use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};

use super::stall;
use super::timing::OpenRequest;

#[derive(Debug)]
pub(super) struct ResponseBody {
    body: Body,
    open: OpenRequest,
}

impl ResponseBody {
    pub(super) fn new(body: Body, open: OpenRequest) -> Self {
        stall::set_waiting_for_client(Some(open.answer()));
        Self { body, open }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        let answer = self.open.answer();
        stall::set_waiting_for_client(matches!(frame, Poll::Ready(Some(_))).then_some(answer));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
