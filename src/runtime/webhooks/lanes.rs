//! Limits the deliveries in progress: in total, of one tenant, and of one tenant to one host (a lane).
//!
//! A hanging receiver delays only its own deliveries: it gets one at a time until it answers again.

use std::collections::{HashMap, HashSet};

const MAX_IN_ALL: usize = 128;
const MAX_OF_TENANT: usize = 64;
const MAX_OF_LANE: usize = 8;
/// In a lane whose last delivery timed out.
const MAX_OF_HANGING_LANE: usize = 1;
/// Hanging lanes that are remembered; if there are more, all are forgotten.
const MOST_HANGING: usize = 4096;

/// The state of a receiver, as an attempt has found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceiverState {
    /// Unknown: nothing was sent, or the outcome is lost.
    Unknown,
    /// It answers, or refuses at once.
    InTime,
    /// No answer came in time.
    Hangs,
}

/// Deliveries in progress. A lane is `<tenant> <host>`.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    under_way: usize,
    per_tenant: HashMap<String, usize>,
    per_lane: HashMap<String, usize>,
    hanging: HashSet<String>,
}

impl Lanes {
    /// How many further deliveries may be sent in this lane.
    pub(super) fn free(&self, lane: &str) -> usize {
        let count = |of: &HashMap<String, usize>, key| of.get(key).copied().unwrap_or_default();
        let of_lane = if self.hanging.contains(lane) { MAX_OF_HANGING_LANE } else { MAX_OF_LANE };
        (MAX_IN_ALL - self.under_way)
            .min(MAX_OF_TENANT - count(&self.per_tenant, tenant(lane)))
            .min(of_lane.saturating_sub(count(&self.per_lane, lane)))
    }

    /// Counts one more delivery; the limits must allow it.
    pub(super) fn enter(&mut self, lane: &str) {
        self.under_way += 1;
        *self.per_tenant.entry(tenant(lane).to_owned()).or_default() += 1;
        *self.per_lane.entry(lane.to_owned()).or_default() += 1;
    }

    pub(super) fn leave(&mut self, lane: &str, state: ReceiverState) {
        self.note(lane, state);
        self.under_way -= 1;
        for (of, key) in [(&mut self.per_tenant, tenant(lane)), (&mut self.per_lane, lane)] {
            if let Some(count) = of.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    of.remove(key);
                }
            }
        }
    }

    fn note(&mut self, lane: &str, state: ReceiverState) {
        match state {
            ReceiverState::Unknown => {}
            ReceiverState::InTime => _ = self.hanging.remove(lane),
            ReceiverState::Hangs if self.hanging.contains(lane) => {}
            ReceiverState::Hangs => {
                if self.hanging.len() >= MOST_HANGING {
                    self.hanging.clear();
                }
                self.hanging.insert(lane.to_owned());
            }
        }
    }
}

/// The tenant of a lane.
pub(super) fn tenant(lane: &str) -> &str {
    lane.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_host_and_no_tenant_takes_all_capacity() {
        let mut lanes = Lanes::default();
        for host in 0..20 {
            let lane = format!("acme host{host}:443");
            let free = lanes.free(&lane);
            assert_eq!(free, if host < MAX_OF_TENANT / MAX_OF_LANE { MAX_OF_LANE } else { 0 });
            (0..free).for_each(|_| lanes.enter(&lane));
        }
        assert_eq!(lanes.free("other host1:443"), MAX_OF_LANE);
        lanes.leave("acme host3:443", ReceiverState::InTime);
        assert_eq!((lanes.free("acme host3:443"), lanes.free("acme host4:443")), (1, 0));
    }

    #[test]
    fn a_hanging_host_gets_one_delivery_until_it_answers() {
        let (mut lanes, lane) = (Lanes::default(), "acme host:443");
        (0..MAX_OF_LANE).for_each(|_| lanes.enter(lane));
        lanes.leave(lane, ReceiverState::Unknown);
        assert_eq!(lanes.free(lane), 1);
        for _ in 1..MAX_OF_LANE {
            lanes.leave(lane, ReceiverState::Hangs);
            let left = lanes.per_lane.get(lane).copied().unwrap_or_default();
            assert_eq!(lanes.free(lane), usize::from(left == 0));
        }
        assert_eq!(lanes.free("acme other:443"), MAX_OF_LANE);
        lanes.enter(lane);
        lanes.leave(lane, ReceiverState::InTime);
        assert_eq!((lanes.free(lane), lanes.hanging.len()), (MAX_OF_LANE, 0));
        for host in 0..3 * MOST_HANGING {
            let lane = format!("acme host{host}:443");
            lanes.enter(&lane);
            lanes.leave(&lane, ReceiverState::Hangs);
        }
        assert!(lanes.hanging.len() <= MOST_HANGING);
    }
}
