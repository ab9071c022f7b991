//! How many runs of a tenant, and of one of its keys, are under way, where that is limited.
//!
//! A run that is stored as running has a place by that; before it is stored, a row of `run_places` has
//! it. Runs that another run started are in its place and do not count, parked ones have none. A place
//! is taken, and a queued run claimed, in a transaction that has the lock of the tenant while it
//! counts: replicas together pass no limit. A row whose run is stored counts no more, and is deleted by
//! the next transaction; those of a dead replica go when it is declared dead.

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::conflict::retry_conflicts;
use super::sql::{Query, Row};
use super::{Store, StoreError};

/// How long a place waits for those that are taken of the same tenant.
const MAX_WAIT: Duration = Duration::from_secs(1);

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
    #[error("the tenant has reached its limit of {0} runs in progress")]
    OfTenant(u32),
    #[error("the key has reached its limit of {0} runs in progress")]
    OfKey(u32),
}

/// A place that a run is to have until it is stored.
#[derive(Debug, Clone, Copy)]
pub struct RunPlace<'p> {
    pub id: Uuid,
    pub owner: &'p str,
    pub run: Uuid,
    pub tenant: &'p str,
    pub subject: &'p str,
    /// Of the runs with the same key one will be stored: they share a place.
    pub idempotency_key: Option<&'p str>,
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
        let reached = |limit: &u32, runs: u32| runs >= *limit;
        let tenants = self.limits.of_tenant.filter(|limit| reached(limit, self.of_tenant(tenant)));
        let keys = self.limits.of_key.filter(|limit| reached(limit, self.of_key(tenant, subject)));
        tenants.map(LimitReached::OfTenant).or(keys.map(LimitReached::OfKey))
    }

    /// Whether nothing is counted.
    pub(super) fn is_unlimited(&self) -> bool {
        self.limits.is_unlimited()
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

    /// How many runs of a key are under way.
    pub fn of_key(&self, tenant: &str, subject: &str) -> u32 {
        self.counts.get(&(tenant.to_owned(), subject.to_owned())).copied().unwrap_or_default()
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

/// Counts the runs under way; `of_run` and `of_place` restrict them.
fn count(of_run: &str, of_place: &str) -> Query {
    Query::new(format!(
        "SELECT tenant, subject, count(*) AS runs FROM (\
         SELECT tenant, subject FROM runs WHERE status = 'running' AND parent_run_id IS NULL \
         AND owner IN (SELECT id FROM replicas WHERE NOT dead){of_run} UNION ALL \
         SELECT tenant, subject FROM (SELECT DISTINCT tenant, subject, idempotency_key, \
         CASE WHEN idempotency_key IS NULL THEN run_id END AS run_id FROM run_places p \
         WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = p.run_id){of_place}) AS starting\
         ) AS under_way GROUP BY tenant, subject"
    ))
}

fn count_of(tenant: &str) -> Query {
    count(" AND tenant = :tenant", " AND p.tenant = :tenant").bind("tenant", tenant)
}

impl Running {
    fn read(limits: RunLimits, rows: &[Row]) -> Result<Self, StoreError> {
        let mut running = Self { limits, ..Self::default() };
        for row in rows {
            let (tenant, subject): (String, String) = (row.read("tenant")?, row.read("subject")?);
            running.add(&tenant, &subject, row.read("runs")?);
        }
        Ok(running)
    }

    /// Counts the runs of a tenant anew.
    pub(super) async fn recount(
        &mut self,
        tx: &mut dyn Transaction,
        tenant: &str,
    ) -> Result<(), StoreError> {
        let now = Self::read(self.limits, &tx.run(count_of(tenant)).await?)?;
        self.counts.retain(|(of, _), _| of != tenant);
        self.counts.extend(now.counts);
        Ok(())
    }
}

impl Store {
    /// The runs under way, where there are limits.
    ///
    /// # Errors
    /// [`StoreError`] where the store does not answer.
    pub async fn running(&self, limits: RunLimits) -> Result<Running, StoreError> {
        if limits.is_unlimited() {
            return Ok(Running::default());
        }
        let rows = self.backend.read(Work::Control, count("", "")).await?;
        Running::read(limits, &rows)
    }

    /// Takes a place; `Err` within: there is none. One that was taken is for the run's replica to give
    /// back until the run is stored.
    ///
    /// # Errors
    /// [`StoreError`] where it is not known whether it was taken.
    pub async fn take_place(
        &self,
        place: RunPlace<'_>,
        limits: RunLimits,
    ) -> Result<Result<(), LimitReached>, StoreError> {
        let RunPlace { tenant, subject, .. } = place;
        // Most of those that are refused need no lock.
        let rows = self.backend.read(Work::Data, count_of(tenant)).await?;
        if let Some(reached) = Running::read(limits, &rows)?.refuses(tenant, subject)
            && self.backend.read(Work::Data, shared_with(place)).await?.is_empty()
        {
            return Ok(Err(reached));
        }
        retry_conflicts(|| self.take_place_locked(place, limits)).await
    }

    async fn take_place_locked(
        &self,
        place: RunPlace<'_>,
        limits: RunLimits,
    ) -> Result<Result<(), LimitReached>, StoreError> {
        let RunPlace { tenant, subject, .. } = place;
        let mut tx = self.backend.begin(Work::Data).await?;
        if !tx.lock_tenant(tenant, MAX_WAIT).await? {
            return Err(StoreError::Unavailable("the places of the tenant are locked".to_owned()));
        }
        let stored = Query::new(
            "DELETE FROM run_places WHERE tenant = :tenant \
             AND EXISTS (SELECT 1 FROM runs WHERE runs.id = run_places.run_id)",
        );
        tx.run(stored.bind("tenant", tenant)).await?;
        let mut running = Running { limits, ..Running::default() };
        running.recount(&mut *tx, tenant).await?;
        let mut taken = running.refuses(tenant, subject).map_or(Ok(()), Err);
        if taken.is_err() && !tx.run(shared_with(place)).await?.is_empty() {
            taken = Ok(());
        }
        if taken.is_ok() {
            let take = Query::new(
                "INSERT INTO run_places \
                 (id, tenant, subject, run_id, idempotency_key, owner, taken_at) \
                 VALUES (:id, :tenant, :subject, :run, :key, :owner, {now})",
            );
            let take = take.bind("id", place.id).bind("owner", place.owner).bind("run", place.run);
            let take = take.bind("tenant", tenant).bind("subject", subject);
            tx.run(take.bind("key", place.idempotency_key)).await?;
        }
        tx.commit().await?;
        Ok(taken)
    }

    /// Gives back places of runs that are not going to be stored.
    ///
    /// # Errors
    /// [`StoreError`] where they may be taken still.
    pub async fn give_places_back(&self, places: &[Uuid]) -> Result<(), StoreError> {
        let give_back = Query::new("DELETE FROM run_places WHERE id IN :places");
        self.backend.write(Work::Control, give_back.bind("places", places)).await?;
        Ok(())
    }

    /// Gives back all places of an owner that it took so long ago, except these.
    ///
    /// # Errors
    /// The same.
    pub async fn give_other_places_back(
        &self,
        owner: &str,
        held: &[Uuid],
        age: Duration,
    ) -> Result<(), StoreError> {
        let give_back = Query::new(
            "DELETE FROM run_places WHERE owner = :owner AND NOT (id IN :held) \
             AND taken_at <= {now} - :age",
        );
        let give_back = give_back.bind("owner", owner).bind("held", held).bind("age", age);
        self.backend.write(Work::Control, give_back).await?;
        Ok(())
    }
}

/// The places of the same run, or of runs with the same idempotency key: one of them will be stored.
fn shared_with(place: RunPlace<'_>) -> Query {
    let look = Query::new(
        "SELECT 1 FROM run_places \
         WHERE tenant = :tenant AND (run_id = :run OR idempotency_key = :key) LIMIT 1",
    );
    let look = look.bind("tenant", place.tenant).bind("run", place.run);
    look.bind("key", place.idempotency_key)
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
