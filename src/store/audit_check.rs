//! Checks the audit log against its stretches: each stretch against the one before it, its records,
//! its signature, and other records from its period.
//!
//! If a chain is rebuilt, its stretches are closed long after their records were written, and a signed chain
//! starts to be signed a second time. Both are reported.
//!
//! Every record from a closed period must be in a stretch. What the service writes late has the time of its writing
//! ([`super::audit`]). A record that comes late nevertheless, because clocks differ, is closed within a minute; until
//! then it cannot be distinguished from one that was added later.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value as Json;
use uuid::Uuid;

use super::audit_chain::{
    IsSigned, LOOKBACK_STRETCHES, hash, last_deleted, newest_deletion, newest_time_until,
};
use super::backend::Work;
use super::listing::readable;
use super::sql::Query;
use super::tables::{AuditRow, Stretch};
use super::{Page, Store, StoreError};

/// Records of a stretch's period that are read, at most: its own, and those that were closed late.
const READ: u32 = 20_000;

/// A stretch counts as closed late if it was closed longer than this after its newest record. A running service
/// closes it within little more than an hour.
const LATE: TimeDelta = TimeDelta::hours(2);

/// How signatures are verified.
#[derive(Clone, Copy)]
pub struct Signatures<'k> {
    /// `None` without a key.
    pub is_signed: Option<IsSigned<'k>>,
    /// The last stretch that may be unsigned although there is a key.
    pub unsigned_until: i64,
}

/// A stretch with its faults.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedStretch {
    pub stretch: Stretch,
    pub faults: Vec<String>,
    /// Whether it was closed much later than its records were written.
    pub closed_late: bool,
}

impl Signatures<'_> {
    fn fault(&self, stretch: &Stretch, before: Option<&Stretch>) -> Option<&'static str> {
        let was_signed = before.is_some_and(|before| before.signature.is_some());
        match (&stretch.signature, self.is_signed) {
            (Some(signature), Some(is_signed)) if !is_signed(&stretch.hash, signature) => {
                Some("its signature is not that of the configured key")
            }
            (None, _) if was_signed => {
                Some("it is unsigned although the stretch before it is signed")
            }
            (None, Some(_)) if stretch.number > self.unsigned_until => {
                Some("it is unsigned although a key is configured")
            }
            _ => None,
        }
    }
}

impl Store {
    /// A page of a tenant's stretches, oldest first, each checked against its records.
    pub async fn checked_stretches(
        &self,
        tenant: &str,
        page: &Page<i64>,
        signatures: Signatures<'_>,
    ) -> Result<Vec<CheckedStretch>, StoreError> {
        let after = page.after.unwrap_or(0);
        let read = Query::new(
            "SELECT * FROM audit_stretches WHERE tenant = :tenant AND number >= :after \
             ORDER BY number LIMIT :limit",
        );
        let limit = page.limit + 1 + LOOKBACK_STRETCHES;
        let read = read.bind("tenant", tenant).bind("after", after).bind("limit", limit);
        let read: Vec<Stretch> = readable(&self.backend.read(Work::Data, read).await?).collect();
        let mut covered = self.covered_by(tenant, after).await?;
        let signing_changes = self.signing_changes(tenant).await?;
        let mut checked = Vec::new();
        for (place, stretch) in read.iter().enumerate() {
            if stretch.number <= after || checked.len() >= page.limit as usize {
                continue;
            }
            let before = place.checked_sub(1).and_then(|before| read.get(before));
            let mut faults = Vec::new();
            faults.extend(match before {
                Some(before) => link_fault(stretch, before),
                None => self.beginning_fault(stretch).await?,
            });
            faults.extend(self.record_faults(stretch).await?);
            let later = read.iter().skip(place).take(1 + LOOKBACK_STRETCHES as usize);
            faults.extend(self.added_fault(stretch, covered, later).await?);
            faults.extend(signatures.fault(stretch, before).map(str::to_owned));
            let changes =
                signing_changes.iter().filter(|number| **number == stretch.number).count();
            faults.extend((changes > 1).then(|| repeated_signing_change(changes)));
            covered = covered.max(Some(stretch.last_at));
            let closed_late = stretch.closed_at - stretch.last_at > LATE;
            checked.push(CheckedStretch { stretch: stretch.clone(), faults, closed_late });
        }
        Ok(checked)
    }

    /// The number of the stretch that each recorded change of signing names.
    async fn signing_changes(&self, tenant: &str) -> Result<Vec<i64>, StoreError> {
        // The last condition is that of the index of records that are not tool calls.
        let read = Query::new(
            "SELECT arguments FROM audit_log WHERE tenant = :tenant \
             AND action = 'audit.signing_changed' AND action <> 'tool_call' \
             ORDER BY at DESC, id DESC LIMIT :limit",
        );
        let read = read.bind("tenant", tenant).bind("limit", READ);
        let mut numbers = Vec::new();
        for row in self.backend.read(Work::Data, read).await? {
            let details: String = row.read("arguments")?;
            let details: Option<Json> = serde_json::from_str(&details).ok();
            numbers.extend(details.and_then(|details| details.get("number")?.as_i64()));
        }
        Ok(numbers)
    }

