//! The limits on the runs in progress of a tenant and of one of its keys.
//!
//! A run counts while its row has the status running. Before its row is stored, its reservation counts, which is
//! a row of `run_places`. Child runs share the reservation of their root and do not count. Parked runs do not
//! count either. A transaction that reserves a run or claims a queued one holds the lock of the tenant while it
//! counts. So all replicas together never exceed a limit. A reservation whose run is stored no longer counts;
//! the next transaction deletes it. Reservations of a replica are deleted when it is declared dead.

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::conflict::retry_conflicts;
use super::sql::{Query, Row};
use super::{Store, StoreError};

/// How long a reservation waits for the lock of its tenant.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// How many runs may be in progress at the same time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunLimits {
    /// Of one tenant; `None`: any number.
    pub of_tenant: Option<u32>,
    /// Of one key, or of a caller without a key; `None`: any number.
    pub of_key: Option<u32>,
}

/// The limit that is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitReached {
    #[error("the tenant has reached its limit of {0} runs in progress")]
    OfTenant(u32),
    #[error("the key has reached its limit of {0} runs in progress")]
    OfKey(u32),
}

/// The reservation of a run, which counts until the run is stored.
#[derive(Debug, Clone, Copy)]
pub struct RunReservation<'p> {
    pub id: Uuid,
    pub owner: &'p str,
    pub run: Uuid,
    pub tenant: &'p str,
    pub subject: &'p str,
    /// Only one of the runs with the same key will be stored, so they share a reservation.
    pub idempotency_key: Option<&'p str>,
}

/// The number of runs in progress, by tenant and subject.
#[derive(Debug, Clone, Default)]
pub struct RunCounts {
    limits: RunLimits,
    counts: BTreeMap<(String, String), u32>,
    /// Whether a queued run was not claimed because of a limit.
    pub(super) has_held_back: bool,
}

impl RunLimits {
    /// Whether nothing has to be counted.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

impl RunCounts {
    /// Adds runs to the count.
    pub fn add(&mut self, tenant: &str, subject: &str, runs: u32) {
        if !self.limits.is_unlimited() {
            *self.counts.entry((tenant.to_owned(), subject.to_owned())).or_default() += runs;
        }
    }

    /// The limit that another run would exceed, if any.
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

    /// Whether queued runs wait for a counted run to end.
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

    /// How many runs of a key are in progress.
    pub fn of_key(&self, tenant: &str, subject: &str) -> u32 {
        self.counts.get(&(tenant.to_owned(), subject.to_owned())).copied().unwrap_or_default()
    }

    fn of_tenant(&self, tenant: &str) -> u32 {
        self.of(tenant).map(|(_, runs)| runs).sum()
    }

    /// How many more runs of a tenant may be claimed by one statement: only one if keys have limits.
    pub(super) fn claimable(&self, tenant: &str) -> u32 {
        let left = self
            .limits
            .of_tenant
            .map_or(u32::MAX, |limit| limit.saturating_sub(self.of_tenant(tenant)));
        left.min(self.limits.of_key.map_or(u32::MAX, |_| 1))
    }

    /// The keys whose limit is reached.
    pub(super) fn full_keys(&self, tenant: &str) -> Vec<String> {
        let Some(limit) = self.limits.of_key else { return Vec::new() };
        let full = self.of(tenant).filter(|(_, runs)| *runs >= limit);
        full.map(|(subject, _)| subject.to_owned()).collect()
    }
}

/// Counts the runs in progress; `of_run` and `of_reservation` are additional conditions.
fn count(of_run: &str, of_reservation: &str) -> Query {
    Query::new(format!(
        "SELECT tenant, subject, count(*) AS runs FROM (\
         SELECT tenant, subject FROM runs WHERE status = 'running' AND parent_run_id IS NULL \
         AND owner IN (SELECT id FROM replicas WHERE NOT dead){of_run} UNION ALL \
         SELECT tenant, subject FROM (SELECT DISTINCT tenant, subject, idempotency_key, \
         CASE WHEN idempotency_key IS NULL THEN run_id END AS run_id FROM run_places p \
         WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = p.run_id){of_reservation}) AS starting\
         ) AS under_way GROUP BY tenant, subject"
    ))
}

fn count_of(tenant: &str) -> Query {
    count(" AND tenant = :tenant", " AND p.tenant = :tenant").bind("tenant", tenant)
}

impl RunCounts {
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
    /// Counts the runs in progress if there are limits.
    ///
    /// # Errors
    /// [`StoreError`] if the store does not answer.
    pub async fn running(&self, limits: RunLimits) -> Result<RunCounts, StoreError> {
        if limits.is_unlimited() {
            return Ok(RunCounts::default());
        }
        let rows = self.backend.read(Work::Control, count("", "")).await?;
        RunCounts::read(limits, &rows)
    }

