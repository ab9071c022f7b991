//! The chain of the audit log: what shows that no record was changed, deleted or added later.
//!
//! Records that are complete, old enough for none of their time to be still on its way, are closed
//! in stretches: a row that names them in order and has a hash of all of them and of the stretch
//! before it. Records themselves are not touched, and a commit writes nothing for it. Each tenant
//! has a chain of its own, so that it can be shown the proof of its records and nothing of others.
//! A record that was late is closed with the next ones. When stretches are closed, and what signs
//! them, is the runtime's.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

use chrono::{DateTime, SubsecRound, Utc};
use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::listing::readable;
use super::sql::{Query, Value};
use super::tables::{AuditRow, Group, Stretch, insert};
use super::{Page, Store, StoreError};
use crate::clock;

/// All tenants that have entries, by one look-up each; the last row is NULL.
pub(super) const TENANTS: &str = "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM audit_log \
    UNION ALL SELECT (SELECT min(tenant) FROM audit_log a WHERE a.tenant > t.tenant) \
    FROM tenants t WHERE t.tenant IS NOT NULL) ";

/// Stretches before a new one in whose time a late record is looked for.
const LOOKED_BACK: u32 = 3;
/// Records of one stretch's time that are read, at most: its own, and those of its neighbours.
const READ: u32 = 20_000;

/// Which records are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closing {
    /// Records of a stretch, at most; as many are closed however young they are.
    pub records: usize,
    /// Of an earlier time than this none is on its way any more.
    pub settled: DateTime<Utc>,
    /// Those of an earlier time are closed, however few they are.
    pub aged: DateTime<Utc>,
}

/// A stretch, and what is wrong with it.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedStretch {
    pub stretch: Stretch,
    pub faults: Vec<String>,
}

impl Stretch {
    /// Its records, in their order.
    fn members(&self) -> impl Iterator<Item = Uuid> {
        self.members.chunks_exact(16).filter_map(|bytes| Uuid::from_slice(bytes).ok())
    }
}

/// A record as it is hashed: a JSON object of its columns, times in microseconds.
fn written(row: AuditRow) -> String {
    let mut columns = Vec::new();
    AuditRow::list(&mut columns);
    let text = |value| match value {
        Value::Int(value) => Json::from(value),
        Value::Flag(value) => Json::from(value),
        Value::Text(value) => Json::from(value),
        Value::Id(value) => Json::from(value.map(|id| id.to_string())),
        Value::Time(value) => Json::from(value.map(|at| at.timestamp_micros())),
        Value::Bytes(value) => Json::from(value.map(hex::encode)),
        Value::Span(_) | Value::Ids(_) | Value::Texts(_) => Json::Null, // no columns
    };
    let values = row.values().into_iter().map(text);
    let fields: Map<String, Json> =
        columns.iter().map(|column| column.name.to_owned()).zip(values).collect();
    Json::Object(fields).to_string()
}

/// `H(tenant ‖ number ‖ previous ‖ records)`, a line each.
fn hash(tenant: &str, number: i64, previous: &[u8], records: Vec<AuditRow>) -> Vec<u8> {
    let mut head = String::new();
    let _ = writeln!(head, "toolloop audit 1\n{tenant}\n{number}\n{}", hex::encode(previous));
    let mut hash = Sha256::new().chain_update(head);
    for record in records {
        hash.update(written(record));
        hash.update("\n");
    }
    hash.finalize().to_vec()
}

impl Store {
    /// Tenants that have audit records.
    pub async fn audited_tenants(&self) -> Result<Vec<String>, StoreError> {
        let tenants =
            Query::new(TENANTS).push("SELECT tenant FROM tenants WHERE tenant IS NOT NULL");
        let rows = self.backend.read(Work::Data, tenants).await?;
        rows.iter().map(|row| row.read("tenant")).collect()
    }

