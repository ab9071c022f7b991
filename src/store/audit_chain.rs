//! The hash chain of the audit log, which proves that no record was changed, deleted or added later.
//!
//! Records are closed in stretches when they are old enough that no earlier record can still arrive. A stretch is a
//! row with the ids of its records in order, and a hash of the records and of the previous stretch. The records
//! are not changed, and commits write nothing for the chain. Each tenant has its own chain, so a tenant can verify
//! its records without seeing others. A late record is closed with the next stretch, unless it is very late. The
//! runtime decides when stretches are closed, and signs them.

use std::collections::BTreeSet;
use std::fmt::Write;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::audit::{act_of_service, add_act};
use super::backend::{Transaction, Work};
use super::listing::readable;
use super::sql::{Query, Value};
use super::tables::{AuditRow, Group, Stretch, insert};
use super::{Store, StoreError};
use crate::clock;
use crate::event::AuditAction;

/// All tenants with records, found by one index look-up each; the last row is NULL.
pub(super) const TENANTS: &str = "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM audit_log \
    UNION ALL SELECT (SELECT min(tenant) FROM audit_log a WHERE a.tenant > t.tenant) \
    FROM tenants t WHERE t.tenant IS NOT NULL) ";

/// How many of the newest stretches may contain a late record.
pub(super) const LOOKBACK_STRETCHES: u32 = 3;
/// How late a record may be, measured from the end of the closed records. The service writes no older one
/// ([`super::audit::date_late`]). It stays outside of all stretches, where a check finds it.
const LATE: TimeDelta = TimeDelta::hours(1);

/// Decides which records are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closing {
    /// The maximum number of records in a stretch; a full stretch is closed regardless of its age.
    pub records: usize,
    /// Records before this time are complete: none of them is still being written.
    pub settled: DateTime<Utc>,
    /// Records before this time are closed, even if there are only few.
    pub aged: DateTime<Utc>,
}

/// The newest stretch of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainHead {
    pub number: i64,
    pub hash: Vec<u8>,
    /// The time of its newest record.
    pub last_at: DateTime<Utc>,
}

/// Whether a hash has this signature.
pub type IsSigned<'k> = &'k (dyn Fn(&[u8], &[u8]) -> bool + Sync);

/// A head that the chain must still have, unless a retention has deleted it.
#[derive(Clone)]
pub struct KnownHead<'k> {
    pub head: ChainHead,
    /// How long this service keeps records; `None`: for ever.
    pub retention: Option<TimeDelta>,
    /// Verifies the signature of a deletion by another retention; `None` without a key: no signature is needed.
    pub is_signed: Option<IsSigned<'k>>,
}

/// The outcome of an attempt to close the next stretch.
#[derive(Debug, Clone, PartialEq)]
pub enum Closed {
    /// The next stretch.
    Stretch(Stretch),
    /// There is nothing to close.
    Nothing(Option<ChainHead>),
    /// Another replica is closing this chain.
    NotNow,
    /// The chain no longer has the known head; its head now, if there is one.
    Replaced(Option<ChainHead>),
}

impl From<&Stretch> for ChainHead {
    fn from(stretch: &Stretch) -> Self {
        Self { number: stretch.number, hash: stretch.hash.clone(), last_at: stretch.last_at }
    }
}

impl Stretch {
    /// Its records, in their order.
    pub(super) fn members(&self) -> impl Iterator<Item = Uuid> {
        self.members.chunks_exact(16).filter_map(|bytes| Uuid::from_slice(bytes).ok())
    }
}

