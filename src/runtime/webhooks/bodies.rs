//! Limits the memory of bodies: in total, of one tenant, and of one tenant to one host (a lane).
//!
//! A body is in memory until its receiver has answered. A hanging receiver delays only its own large bodies.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::lanes::tenant;
use crate::bounds::memory;

/// Bodies up to this number of bytes are not limited.
const SMALL: u64 = 64 << 10;
/// The least and the most that all bodies may take.
const LEAST: u64 = 8 << 20;
const MOST: u64 = 1 << 30;
/// A tenant may take 1/2 of the memory, and 1/16 for one host.
const PARTS_OF_TENANT: u64 = 2;
const PARTS_OF_LANE: u64 = 16;

/// The memory of all bodies of deliveries in progress.
#[derive(Debug)]
pub(super) struct Bodies {
    most: u64,
    reserved: Mutex<ReservedBytes>,
    released: Notify,
}

/// Bytes that are reserved. A lane is `<tenant> <host>`.
#[derive(Debug, Default)]
struct ReservedBytes {
    in_all: u64,
    per_tenant: HashMap<String, u64>,
    per_lane: HashMap<String, u64>,
}

/// The memory reserved for one body.
#[derive(Debug)]
pub(super) struct BodyReservation {
    bodies: Arc<Bodies>,
    lane: String,
    bytes: u64,
}

impl Bodies {
    pub(super) fn new() -> Arc<Self> {
        Self::of(memory::share_of_limit().unwrap_or(MOST).clamp(LEAST, MOST))
    }

    fn of(most: u64) -> Arc<Self> {
        Arc::new(Self { most, reserved: Mutex::default(), released: Notify::new() })
    }

    /// Waits until there is memory for a body of this size. A body that exceeds a limit waits until it is the
    /// only one under that limit.
    pub(super) async fn reserve(self: &Arc<Self>, lane: &str, bytes: u64) -> BodyReservation {
        let bytes = if bytes <= SMALL { 0 } else { bytes };
        loop {
            let mut released = pin!(self.released.notified());
            released.as_mut().enable();
            if self.reserved.lock().try_add(lane, bytes, self.most) {
                return BodyReservation { bodies: Arc::clone(self), lane: lane.to_owned(), bytes };
            }
            released.await;
        }
    }
}

impl ReservedBytes {
    fn try_add(&mut self, lane: &str, bytes: u64, most: u64) -> bool {
        let fits = |reserved: Option<&u64>, most: u64| {
            let reserved = reserved.copied().unwrap_or_default();
            bytes == 0 || reserved == 0 || reserved + bytes <= most
        };
        let fits_all = fits(Some(&self.in_all), most)
            && fits(self.per_tenant.get(tenant(lane)), most / PARTS_OF_TENANT)
            && fits(self.per_lane.get(lane), most / PARTS_OF_LANE);
        if fits_all && bytes > 0 {
            self.in_all += bytes;
            *self.per_tenant.entry(tenant(lane).to_owned()).or_default() += bytes;
            *self.per_lane.entry(lane.to_owned()).or_default() += bytes;
        }
        fits_all
    }

    fn subtract(&mut self, lane: &str, bytes: u64) {
        self.in_all -= bytes;
        for (of, key) in [(&mut self.per_tenant, tenant(lane)), (&mut self.per_lane, lane)] {
            if let Some(reserved) = of.get_mut(key) {
                *reserved -= bytes;
                if *reserved == 0 {
                    of.remove(key);
                }
            }
        }
    }
}

impl BodyReservation {
    /// Reduces the reservation to this size.
    pub(super) fn shrink_to(&mut self, bytes: u64) {
        self.release(self.bytes.saturating_sub(bytes));
    }

    fn release(&mut self, bytes: u64) {
        if bytes > 0 {
            self.bytes -= bytes;
            self.bodies.reserved.lock().subtract(&self.lane, bytes);
            self.bodies.released.notify_waiters();
        }
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        self.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const LANE: u64 = 1 << 20;

    #[tokio::test]
    async fn no_host_and_no_tenant_takes_all_memory() {
        let bodies = Bodies::of(16 * LANE);
        let reserve = |lane: &str, bytes| bodies.reserve(lane, bytes).now_or_never();
        let mut of_acme = Vec::new();
        for host in 0..8 {
            let lane = format!("acme host{host}:443");
            of_acme.push(reserve(&lane, LANE).unwrap());
            assert!(reserve(&lane, SMALL + 1).is_none(), "this host has its part");
            assert!(reserve(&lane, SMALL).is_some(), "small ones need none");
        }
        assert!(reserve("acme host8:443", LANE).is_none(), "the tenant has its part");
        assert!(reserve("other host0:443", 20 * LANE).is_none(), "a huge one is alone");
        let mut other = reserve("other host0:443", 8 * LANE).unwrap();
        assert!(reserve("third host0:443", LANE).is_none(), "no memory is left");
        other.shrink_to(LANE);
        let third = reserve("third host0:443", LANE).unwrap();
        let mut waiting = pin!(bodies.reserve("acme host8:443", LANE));
        assert!(waiting.as_mut().now_or_never().is_none());
        of_acme.pop();
        drop((waiting.await, of_acme, other, third));
        assert!(reserve("other host0:443", 20 * LANE).is_some());
        let reserved = bodies.reserved.lock();
        assert_eq!(
            (reserved.in_all, reserved.per_tenant.len(), reserved.per_lane.len()),
            (0, 0, 0)
        );
    }
}