    /// Closes the next stretch of a tenant, where there are records for one and no other replica is
    /// at it.
    pub async fn close_stretch(
        &self,
        tenant: &str,
        closing: Closing,
        sign: &(dyn Fn(&[u8]) -> Option<Vec<u8>> + Sync),
    ) -> Result<Option<Stretch>, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let turn = tx.run(Query::new("SELECT {try_audit} AS is_mine")).await?;
        if !turn.first().map_or(Ok(false), |row| row.read("is_mine"))? {
            tx.commit().await?;
            return Ok(None);
        }
        let newest = newest_stretches(&mut *tx, tenant).await?;
        let open = open_records(&mut *tx, tenant, closing, &newest).await?;
        let (Some(first), Some(oldest)) = (open.first(), open.iter().map(|row| row.at).min())
        else {
            tx.commit().await?;
            return Ok(None);
        };
        if open.len() < closing.records && oldest >= closing.aged {
            tx.commit().await?;
            return Ok(None);
        }
        let number = newest.first().map_or(1, |stretch| stretch.number + 1);
        let previous = newest.first().map_or_else(Vec::new, |stretch| stretch.hash.clone());
        let last_at = open.iter().map(|row| row.at).max().unwrap_or(first.at);
        let members: Vec<u8> = open.iter().flat_map(|row| *row.id.as_bytes()).collect();
        let records = u32::try_from(open.len()).unwrap_or(u32::MAX);
        let hash = hash(tenant, number, &previous, open);
        let stretch = Stretch {
            tenant: tenant.to_owned(),
            number,
            first_at: oldest,
            last_at,
            closed_at: clock::now().trunc_subsecs(6),
            records,
            members,
            previous,
            signature: sign(&hash),
            hash,
        };
        tx.run(insert("audit_stretches", stretch.clone())).await?;
        tx.commit().await?;
        Ok(Some(stretch))
    }

    /// A page of a tenant's stretches, the oldest first, each compared with its records.
    /// `is_signed` says whether a hash has this signature.
    pub async fn checked_stretches(
        &self,
        tenant: &str,
        page: &Page<i64>,
        is_signed: &(dyn Fn(&[u8], &[u8]) -> bool + Sync),
    ) -> Result<Vec<CheckedStretch>, StoreError> {
        let after = page.after.unwrap_or(0);
        let around = i64::from(LOOKED_BACK);
        let read = Query::new(
            "SELECT * FROM audit_stretches WHERE tenant = :tenant AND number > :after \
             ORDER BY number LIMIT :limit",
        );
        let limit = page.limit + 2 * LOOKED_BACK;
        let read = read.bind("tenant", tenant).bind("after", after - around).bind("limit", limit);
        let read: Vec<Stretch> = readable(&self.backend.read(Work::Data, read).await?).collect();
        let newest = self.newest_number(tenant).await?;
        let mut checked = Vec::new();
        for (place, stretch) in read.iter().enumerate() {
            if stretch.number <= after || checked.len() >= page.limit as usize {
                continue;
            }
            let mut faults = Vec::new();
            match place.checked_sub(1).and_then(|before| read.get(before)) {
                Some(before) if before.number + 1 != stretch.number => {
                    faults.push(format!(
                        "the stretch before it, number {}, is missing",
                        stretch.number - 1
                    ));
                }
                Some(before) if before.hash != stretch.previous => {
                    faults.push("it does not continue the stretch before it".to_owned());
                }
                None if stretch.number > 1 => faults.extend(self.beginning(stretch).await?),
                None if !stretch.previous.is_empty() => {
                    faults.push("it continues a stretch that is missing".to_owned());
                }
                Some(_) | None => {}
            }
            let near = |other: &&Stretch| (other.number - stretch.number).abs() <= around;
            let neighbours = read.iter().filter(near);
            let is_newest = stretch.number + around > newest;
            faults.extend(self.faults(stretch, neighbours, is_newest).await?);
            let was_signed =
                |before: usize| read.get(before).is_some_and(|s| s.signature.is_some());
            match &stretch.signature {
                Some(signature) if !is_signed(&stretch.hash, signature) => {
                    faults.push("its signature is not that of the configured key".to_owned());
                }
                None if place.checked_sub(1).is_some_and(was_signed) => {
                    faults.push("it is not signed, but the one before it is".to_owned());
                }
                Some(_) | None => {}
            }
            checked.push(CheckedStretch { stretch: stretch.clone(), faults });
        }
        Ok(checked)
    }

    /// What is wrong with the records of a stretch. Late records of the newest may yet be closed.
    async fn faults(
        &self,
        stretch: &Stretch,
        neighbours: impl Iterator<Item = &Stretch> + Send,
        is_newest: bool,
    ) -> Result<Vec<String>, StoreError> {
        let read = Query::new(
            "SELECT * FROM audit_log WHERE tenant = :tenant AND at >= :first AND at <= :last \
             ORDER BY at, id LIMIT :limit",
        );
        let read = read.bind("tenant", &stretch.tenant).bind("first", stretch.first_at);
        let read = read.bind("last", stretch.last_at).bind("limit", READ);
        let rows = self.backend.read(Work::Data, read).await?;
        let mut found: HashMap<Uuid, AuditRow> =
            readable(&rows).map(|row: AuditRow| (row.id, row)).collect();
        let ids: Vec<Uuid> = stretch.members().collect();
        let records: Vec<AuditRow> = ids.iter().filter_map(|id| found.remove(id)).collect();
        let mut faults = Vec::new();
        if records.len() < ids.len() || ids.len() != stretch.records as usize {
            let there: BTreeSet<Uuid> = records.iter().map(|record| record.id).collect();
            let missing: Vec<String> =
                ids.iter().filter(|id| !there.contains(id)).map(Uuid::to_string).collect();
            let some = missing.get(..missing.len().min(3)).unwrap_or_default().join(", ");
            faults.push(format!("{} of its records are missing: {some}", missing.len()));
        } else if hash(&stretch.tenant, stretch.number, &stretch.previous, records) != stretch.hash
        {
            faults.push("a record was changed, or their order".to_owned());
        }
        let known: BTreeSet<Uuid> = neighbours.flat_map(Stretch::members).collect();
        let added: Vec<String> =
            found.keys().filter(|id| !known.contains(id)).map(Uuid::to_string).collect();
        if !added.is_empty() && !is_newest {
            let some = added.get(..added.len().min(3)).unwrap_or_default().join(", ");
            faults.push(format!("{} records of its time are in no stretch: {some}", added.len()));
        }
        Ok(faults)
    }

    /// Whether it is recorded that the stretches before the oldest one were deleted.
    async fn beginning(&self, oldest: &Stretch) -> Result<Option<String>, StoreError> {
        let read = Query::new(
            // The second condition is that of the index of records that are not tool calls.
            "SELECT * FROM audit_log WHERE tenant = :tenant AND action = 'audit.deleted' \
             AND action <> 'tool_call' ORDER BY at DESC, id DESC LIMIT 1",
        );
        let rows = self.backend.read(Work::Data, read.bind("tenant", &oldest.tenant)).await?;
        let deleted: Option<AuditRow> = readable(&rows).next();
        let through = deleted
            .and_then(|row| serde_json::from_str::<Json>(&row.arguments).ok())
            .and_then(|details| details.get("through").and_then(Json::as_i64));
        Ok((through != Some(oldest.number - 1)).then(|| {
            "the stretches before it are missing, and no record says that they were deleted"
                .to_owned()
        }))
    }

    async fn newest_number(&self, tenant: &str) -> Result<i64, StoreError> {
        let read = Query::new(
            "SELECT COALESCE(max(number), 0) AS number FROM audit_stretches WHERE tenant = :tenant",
        );
        let rows = self.backend.read(Work::Data, read.bind("tenant", tenant)).await?;
        rows.first().map_or(Ok(0), |row| row.read("number"))
    }
}

