//! The retention of the audit log: deletes whole stretches, oldest first, and records that.
//!
//! A record is deleted only with its stretch, so that no record is deleted before it is in the chain. The chain
//! continues after a deletion, even if all stretches were deleted: the record of the deletion has the number and
//! the hash of the last deleted stretch.

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use super::audit::{act_of_service, add_act};
use super::audit_chain::deletion_hash;
use super::backend::{Transaction, Work};
use super::listing::readable;
use super::sql::Query;
use super::tables::Stretch;
use super::{Store, StoreError};
use crate::event::AuditAction;

/// The deleted records of a tenant.
struct Deleted {
    records: u64,
    /// The newest deleted stretch.
    last: Stretch,
}

impl Store {
    /// Deletes stretches of all tenants whose records were all written before that instant, about `limit` records, and
    /// records that, signed if there is a key. Returns the number of deleted records.
    pub async fn delete_audit(
        &self,
        before: DateTime<Utc>,
        limit: u32,
        sign: &(dyn Fn(&[u8]) -> Option<Vec<u8>> + Sync),
    ) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let turn = tx.run(Query::new("SELECT {try_audit} AS is_mine")).await?;
        if !turn.first().map_or(Ok(false), |row| row.read("is_mine"))? {
            tx.commit().await?;
            return Ok(0);
        }
        let mut gone = 0;
        for Deleted { records, last } in delete_stretches(&mut *tx, before, limit).await? {
            gone += records;
            let mut details = json!({"records": records, "before": before,
                "through": last.number, "hash": hex::encode(&last.hash)});
            let signed = deletion_hash(&last.tenant, last.number, &last.hash, before);
            if let Some(signature) = sign(&signed) {
                details["signature"] = hex::encode(signature).into();
            }
            add_act(&mut *tx, act_of_service(last.tenant, AuditAction::AuditDeleted, details))
                .await?;
        }
        tx.commit().await?;
        Ok(gone)
    }
}

async fn delete_stretches(
    tx: &mut dyn Transaction,
    before: DateTime<Utc>,
    limit: u32,
) -> Result<Vec<Deleted>, StoreError> {
    // The newest stretch is kept if it has only the record of a deletion. Otherwise its deletion would be recorded,
    // and so on for ever.
    let read = Query::new(
        "SELECT * FROM audit_stretches s WHERE s.last_at < :before AND NOT EXISTS \
         (SELECT 1 FROM audit_stretches k WHERE k.tenant = s.tenant AND k.number < s.number \
         AND k.last_at >= :before) AND NOT (s.records = 1 AND NOT EXISTS (SELECT 1 \
         FROM audit_stretches n WHERE n.tenant = s.tenant AND n.number > s.number) \
         AND EXISTS (SELECT 1 FROM audit_log a WHERE a.tenant = s.tenant AND a.at = s.first_at \
         AND a.action = 'audit.deleted')) ORDER BY s.tenant, s.number LIMIT :limit",
    );
    let read = read.bind("before", before).bind("limit", limit.div_ceil(100));
    let expired: Vec<Stretch> = readable(&tx.run(read).await?).collect();
    let mut deleted: Vec<Deleted> = Vec::new();
    let mut records = 0;
    for stretch in expired {
        if records >= u64::from(limit) {
            break;
        }
        let members: Vec<Uuid> = stretch.members().collect();
        let delete = Query::new(
            "DELETE FROM audit_log WHERE tenant = :tenant AND at >= :first AND at <= :last \
             AND id IN :members RETURNING id",
        );
        let delete = delete.bind("tenant", &stretch.tenant).bind("first", stretch.first_at);
        let delete = delete.bind("last", stretch.last_at).bind("members", &*members);
        let gone = tx.run(delete).await?.len() as u64;
        let delete =
            Query::new("DELETE FROM audit_stretches WHERE tenant = :tenant AND number = :number");
        let delete = delete.bind("tenant", &stretch.tenant).bind("number", stretch.number);
        tx.run(delete).await?;
        records += gone;
        match deleted.last_mut() {
            Some(before) if before.last.tenant == stretch.tenant => {
                *before = Deleted { records: before.records + gone, last: stretch };
            }
            _ => deleted.push(Deleted { records: gone, last: stretch }),
        }
    }
    Ok(deleted)
}