    /// The time of the newest record in the stretches up to this number.
    async fn covered_by(
        &self,
        tenant: &str,
        number: i64,
    ) -> Result<Option<DateTime<Utc>>, StoreError> {
        let rows = self.backend.read(Work::Data, newest_time_until(tenant, number)).await?;
        rows.first().map(|row| row.read("last_at")).transpose()
    }

    /// Missing or changed records of a stretch.
    async fn record_faults(&self, stretch: &Stretch) -> Result<Vec<String>, StoreError> {
        let ids: Vec<Uuid> = stretch.members().collect();
        let read = Query::new(
            "SELECT * FROM audit_log WHERE tenant = :tenant AND at >= :first AND at <= :last \
             AND id IN :ids",
        );
        let read = read.bind("tenant", &stretch.tenant).bind("first", stretch.first_at);
        let read = read.bind("last", stretch.last_at).bind("ids", &*ids);
        let rows = self.backend.read(Work::Data, read).await?;
        let there: Vec<AuditRow> = readable(&rows).collect();
        let count = there.len();
        let mut found: HashMap<Uuid, AuditRow> =
            there.into_iter().map(|row| (row.id, row)).collect();
        if count > found.len() {
            return Ok(vec!["it contains records twice".to_owned()]);
        }
        let records: Vec<AuditRow> = ids.iter().filter_map(|id| found.remove(id)).collect();
        if records.len() == ids.len() && ids.len() == stretch.records as usize {
            let is_same = hash(stretch, records) == stretch.hash;
            let changed = "a record was changed, or the order of the records was, or a time of \
                           the stretch was";
            return Ok((!is_same).then(|| changed.to_owned()).into_iter().collect());
        }
        let there: BTreeSet<Uuid> = records.iter().map(|record| record.id).collect();
        let missing: Vec<Uuid> = ids.into_iter().filter(|id| !there.contains(id)).collect();
        let are = if missing.len() == 1 { "is" } else { "are" };
        Ok(vec![format!("{} of its records {are} missing: {}", missing.len(), first_ids(&missing))])
    }

    /// Records from the period of a stretch that are neither in it nor in one of the next stretches, which contain late
    /// records.
    async fn added_fault(
        &self,
        stretch: &Stretch,
        covered: Option<DateTime<Utc>>,
        later: impl Iterator<Item = &Stretch> + Send,
    ) -> Result<Option<String>, StoreError> {
        let mut known: BTreeMap<Uuid, &Stretch> = BTreeMap::new();
        for stretch in later {
            known.extend(stretch.members().map(|id| (id, stretch)));
        }
        let read =
            Query::new("SELECT id, at FROM audit_log WHERE tenant = :tenant AND at <= :last");
        let read = read.bind("tenant", &stretch.tenant).bind("last", stretch.last_at);
        let read = read.and("at > :covered", "covered", covered);
        let read = read.push(" ORDER BY at, id LIMIT :limit").bind("limit", READ);
        let mut added = Vec::new();
        for row in self.backend.read(Work::Data, read).await? {
            let (id, at): (Uuid, DateTime<Utc>) = (row.read("id")?, row.read("at")?);
            // The second copy of a record counts as added.
            let closed = known.remove(&id);
            if !closed.is_some_and(|closed| (closed.first_at..=closed.last_at).contains(&at)) {
                added.push(id);
            }
        }
        let message = || {
            format!(
                "{} records from its period belong to no stretch: {}",
                added.len(),
                first_ids(&added)
            )
        };
        Ok((!added.is_empty()).then(message))
    }

    /// Checks that a record says that the stretches before the oldest one were deleted.
    async fn beginning_fault(&self, oldest: &Stretch) -> Result<Option<String>, StoreError> {
        if oldest.number == 1 {
            let fault = "the stretch before it is missing";
            return Ok((!oldest.previous.is_empty()).then(|| fault.to_owned()));
        }
        let rows = self.backend.read(Work::Data, newest_deletion(&oldest.tenant)).await?;
        let deletion: Option<AuditRow> = readable(&rows).next();
        let expected = (oldest.number - 1, oldest.previous.clone());
        let fault =
            "the stretches before it are missing, and no record says that they were deleted";
        let is_recorded = deletion.as_ref().and_then(last_deleted) == Some(expected);
        Ok((!is_recorded).then(|| fault.to_owned()))
    }
}

fn repeated_signing_change(times: usize) -> String {
    format!("{times} audit records say that signing changed with this stretch; there should be one")
}

fn link_fault(stretch: &Stretch, before: &Stretch) -> Option<String> {
    if before.number + 1 != stretch.number {
        return Some(format!("the stretch before it, number {}, is missing", stretch.number - 1));
    }
    let fault = "it does not continue the stretch before it";
    (before.hash != stretch.previous).then(|| fault.to_owned())
}

/// The first three ids, for a message.
fn first_ids(ids: &[Uuid]) -> String {
    let first: Vec<String> = ids.iter().take(3).map(Uuid::to_string).collect();
    first.join(", ")
}