/// The newest stretches of a tenant, the newest first.
async fn newest_stretches(
    tx: &mut dyn Transaction,
    tenant: &str,
) -> Result<Vec<Stretch>, StoreError> {
    let read = Query::new(
        "SELECT * FROM audit_stretches WHERE tenant = :tenant ORDER BY number DESC LIMIT :limit",
    );
    let rows = tx.run(read.bind("tenant", tenant).bind("limit", LOOKED_BACK)).await?;
    Ok(readable(&rows).collect())
}

/// Complete records that no stretch has, the oldest first.
async fn open_records(
    tx: &mut dyn Transaction,
    tenant: &str,
    closing: Closing,
    newest: &[Stretch],
) -> Result<Vec<AuditRow>, StoreError> {
    let closed: BTreeSet<Uuid> = newest.iter().flat_map(Stretch::members).collect();
    let is_whole = newest.len() < LOOKED_BACK as usize;
    let from = newest.iter().map(|stretch| stretch.first_at).min().filter(|_| !is_whole);
    let read = Query::new("SELECT * FROM audit_log WHERE tenant = :tenant AND at < :settled")
        .bind("tenant", tenant)
        .bind("settled", closing.settled)
        .and("at >= :from", "from", from);
    let limit = u32::try_from(closing.records + closed.len()).unwrap_or(u32::MAX);
    let read = read.push(" ORDER BY at, id LIMIT :limit").bind("limit", limit);
    let rows = tx.run(read).await?;
    let open = readable(&rows).filter(|row: &AuditRow| !closed.contains(&row.id));
    Ok(open.take(closing.records).collect())
}

