//! How many requests a key has open, event streams and waits included.
//!
//! A request counts from its authentication until its response is sent or given up, so that one key
//! cannot take all connections. Requests without a valid key end at once.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use axum::Error;
use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::Mutex;

/// Of all keys, by id.
#[derive(Debug, Default)]
pub(crate) struct OpenRequests(Mutex<HashMap<String, usize>>);

/// One request of a key.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    all: Arc<OpenRequests>,
    key: String,
}

impl OpenRequests {
    /// Counts a request of a key; `None` if it has that many already.
    pub(super) fn open(self: &Arc<Self>, key: &str, most: usize) -> Option<OpenRequest> {
        let mut counts = self.0.lock();
        match counts.get_mut(key) {
            Some(count) if *count >= most => return None,
            Some(count) => *count += 1,
            None => drop(counts.insert(key.to_owned(), 1)),
        }
        Some(OpenRequest { all: Arc::clone(self), key: key.to_owned() })
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let mut counts = self.all.0.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

/// The place of a request's count. Authentication fills it; the middleware passes it on to the
/// response.
#[derive(Debug, Clone, Default)]
pub(super) struct Counted(Arc<OnceLock<OpenRequest>>);

impl Counted {
    pub(super) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// The key's id or the token's subject, once the caller is known.
    pub(super) fn subject(&self) -> Option<&str> {
        self.0.get().map(|open| open.key.as_str())
    }

    pub(super) fn set(&self, open: OpenRequest) {
        let _ = self.0.set(open);
    }

    /// Keeps the request counted until the response is sent.
    pub(super) fn until_sent(self, response: Response) -> Response {
        if self.is_set() {
            response.map(|body| Body::new(CountedBody { body, _counted: self }))
        } else {
            response
        }
    }
}

struct CountedBody {
    body: Body,
    _counted: Counted,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_so_many_requests_open_and_each_key_its_own() {
        let all = Arc::<OpenRequests>::default();
        let (first, second) = (all.open("a", 2).unwrap(), all.open("a", 2).unwrap());
        assert!(all.open("a", 2).is_none());
        let other = all.open("b", 2).unwrap();
        drop(first);
        let third = all.open("a", 2).unwrap();
        assert!(all.open("a", 2).is_none());
        drop((second, third, other));
        assert!(all.0.lock().is_empty());
    }
}
