//! How many deliveries may be under way: in all, of one tenant, and of one tenant to one host.
//!
//! A receiver that hangs keeps the deliveries to itself waiting, and no others.

use std::collections::HashMap;

const IN_ALL: usize = 128;
const OF_TENANT: usize = 64;
const OF_LANE: usize = 8;

/// Deliveries under way. A lane is `<tenant> <host>`.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    under_way: usize,
    per_tenant: HashMap<String, usize>,
    per_lane: HashMap<String, usize>,
}

impl Lanes {
    /// How many more may be sent in this lane.
    pub(super) fn free(&self, lane: &str) -> usize {
        let count = |of: &HashMap<String, usize>, key| of.get(key).copied().unwrap_or_default();
        (IN_ALL - self.under_way)
            .min(OF_TENANT - count(&self.per_tenant, tenant(lane)))
            .min(OF_LANE - count(&self.per_lane, lane))
    }

    /// One more is sent; there is room for it.
    pub(super) fn enter(&mut self, lane: &str) {
        self.under_way += 1;
        *self.per_tenant.entry(tenant(lane).to_owned()).or_default() += 1;
        *self.per_lane.entry(lane.to_owned()).or_default() += 1;
    }

    pub(super) fn leave(&mut self, lane: &str) {
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
}

/// Whose lane it is.
pub(super) fn tenant(lane: &str) -> &str {
    lane.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_host_and_no_tenant_takes_all_places() {
        let mut lanes = Lanes::default();
        for host in 0..20 {
            let lane = format!("acme host{host}:443");
            let free = lanes.free(&lane);
            assert_eq!(free, if host < OF_TENANT / OF_LANE { OF_LANE } else { 0 });
            (0..free).for_each(|_| lanes.enter(&lane));
        }
        assert_eq!(lanes.free("other host1:443"), OF_LANE);
        lanes.leave("acme host3:443");
        assert_eq!((lanes.free("acme host3:443"), lanes.free("acme host4:443")), (1, 0));
    }
}