/// A record as it is hashed: a JSON object of its columns, times in microseconds.
fn canonical_json(row: AuditRow) -> String {
    let text = |value| match value {
        Value::Int(value) => Json::from(value),
        Value::Flag(value) => Json::from(value),
        Value::Text(value) => Json::from(value),
        Value::Id(value) => Json::from(value.map(|id| id.to_string())),
        Value::Time(value) => Json::from(value.map(|at| at.timestamp_micros())),
        Value::Bytes(value) => Json::from(value.map(hex::encode)),
        Value::Span(_) | Value::Ids(_) | Value::Texts(_) | Value::Ints(_) => Json::Null, // no columns
    };
    let values = row.values().into_iter().map(text);
    let names = AuditRow::columns().into_iter().map(|column| column.name.to_owned());
    let fields: Map<String, Json> = names.zip(values).collect();
    Json::Object(fields).to_string()
}

/// `H(stretch ‖ previous ‖ records)`, a line each; the stretch is its tenant, number and times.
pub(super) fn hash(stretch: &Stretch, records: Vec<AuditRow>) -> Vec<u8> {
    let Stretch { tenant, number, first_at, last_at, closed_at, previous, .. } = stretch;
    let [first, last, closed] = [first_at, last_at, closed_at].map(DateTime::timestamp_micros);
    let mut head = String::new();
    let _ = writeln!(head, "toolloop audit 3\n{tenant}\n{number}\n{first} {last} {closed}");
    let _ = writeln!(head, "{}", hex::encode(previous));
    let mut hash = Sha256::new().chain_update(head);
    for record in records {
        hash.update(canonical_json(record));
        hash.update("\n");
    }
    hash.finalize().to_vec()
}

/// The record of the newest deletion of stretches of a tenant.
pub(super) fn newest_deletion(tenant: &str) -> Query {
    // The second condition is that of the index of records that are not tool calls.
    Query::new(
        "SELECT * FROM audit_log WHERE tenant = :tenant AND action = 'audit.deleted' \
         AND action <> 'tool_call' ORDER BY at DESC, id DESC LIMIT 1",
    )
    .bind("tenant", tenant)
}

/// The number and the hash of the last stretch that a deletion has deleted.
pub(super) fn last_deleted(deletion: &AuditRow) -> Option<(i64, Vec<u8>)> {
    let details: Json = serde_json::from_str(&deletion.arguments).ok()?;
    let hash = hex::decode(details.get("hash")?.as_str()?).ok()?;
    Some((details.get("through")?.as_i64()?, hash))
}

/// The instant before which all deleted records were written.
fn deleted_before(deletion: &AuditRow) -> Option<DateTime<Utc>> {
    let details: Json = serde_json::from_str(&deletion.arguments).ok()?;
    details.get("before")?.as_str()?.parse().ok()
}

/// The signature of a deletion, if the deleting service has a key.
fn signature_of(deletion: &AuditRow) -> Option<Vec<u8>> {
    let details: Json = serde_json::from_str(&deletion.arguments).ok()?;
    hex::decode(details.get("signature")?.as_str()?).ok()
}

/// The hash of a deletion that is signed: of the last deleted stretch, and of the instant before which all deleted
/// records were written.
pub(super) fn deletion_hash(
    tenant: &str,
    through: i64,
    hash: &[u8],
    before: DateTime<Utc>,
) -> Vec<u8> {
    let (hash, before) = (hex::encode(hash), before.timestamp_micros());
    let text = format!("toolloop audit deletion 1\n{tenant}\n{through}\n{hash}\n{before}\n");
    Sha256::digest(text).to_vec()
}

impl Store {
    /// Tenants that have audit records.
    pub async fn audited_tenants(&self) -> Result<Vec<String>, StoreError> {
        let tenants =
            Query::new(TENANTS).push("SELECT tenant FROM tenants WHERE tenant IS NOT NULL");
        let rows = self.backend.read(Work::Data, tenants).await?;
        rows.iter().map(|row| row.read("tenant")).collect()
    }

