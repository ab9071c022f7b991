//! The memory of request heads, while they arrive.
//!
//! A client needs no key to send a part of a head, and decides when the rest comes. So large heads have places: all
//! of them together take no more than a part of what the process may have, and those of one address half of it. If
//! there is no place for a head, its connection is closed.

use std::net::IpAddr;
use std::sync::LazyLock;

use super::BUFFER;
use crate::bounds::memory::{TenantMemory, TenantPermit};

/// Bytes of a head that needs no place: each connection has a buffer of this size.
const SMALL: usize = 8 << 10;

static PLACES: LazyLock<TenantMemory> = LazyLock::new(TenantMemory::of_share);

/// The memory of one head.
#[derive(Debug, Default)]
pub(super) struct HeadMemory {
    bytes: usize,
    place: Option<TenantPermit<'static>>,
}

impl HeadMemory {
    /// Adds bytes of the head. False if it is large and there is no place for it.
    pub(super) fn grow(&mut self, bytes: usize, client: IpAddr) -> bool {
        self.grow_within(&PLACES, bytes, client)
    }

    /// Takes the place of a large head. False if there is none.
    pub(super) fn hold(&mut self, client: IpAddr) -> bool {
        self.hold_within(&PLACES, client)
    }

    fn grow_within(&mut self, places: &'static TenantMemory, bytes: usize, client: IpAddr) -> bool {
        self.bytes += bytes;
        self.bytes <= SMALL || self.hold_within(places, client)
    }

    fn hold_within(&mut self, places: &'static TenantMemory, client: IpAddr) -> bool {
        if self.place.is_none() {
            self.place = places.try_acquire(&client.to_string(), BUFFER as u64);
        }
        self.place.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_heads_from_one_address_have_half_of_the_memory() {
        static FEW: LazyLock<TenantMemory> = LazyLock::new(|| TenantMemory::of_kib(512));
        let begun = |client: u8, bytes| {
            let mut head = HeadMemory::default();
            head.grow_within(&FEW, bytes, IpAddr::from([127, 0, 0, client])).then_some(head)
        };
        let mut one = begun(1, SMALL + 1).unwrap();
        let other = begun(1, BUFFER).unwrap();
        assert!(begun(1, SMALL + 1).is_none());
        let mut small = begun(1, SMALL).unwrap();
        let client = IpAddr::from([127, 0, 0, 1]);
        assert!(!small.grow_within(&FEW, 1, client), "it is a large one now");
        assert!(begun(2, SMALL + 1).is_some());
        assert!(one.grow_within(&FEW, BUFFER, client), "it has its place already");
        drop(other);
        assert!(begun(1, SMALL + 1).is_some());
    }
}
