//! Large request bodies, while they arrive and are read.
//!
//! A body is in memory from its first byte on, and its client decides how slowly the last one comes. So large
//! bodies have places: all of them together take no more than a part of what the process may have, and those of
//! one tenant half of it. A body that finds no place is refused at once: while it waited, it would hold back
//! others on its connection.

use std::sync::{Arc, LazyLock, OnceLock};

use axum::http::Extensions;

use super::problem::{Code, Problem};
use crate::bounds::memory::{TenantMemory, TenantPermit};
use crate::run::Caller;

/// Bytes of a body that needs no place.
pub(super) const SMALL: usize = 16 << 10;

static PLACES: LazyLock<TenantMemory> = LazyLock::new(TenantMemory::of_share);

/// In the extensions of a request: who sends it, once that is known.
#[derive(Debug, Clone, Default)]
pub(super) struct Sender(Arc<OnceLock<Arc<Caller>>>);

impl Sender {
    pub(super) fn set(&self, caller: &Arc<Caller>) {
        let _ = self.0.set(Arc::clone(caller));
    }
}

/// The place of one body, which is taken when the body turns out to be large.
#[derive(Debug)]
pub(crate) struct BodyPlace {
    places: &'static TenantMemory,
    tenant: String,
    taken: Option<TenantPermit<'static>>,
}

impl BodyPlace {
    pub(crate) fn of(tenant: &str) -> Self {
        Self { places: &PLACES, tenant: tenant.to_owned(), taken: None }
    }

    /// The place of the body of a request with these extensions.
    pub(super) fn of_request(extensions: &Extensions) -> Self {
        let caller = extensions.get::<Sender>().and_then(|sender| sender.0.get());
        Self::of(caller.map_or("", |caller| &caller.tenant))
    }

    /// Takes the place of a body of which so many bytes have come, and `most` may come.
    ///
    /// # Errors
    /// There is no place for it.
    pub(crate) fn hold(&mut self, bytes: usize, most: usize) -> Result<(), Problem> {
        if bytes <= SMALL || self.taken.is_some() {
            return Ok(());
        }
        self.taken = self.places.try_acquire(&self.tenant, most as u64);
        if self.taken.is_some() {
            return Ok(());
        }
        let detail = "Too many large request bodies are arriving; retry after Retry-After.";
        Err(Problem::new(Code::Overloaded, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_bodies_of_one_tenant_have_half_of_the_memory() {
        static FEW: LazyLock<TenantMemory> = LazyLock::new(|| TenantMemory::of_kib(4 << 10));
        let most = 1 << 20;
        let held = |tenant: &str, bytes| {
            let mut place = BodyPlace { places: &FEW, ..BodyPlace::of(tenant) };
            place.hold(bytes, most).map(|()| place).map_err(|refused| refused.code())
        };
        let mut one = held("one", SMALL + 1).unwrap();
        let other = held("one", SMALL + 1).unwrap();
        assert_eq!(held("one", SMALL + 1).unwrap_err(), Code::Overloaded);
        assert!(held("one", SMALL).is_ok(), "a small body needs no place");
        assert!(held("another", SMALL + 1).is_ok());
        one.hold(most, most).unwrap(); // it has its place already
        drop(other);
        assert!(held("one", most).is_ok());
    }
}
