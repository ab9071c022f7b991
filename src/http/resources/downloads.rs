//! Contents of files while they are sent to clients.
//!
//! A client that reads nothing keeps pieces of its file in memory until its write timeout. So downloads
//! have places: all of them together take no more than a part of what the process may have, and those of
//! one caller half of it. A download that waits for its place for too long is refused.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use axum::body::Body;
use futures::stream;

use crate::bounds::memory::{self, TenantPermit, TenantSemaphore};
use crate::fairness;
use crate::http::edge::problem::{Code, Problem};
use crate::run::Caller;
use crate::tools::file_content::{Content, PIECE};

/// The most memory of a download: the unsent bytes of its connection, and the piece that is being read.
const IN_MEMORY: u32 = (128 << 10) + PIECE;
/// The minimum and maximum of memory that all downloads may take, in bytes.
const LEAST: u64 = 8 << 20;
const MOST: u64 = 1 << 30;
/// How long a download waits for its place.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// The permits of all downloads, in bytes.
static DOWNLOADS: LazyLock<TenantSemaphore> = LazyLock::new(|| {
    let most = memory::share_of_limit().unwrap_or(MOST).clamp(LEAST, MOST);
    TenantSemaphore::new(usize::try_from(most).unwrap_or(usize::MAX))
});

/// Waits for the place of a download, before its file is opened.
pub(super) async fn place(caller: &Caller) -> Result<TenantPermit<'static>, Problem> {
    place_in(&DOWNLOADS, caller).await
}

/// Waits for a place, those of the same caller first among themselves.
async fn place_in<'a>(
    downloads: &'a TenantSemaphore,
    caller: &Caller,
) -> Result<TenantPermit<'a>, Problem> {
    let name = format!("{}/{}", caller.tenant, caller.subject);
    let place = downloads.acquire_many(&name, IN_MEMORY);
    let place = tokio::time::timeout(MAX_WAIT, place).await.ok().flatten();
    place.ok_or_else(|| Problem::new(Code::Overloaded, "Too many downloads are in progress."))
}

/// Releases the permits that a content of this size does not need.
fn shrink(place: &mut TenantPermit<'_>, bytes: u64) {
    let needed = u32::try_from(bytes).unwrap_or(u32::MAX).clamp(PIECE, IN_MEMORY);
    place.release((IN_MEMORY - needed) as usize);
}

/// A part of a file; a piece is read when the client has received the one before.
pub(super) fn body(content: Content, bytes: u64, mut place: TenantPermit<'static>) -> Body {
    shrink(&mut place, bytes);
    Body::from_stream(stream::try_unfold((content, place), |(mut content, place)| async move {
        let read = move || (content.next_piece(), content);
        let done = fairness::on_files(read).await;
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
        let downloads = TenantSemaphore::new(4 * IN_MEMORY as usize);
        let (one, other, third) = (caller("one"), caller("other"), caller("third"));
        let mut first = place_in(&downloads, &one).await.unwrap();
        let second = place_in(&downloads, &one).await.unwrap();
        assert_eq!(place_in(&downloads, &one).await.unwrap_err().code(), Code::Overloaded);
        let fourth = place_in(&downloads, &other).await.unwrap();
        let others = (fourth, place_in(&downloads, &other).await.unwrap());
        assert!(place_in(&downloads, &third).await.is_err(), "all places are taken");
        shrink(&mut first, 1);
        assert!(place_in(&downloads, &third).await.is_err(), "a small content has a small place");
        drop((second, others.0));
        place_in(&downloads, &one).await.unwrap();
        place_in(&downloads, &third).await.unwrap();
        drop((first, others.1));
        place_in(&downloads, &one).await.unwrap();
    }
}