/// Deletes the oldest stretches of all tenants that are older than this, each with its records,
/// until there are this many; how many records of which tenants, and the number of the last stretch.
pub(super) async fn delete_stretches(
    tx: &mut dyn Transaction,
    before: DateTime<Utc>,
    limit: u32,
) -> Result<Vec<(String, u64, i64)>, StoreError> {
    let read = Query::new(
        "SELECT * FROM audit_stretches s WHERE s.last_at < :before AND NOT EXISTS \
         (SELECT 1 FROM audit_stretches k WHERE k.tenant = s.tenant AND k.number < s.number \
         AND k.last_at >= :before) ORDER BY s.tenant, s.number LIMIT :limit",
    );
    let read = read.bind("before", before).bind("limit", limit.div_ceil(100));
    let expired: Vec<Stretch> = readable(&tx.run(read).await?).collect();
    let mut deleted: Vec<(String, u64, i64)> = Vec::new();
    let mut records = 0;
    for stretch in expired {
        if records >= u64::from(limit) {
            break;
        }
        let kept = Query::new(
            "SELECT * FROM audit_stretches WHERE tenant = :tenant AND number > :number \
             ORDER BY number LIMIT :limit",
        );
        let kept = kept.bind("tenant", &stretch.tenant).bind("number", stretch.number);
        let kept = tx.run(kept.bind("limit", LOOKED_BACK)).await?;
        let kept: Vec<Uuid> =
            readable(&kept).flat_map(|s: Stretch| s.members().collect::<Vec<_>>()).collect();
        let delete = Query::new(
            "DELETE FROM audit_log WHERE tenant = :tenant AND at <= :last AND NOT (id IN :kept) \
             RETURNING id",
        );
        let delete = delete.bind("tenant", &stretch.tenant).bind("last", stretch.last_at);
        let gone = tx.run(delete.bind("kept", &*kept)).await?.len() as u64;
        let delete =
            Query::new("DELETE FROM audit_stretches WHERE tenant = :tenant AND number = :number");
        let delete = delete.bind("tenant", &stretch.tenant).bind("number", stretch.number);
        tx.run(delete).await?;
        records += gone;
        match deleted.last_mut() {
            Some((tenant, count, through)) if *tenant == stretch.tenant => {
                (*count, *through) = (*count + gone, stretch.number);
            }
            _ => deleted.push((stretch.tenant, gone, stretch.number)),
        }
    }
    Ok(deleted)
}