    /// Closes the next stretch of a tenant if there are records for it, no other replica is closing stretches, and the
    /// chain has the `known` head.
    pub async fn close_stretch(
        &self,
        tenant: &str,
        closing: Closing,
        known: Option<&KnownHead<'_>>,
        sign: &(dyn Fn(&[u8]) -> Option<Vec<u8>> + Sync),
    ) -> Result<Closed, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let turn = tx.run(Query::new("SELECT {try_audit} AS is_mine")).await?;
        if !turn.first().map_or(Ok(false), |row| row.read("is_mine"))? {
            tx.commit().await?;
            return Ok(Closed::NotNow);
        }
        let newest = newest_stretches(&mut *tx, tenant).await?;
        let head = newest.first().map(ChainHead::from);
        let state = match known {
            Some(known) => find_head(&mut *tx, tenant, known).await?,
            None => HeadState::Present,
        };
        if state == HeadState::Gone {
            tx.commit().await?;
            return Ok(Closed::Replaced(head));
        }
        let closed = close_next(&mut *tx, tenant, closing, &newest, sign).await?;
        tx.commit().await?;
        let closed = closed.map_or(Closed::Nothing(head), Closed::Stretch);
        if state == HeadState::DeletedByOther && closed != Closed::Nothing(None) {
            tracing::warn!(
                tenant,
                number = known.map(|known| known.head.number),
                "another service deleted audit records that the retention of this one keeps; the chain goes \
                 on behind them"
            );
        }
        Ok(closed)
    }
}

/// Closes the next stretch after the `newest` ones, if there are records for it.
async fn close_next(
    tx: &mut dyn Transaction,
    tenant: &str,
    closing: Closing,
    newest: &[Stretch],
    sign: &(dyn Fn(&[u8]) -> Option<Vec<u8>> + Sync),
) -> Result<Option<Stretch>, StoreError> {
    let open = open_records(tx, tenant, closing, newest).await?;
    let end = newest.iter().map(|stretch| stretch.last_at).max();
    let oldest = open.iter().map(|row| row.at).min();
    // Late records are closed at once: until then they look as if they had been added later.
    let is_due = |oldest| {
        open.len() >= closing.records
            || oldest < closing.aged
            || end.is_some_and(|end| oldest <= end)
    };
    let Some(oldest) = oldest.filter(|oldest| is_due(*oldest)) else { return Ok(None) };
    let (last, previous) = if let Some(stretch) = newest.first() {
        (stretch.number, stretch.hash.clone())
    } else {
        let rows = tx.run(newest_deletion(tenant)).await?;
        let deletion: Option<AuditRow> = readable(&rows).next();
        deletion.as_ref().and_then(last_deleted).unwrap_or_default()
    };
    let mut stretch = Stretch {
        tenant: tenant.to_owned(),
        number: last + 1,
        first_at: oldest,
        last_at: open.iter().map(|row| row.at).max().unwrap_or(oldest),
        closed_at: clock::now(),
        records: u32::try_from(open.len()).unwrap_or(u32::MAX),
        members: open.iter().flat_map(|row| *row.id.as_bytes()).collect(),
        previous,
        hash: Vec::new(),
        signature: None,
    };
    stretch.hash = hash(&stretch, open);
    stretch.signature = sign(&stretch.hash);
    tx.run(insert("audit_stretches", stretch.clone())).await?;
    let is_signed = stretch.signature.is_some();
    let was_signed = newest.first().is_some_and(|before| before.signature.is_some());
    let continues_chain = !newest.is_empty() || stretch.number == 1; // not behind a deletion
    if continues_chain && is_signed != was_signed {
        let details = json!({"number": stretch.number, "signed": is_signed});
        let act = act_of_service(tenant.to_owned(), AuditAction::SigningChanged, details);
        add_act(tx, act).await?;
    }
    Ok(Some(stretch))
}

/// The state of a known head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadState {
    Present,
    /// The retention of this service deleted it.
    Deleted,
    /// The retention of another service, which keeps records for a shorter time, deleted it.
    DeletedByOther,
    /// It is missing, or another head is in its place.
    Gone,
}

