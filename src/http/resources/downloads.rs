//! Contents of files on their way to clients.
//!
//! A client that reads nothing keeps pieces of its file in memory until its write timeout. So downloads
//! have places: all of them together take no more than a part of what the process may have, and those of
//! one caller half of it. A download that waits for its place for too long is refused.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use axum::body::Body;
use futures::stream;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::bounds::memory;
use crate::fairness;
use crate::http::edge::problem::{Code, Problem};
use crate::run::Caller;
use crate::tools::file_content::{Content, PIECE};

/// What a download has in memory at most: what a connection keeps that cannot be sent, and what is read.
const IN_MEMORY: u32 = (128 << 10) + PIECE;
/// The minimum and maximum of memory that all downloads may take, in bytes.
const LEAST: u64 = 8 << 20;
const MOST: u64 = 1 << 30;
/// How long a download waits for its place.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// The places of all downloads, in bytes.
static DOWNLOADS: LazyLock<Downloads> = LazyLock::new(|| {
    let most = memory::part().unwrap_or(MOST).clamp(LEAST, MOST);
    Downloads::new(usize::try_from(most).unwrap_or(usize::MAX))
});

struct Downloads {
    all: Arc<Semaphore>,
    of_one: usize,
    /// By tenant and subject, while they have a place or wait for one.
    callers: Mutex<HashMap<(String, String), Weak<Semaphore>>>,
}

/// The place of one download.
#[derive(Debug)]
pub(super) struct DownloadPlace {
    all: OwnedSemaphorePermit,
    of_caller: OwnedSemaphorePermit,
}

impl Downloads {
    fn new(most: usize) -> Self {
        let all = Arc::new(Semaphore::new(most));
        Self { all, of_one: most / 2, callers: Mutex::default() }
    }

    fn of_caller(&self, caller: &Caller) -> Arc<Semaphore> {
        let name = (caller.tenant.clone(), caller.subject.clone());
        let mut callers = self.callers.lock();
        let own = callers.get(&name).and_then(Weak::upgrade).unwrap_or_else(|| {
            callers.retain(|_, downloading| downloading.strong_count() > 0);
            Arc::new(Semaphore::new(self.of_one))
        });
        callers.insert(name, Arc::downgrade(&own));
        own
    }

    /// Waits for a place, those of the same caller first among themselves.
    async fn place(&self, caller: &Caller) -> Result<DownloadPlace, Problem> {
        let own = self.of_caller(caller);
        let both = async {
            let of_caller = own.acquire_many_owned(IN_MEMORY).await.ok()?;
            let all = Arc::clone(&self.all).acquire_many_owned(IN_MEMORY).await.ok()?;
            Some(DownloadPlace { all, of_caller })
        };
        let place = tokio::time::timeout(MAX_WAIT, both).await.ok().flatten();
        place.ok_or_else(|| Problem::new(Code::Overloaded, "Too many downloads are in progress."))
    }
}

/// Waits for the place of a download, before its file is opened.
pub(super) async fn place(caller: &Caller) -> Result<DownloadPlace, Problem> {
    DOWNLOADS.place(caller).await
}

impl DownloadPlace {
    /// Gives back what a content of so many bytes does not need.
    fn shrink_to(&mut self, bytes: u64) {
        let needed = u32::try_from(bytes).unwrap_or(u32::MAX).clamp(PIECE, IN_MEMORY);
        for permit in [&mut self.all, &mut self.of_caller] {
            drop(permit.split((IN_MEMORY - needed) as usize));
        }
    }
}

/// A part of a file, of which a piece is read when the client has taken the one before.
pub(super) fn body(content: Content, bytes: u64, mut place: DownloadPlace) -> Body {
    place.shrink_to(bytes);
    Body::from_stream(stream::try_unfold((content, place), |(mut content, place)| async move {
        let read = move || (content.next_piece(), content);
        let done = fairness::blocking(read).await;
        let (piece, content) = done.map_err(|stopped| io::Error::other(stopped.to_string()))?;
        io::Result::Ok(piece?.map(|piece| (piece, (content, place))))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(subject: &str) -> Caller {
        Caller { subject: subject.into(), ..Caller::local() }
    }

    #[tokio::test(start_paused = true)]
    async fn one_caller_has_half_of_the_places_and_the_others_the_rest() {
        let downloads = Downloads::new(4 * IN_MEMORY as usize);
        let (one, other, third) = (caller("one"), caller("other"), caller("third"));
        let mut first = downloads.place(&one).await.unwrap();
        let second = downloads.place(&one).await.unwrap();
        assert_eq!(downloads.place(&one).await.unwrap_err().code(), Code::Overloaded);
        let others =
            (downloads.place(&other).await.unwrap(), downloads.place(&other).await.unwrap());
        assert!(downloads.place(&third).await.is_err(), "all places are taken");
        first.shrink_to(1);
        assert!(downloads.place(&third).await.is_err(), "a small content has a small place");
        drop((second, others.0));
        downloads.place(&one).await.unwrap();
        downloads.place(&third).await.unwrap();
        drop((first, others.1));
        downloads.place(&one).await.unwrap();
        assert!(downloads.callers.lock().len() <= 3);
    }
}
