//! How many runs of a tenant, and of one of its keys, are under way, where that is limited.
//!
//! A replica knows its own; those of the others are counted in the store. Runs that another run
//! started are in its place and do not count, parked ones have none.

use std::collections::BTreeMap;

use super::backend::Work;
use super::sql::Query;
use super::{Store, StoreError};

/// How many runs may be under way at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunLimits {
    /// Of one tenant; absent: any number.
    pub of_tenant: Option<u32>,
    /// Of one key, or of one other caller.
    pub of_key: Option<u32>,
}

/// Whose limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitReached {
    #[error("the tenant has as many runs under way as it may, which is {0}")]
    OfTenant(u32),
    #[error("the key has as many runs under way as it may, which is {0}")]
    OfKey(u32),
}

/// The runs under way, by tenant and subject.
#[derive(Debug, Clone, Default)]
pub struct Running {
    limits: RunLimits,
    counts: BTreeMap<(String, String), u32>,
    /// Whether a queued run was left where it is because of a limit.
    pub(super) has_held_back: bool,
}

impl RunLimits {
    /// Whether nothing has to be counted.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

impl Running {
    /// So many more of them are under way.
    pub fn add(&mut self, tenant: &str, subject: &str, runs: u32) {
        if !self.limits.is_unlimited() {
            *self.counts.entry((tenant.to_owned(), subject.to_owned())).or_default() += runs;
        }
    }

    /// Why another run may not begin.
    pub fn refuses(&self, tenant: &str, subject: &str) -> Option<LimitReached> {
        let of_key = self.counts.get(&(tenant.to_owned(), subject.to_owned())).copied();
        let reached = |limit: &u32, runs: u32| runs >= *limit;
        let tenants = self.limits.of_tenant.filter(|limit| reached(limit, self.of_tenant(tenant)));
        let keys = self.limits.of_key.filter(|limit| reached(limit, of_key.unwrap_or_default()));
        tenants.map(LimitReached::OfTenant).or(keys.map(LimitReached::OfKey))
    }

    /// Whether queued runs wait for one of these to end.
    pub fn has_held_back(&self) -> bool {
        self.has_held_back
    }

    fn of(&self, tenant: &str) -> impl Iterator<Item = (&str, u32)> {
        let from = (tenant.to_owned(), String::new());
        let tenant = tenant.to_owned();
        self.counts
            .range(from..)
            .take_while(move |((of, _), _)| *of == tenant)
            .map(|((_, subject), runs)| (subject.as_str(), *runs))
    }

    fn of_tenant(&self, tenant: &str) -> u32 {
        self.of(tenant).map(|(_, runs)| runs).sum()
    }

    /// How many more runs of a tenant may be claimed at once: where keys have limits, one by one.
    pub(super) fn room(&self, tenant: &str) -> u32 {
        let left = self
            .limits
            .of_tenant
            .map_or(u32::MAX, |limit| limit.saturating_sub(self.of_tenant(tenant)));
        left.min(self.limits.of_key.map_or(u32::MAX, |_| 1))
    }

    /// Whose runs have to wait.
    pub(super) fn full_keys(&self, tenant: &str) -> Vec<String> {
        let Some(limit) = self.limits.of_key else { return Vec::new() };
        let full = self.of(tenant).filter(|(_, runs)| *runs >= limit);
        full.map(|(subject, _)| subject.to_owned()).collect()
    }
}

impl Store {
    /// The runs that other replicas drive, where there are limits; none of those are counted that are
    /// in the place of another run.
    ///
    /// # Errors
    /// [`StoreError`] where the store does not answer.
    pub async fn running_elsewhere(
        &self,
        owner: &str,
        limits: RunLimits,
    ) -> Result<Running, StoreError> {
        let mut running = Running { limits, ..Running::default() };
        if limits.is_unlimited() {
            return Ok(running);
        }
        let count = Query::new(
            "SELECT tenant, subject, count(*) AS runs FROM runs WHERE status = 'running' \
             AND owner <> :owner AND parent_run_id IS NULL GROUP BY tenant, subject",
        );
        for row in self.backend.read(Work::Control, count.bind("owner", owner)).await? {
            let (tenant, subject): (String, String) = (row.read("tenant")?, row.read("subject")?);
            running.add(&tenant, &subject, row.read("runs")?);
        }
        Ok(running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_of_tenants_and_of_keys() {
        let limits = RunLimits { of_tenant: Some(3), of_key: Some(2) };
        let mut running = Running { limits, ..Running::default() };
        running.add("a", "x", 2);
        running.add("b", "x", 1);
        assert_eq!(running.refuses("a", "x"), Some(LimitReached::OfKey(2)));
        assert_eq!((running.refuses("a", "y"), running.room("a")), (None, 1));
        assert_eq!(running.full_keys("a"), ["x"]);
        assert!(running.full_keys("b").is_empty());
        running.add("a", "y", 1);
        assert_eq!(running.refuses("a", "z"), Some(LimitReached::OfTenant(3)));
        assert_eq!((running.room("a"), running.room("b"), running.room("c")), (0, 1, 1));
        let mut unlimited = Running::default();
        unlimited.add("a", "x", 9);
        assert_eq!((unlimited.refuses("a", "x"), unlimited.room("a")), (None, u32::MAX));
    }
}