/// Whether the chain of a tenant still has this head, or a retention deleted it. A deletion that this
/// service would not have made itself needs a signature, where there is a key.
async fn find_head(
    tx: &mut dyn Transaction,
    tenant: &str,
    KnownHead { head, retention, is_signed }: &KnownHead<'_>,
) -> Result<HeadState, StoreError> {
    let read =
        Query::new("SELECT hash FROM audit_stretches WHERE tenant = :tenant AND number = :number");
    let rows = tx.run(read.bind("tenant", tenant).bind("number", head.number)).await?;
    if let Some(row) = rows.first() {
        let is_same = row.read::<Vec<u8>>("hash")? == head.hash;
        return Ok(if is_same { HeadState::Present } else { HeadState::Gone });
    }
    let rows = tx.run(newest_deletion(tenant)).await?;
    let deletion: Option<AuditRow> = readable(&rows).next();
    let deleted = deletion.as_ref().and_then(|row| last_deleted(row).zip(deleted_before(row)));
    let Some(((through, hash), before)) = deleted else { return Ok(HeadState::Gone) };
    let is_the_last = through == head.number && hash == head.hash;
    if before <= head.last_at || !(through > head.number || is_the_last) {
        return Ok(HeadState::Gone);
    }
    // The current time is read after the deletion, so it is not earlier than the time of the deletion.
    let rows = tx.run(Query::new("SELECT {now} AS now")).await?;
    let now: DateTime<Utc> =
        rows.first().map_or_else(|| Ok(clock::now()), |row| row.read("now"))?;
    let due = retention.and_then(|retention| now.checked_sub_signed(retention));
    if due.is_some_and(|due| before <= due) {
        return Ok(HeadState::Deleted);
    }
    let signed = deletion_hash(tenant, through, &hash, before);
    let signature = deletion.as_ref().and_then(signature_of);
    let is_trusted = is_signed
        .is_none_or(|is_signed| signature.is_some_and(|signature| is_signed(&signed, &signature)));
    Ok(if is_trusted { HeadState::DeletedByOther } else { HeadState::Gone })
}

/// The newest stretches of a tenant, the newest first.
async fn newest_stretches(
    tx: &mut dyn Transaction,
    tenant: &str,
) -> Result<Vec<Stretch>, StoreError> {
    let read = Query::new(
        "SELECT * FROM audit_stretches WHERE tenant = :tenant ORDER BY number DESC LIMIT :limit",
    );
    let rows = tx.run(read.bind("tenant", tenant).bind("limit", LOOKBACK_STRETCHES)).await?;
    Ok(readable(&rows).collect())
}

/// The time of the newest record in the stretches of a tenant up to this number.
pub(super) fn newest_time_until(tenant: &str, number: i64) -> Query {
    Query::new(
        "SELECT last_at FROM audit_stretches WHERE tenant = :tenant AND number <= :number \
         ORDER BY last_at DESC LIMIT 1",
    )
    .bind("tenant", tenant)
    .bind("number", number)
}

/// Complete records that are in no stretch, oldest first.
async fn open_records(
    tx: &mut dyn Transaction,
    tenant: &str,
    closing: Closing,
    newest: &[Stretch],
) -> Result<Vec<AuditRow>, StoreError> {
    let closed: BTreeSet<Uuid> = newest.iter().flat_map(Stretch::members).collect();
    let older = newest.last().map_or(0, |stretch| stretch.number - 1);
    let rows = tx.run(newest_time_until(tenant, older)).await?;
    let covered: Option<DateTime<Utc>> = rows.first().map(|row| row.read("last_at")).transpose()?;
    // What older stretches contain is not read again, whatever late records the newest ones contain.
    let first = covered.map(|covered| covered + TimeDelta::microseconds(1));
    let first = first.or_else(|| newest.iter().map(|stretch| stretch.first_at).min());
    let end = newest.iter().map(|stretch| stretch.last_at).max();
    let from = first.zip(end).map(|(first, end)| first.max(end - LATE));
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