    /// Makes a reservation for a run; the inner `Err` is the limit that is reached. The run's replica must
    /// release the reservation if the run is not stored.
    ///
    /// # Errors
    /// [`StoreError`] if it is not known whether the reservation was made.
    pub async fn reserve_run(
        &self,
        reservation: RunReservation<'_>,
        limits: RunLimits,
    ) -> Result<Result<(), LimitReached>, StoreError> {
        let RunReservation { tenant, subject, .. } = reservation;
        // Most refusals need no lock.
        let rows = self.backend.read(Work::Data, count_of(tenant)).await?;
        if let Some(reached) = RunCounts::read(limits, &rows)?.refuses(tenant, subject)
            && self.backend.read(Work::Data, shared_with(reservation)).await?.is_empty()
        {
            return Ok(Err(reached));
        }
        retry_conflicts(|| self.reserve_run_locked(reservation, limits)).await
    }

    async fn reserve_run_locked(
        &self,
        reservation: RunReservation<'_>,
        limits: RunLimits,
    ) -> Result<Result<(), LimitReached>, StoreError> {
        let RunReservation { tenant, subject, .. } = reservation;
        let mut tx = self.backend.begin(Work::Data).await?;
        if !tx.lock_tenant(tenant, MAX_WAIT).await? {
            return Err(StoreError::Unavailable(
                "the run reservations of the tenant are locked".to_owned(),
            ));
        }
        let stored = Query::new(
            "DELETE FROM run_places WHERE tenant = :tenant \
             AND EXISTS (SELECT 1 FROM runs WHERE runs.id = run_places.run_id)",
        );
        tx.run(stored.bind("tenant", tenant)).await?;
        let mut running = RunCounts { limits, ..RunCounts::default() };
        running.recount(&mut *tx, tenant).await?;
        let mut outcome = running.refuses(tenant, subject).map_or(Ok(()), Err);
        if outcome.is_err() && !tx.run(shared_with(reservation)).await?.is_empty() {
            outcome = Ok(());
        }
        if outcome.is_ok() {
            let insert = Query::new(
                "INSERT INTO run_places \
                 (id, tenant, subject, run_id, idempotency_key, owner, taken_at) \
                 VALUES (:id, :tenant, :subject, :run, :key, :owner, {now})",
            );
            let insert = insert
                .bind("id", reservation.id)
                .bind("owner", reservation.owner)
                .bind("run", reservation.run);
            let insert = insert.bind("tenant", tenant).bind("subject", subject);
            tx.run(insert.bind("key", reservation.idempotency_key)).await?;
        }
        tx.commit().await?;
        Ok(outcome)
    }

    /// Releases reservations of runs that will not be stored.
    ///
    /// # Errors
    /// [`StoreError`] if the reservations may still exist.
    pub async fn release_reservations(&self, reservations: &[Uuid]) -> Result<(), StoreError> {
        let delete = Query::new("DELETE FROM run_places WHERE id IN :reservations");
        self.backend.write(Work::Control, delete.bind("reservations", reservations)).await?;
        Ok(())
    }

    /// Releases all reservations of an owner that are at least this old, except those in `held`.
    ///
    /// # Errors
    /// [`StoreError`] if the reservations may still exist.
    pub async fn release_other_reservations(
        &self,
        owner: &str,
        held: &[Uuid],
        age: Duration,
    ) -> Result<(), StoreError> {
        let delete = Query::new(
            "DELETE FROM run_places WHERE owner = :owner AND NOT (id IN :held) \
             AND taken_at <= {now} - :age",
        );
        let delete = delete.bind("owner", owner).bind("held", held).bind("age", age);
        self.backend.write(Work::Control, delete).await?;
        Ok(())
    }
}

/// Reservations of the same run, or of runs with the same idempotency key: only one of these runs will be stored.
fn shared_with(reservation: RunReservation<'_>) -> Query {
    let look = Query::new(
        "SELECT 1 FROM run_places \
         WHERE tenant = :tenant AND (run_id = :run OR idempotency_key = :key) LIMIT 1",
    );
    let look = look.bind("tenant", reservation.tenant).bind("run", reservation.run);
    look.bind("key", reservation.idempotency_key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_of_tenants_and_of_keys() {
        let limits = RunLimits { of_tenant: Some(3), of_key: Some(2) };
        let mut running = RunCounts { limits, ..RunCounts::default() };
        running.add("a", "x", 2);
        running.add("b", "x", 1);
        assert_eq!(running.refuses("a", "x"), Some(LimitReached::OfKey(2)));
        assert_eq!((running.refuses("a", "y"), running.claimable("a")), (None, 1));
        assert_eq!(running.full_keys("a"), ["x"]);
        assert!(running.full_keys("b").is_empty());
        running.add("a", "y", 1);
        assert_eq!(running.refuses("a", "z"), Some(LimitReached::OfTenant(3)));
        assert_eq!(
            (running.claimable("a"), running.claimable("b"), running.claimable("c")),
            (0, 1, 1)
        );
        let mut unlimited = RunCounts::default();
        unlimited.add("a", "x", 9);
        assert_eq!((unlimited.refuses("a", "x"), unlimited.claimable("a")), (None, u32::MAX));
    }
}
