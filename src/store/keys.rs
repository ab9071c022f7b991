//! API keys.

use std::time::Duration;

use serde_json::json;
use uuid::Uuid;

use super::audit::add_act;
use super::backend::{Transaction, Work};
use super::conflict::retry_conflicts;
use super::sql::Query;
use super::tables::{Record, insert};
use super::{ApiKeyRecord, RateLimit, Store, StoreError, Wakeup};
use crate::event::{Act, AuditAction, SERVICE};

/// The outcome of storing a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStored {
    Stored,
    /// A key with this id exists already and is unchanged.
    IdTaken,
    /// The creating key has been revoked.
    CreatorRevoked,
}

/// Which keys to revoke.
#[derive(Debug, Clone, Copy)]
pub struct Revocation<'a> {
    /// The subject that revokes them.
    pub subject: &'a str,
    /// Only keys of this tenant, and only keys without `admin`, may be revoked; `None`: all keys of all tenants.
    pub within: Option<&'a str>,
    pub id: &'a str,
    /// Also revoke all keys that were created with this key, directly or indirectly.
    pub with_descendants: bool,
    /// Also revoke the operator's own key, and the last key with `admin`.
    pub is_forced: bool,
}

/// Whether there are keys with `admin`, of any tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminKeys {
    /// No such key has ever existed.
    Never,
    /// All of them are revoked or expired.
    Unusable,
    /// At least one of them can be used.
    Usable,
}

/// The outcome of a revocation.
#[derive(Debug, Clone, PartialEq)]
pub enum Revoked {
    /// These keys are revoked, by this revocation or an earlier one.
    Done(Vec<ApiKeyRecord>),
    /// There is no such key.
    Unknown,
    /// One of them has `admin`.
    RequiresAdmin,
    /// One of them is the operator's key, which the service created.
    OfOperator,
    /// No key with `admin` would be left.
    LastAdmin,
}

impl ApiKeyRecord {
    /// The key's own limits, with the service's defaults for those that are unset.
    pub fn rate_limit(&self, default: RateLimit) -> RateLimit {
        default.of_key(self.rate_limit_per_minute, self.rate_limit_burst)
    }

    /// Whether the key has the scope `admin`.
    pub fn is_admin(&self) -> bool {
        self.scopes.iter().any(|scope| scope == "admin")
    }
}

/// Keys with `admin` that can be used; other scopes that contain this text do not count.
const ADMINS: &str = "SELECT * FROM api_keys WHERE revoked_at IS NULL \
    AND (expires_at IS NULL OR expires_at > {now}) AND scopes LIKE '%\"admin\"%' ORDER BY id";

impl Store {
    /// Stores a key, and records who created it.
    pub async fn insert_key(&self, key: &ApiKeyRecord) -> Result<KeyStored, StoreError> {
        retry_conflicts(|| self.try_to_insert_key(key)).await
    }

    async fn try_to_insert_key(&self, key: &ApiKeyRecord) -> Result<KeyStored, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        if let Some(creator) = &key.created_by {
            // The creator is locked, so that a revocation with all descendants misses none.
            let creator =
                Query::new("SELECT * FROM api_keys WHERE id = :id{for_update}").bind("id", creator);
            if let Some(row) = tx.run(creator).await?.first()
                && ApiKeyRecord::read(row)?.revoked_at.is_some()
            {
                tx.commit().await?;
                return Ok(KeyStored::CreatorRevoked);
            }
        }
        let insert = insert("api_keys", key.clone());
        let insert = insert.push(" ON CONFLICT DO NOTHING RETURNING id");
        if tx.run(insert).await?.is_empty() {
            tx.commit().await?;
            return Ok(KeyStored::IdTaken);
        }
        let subject = key.created_by.as_deref().unwrap_or(SERVICE);
        add_act(&mut *tx, act_on(key, subject, AuditAction::KeyCreated)).await?;
        tx.commit().await?;
        Ok(KeyStored::Stored)
    }

    /// Whether there are keys with `admin`.
    pub async fn admin_keys(&self) -> Result<AdminKeys, StoreError> {
        if !self.backend.read(Work::Data, Query::new(ADMINS)).await?.is_empty() {
            return Ok(AdminKeys::Usable);
        }
        let all = Query::new("SELECT 1 FROM api_keys WHERE scopes LIKE '%\"admin\"%' LIMIT 1");
        let is_known = !self.backend.read(Work::Data, all).await?.is_empty();
        Ok(if is_known { AdminKeys::Unusable } else { AdminKeys::Never })
    }

    /// A key by id, of any tenant, for authentication.
    pub async fn key(&self, id: &str) -> Result<Option<ApiKeyRecord>, StoreError> {
        let key = Query::new("SELECT * FROM api_keys WHERE id = :id").bind("id", id);
        let rows = self.backend.read(Work::Data, key).await?;
        rows.first().map(Record::read).transpose()
    }

    /// Ids and names of these keys of a tenant, sorted by id, and whether several keys of the tenant have that name.
    pub async fn key_names(
        &self,
        tenant: &str,
        ids: &[String],
    ) -> Result<Vec<(String, String, bool)>, StoreError> {
        let look = Query::new(
            "SELECT id, name, name IN (SELECT o.name FROM api_keys o WHERE o.tenant = :tenant \
             GROUP BY o.name HAVING count(*) > 1) AS is_shared \
             FROM api_keys WHERE tenant = :tenant AND id IN :ids ORDER BY id",
        );
        let look = look.bind("tenant", tenant).bind("ids", ids);
        let rows = self.backend.read(Work::Data, look).await?;
        rows.iter()
            .map(|row| Ok((row.read("id")?, row.read("name")?, row.read("is_shared")?)))
            .collect()
    }

    /// Whether a key was created by `creator`, directly or through other keys.
    pub async fn key_descends_from(&self, id: &str, creator: &str) -> Result<bool, StoreError> {
        let look = Query::new(
            "WITH RECURSIVE creators (id) AS (SELECT created_by FROM api_keys WHERE id = :id \
             UNION SELECT k.created_by FROM creators c JOIN api_keys k ON k.id = c.id) \
             SELECT 1 FROM creators WHERE id = :creator",
        );
        let look = look.bind("id", id).bind("creator", creator);
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }

    /// Notes that keys are in use; skips keys for which that was noted less than `pause` ago.
    pub async fn note_key_use(&self, ids: &[String], pause: Duration) -> Result<(), StoreError> {
        let note = Query::new(
            "UPDATE api_keys SET last_used_at = {now} WHERE id IN :ids \
             AND (last_used_at IS NULL OR last_used_at < {now} - :pause)",
        );
        let note = note.bind("ids", ids).bind("pause", pause);
        self.backend.write(Work::Data, note).await.map(drop)
    }

    /// Revokes a key, and records who did that. Revoking it again is harmless.
    pub async fn revoke_keys(&self, what: Revocation<'_>) -> Result<Revoked, StoreError> {
        retry_conflicts(|| self.try_to_revoke_keys(what)).await
    }

    async fn try_to_revoke_keys(&self, what: Revocation<'_>) -> Result<Revoked, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let keys = keys_to_revoke(&mut *tx, &what).await?;
        let outside = |key: &ApiKeyRecord| what.within.is_some_and(|tenant| tenant != key.tenant);
        if keys.first().is_none_or(outside) {
            return Ok(Revoked::Unknown);
        }
        let is_live = |key: &&ApiKeyRecord| key.revoked_at.is_none();
        if what.within.is_some() && keys.iter().any(|key| key.is_admin() || outside(key)) {
            return Ok(Revoked::RequiresAdmin);
        }
        if !what.is_forced && keys.iter().filter(is_live).any(|key| key.created_by.is_none()) {
            return Ok(Revoked::OfOperator);
        }
        let takes_admin = keys.iter().any(|key| key.revoked_at.is_none() && key.is_admin());
        if takes_admin {
            // The keys are locked, so that the second of two concurrent revocations sees the result of the first.
            tx.run(Query::new(ADMINS).push("{for_update}")).await?;
        }
        let keys = revoke(&mut *tx, &what, keys).await?;
        if takes_admin && !what.is_forced && tx.run(Query::new(ADMINS)).await?.is_empty() {
            return Ok(Revoked::LastAdmin); // rolled back
        }
        tx.commit().await?;
        self.backend.hint(Wakeup::Keys).await;
        Ok(Revoked::Done(keys))
    }

    /// Runs of these keys that have not ended, of all tenants.
    pub async fn live_runs_of(
        &self,
        subjects: &[String],
    ) -> Result<Vec<(String, Uuid)>, StoreError> {
        // Constants, so that the planner can see which partial indexes they imply.
        let live = Query::new(
            "SELECT tenant, id FROM runs WHERE status = 'running' AND owner IS NOT NULL \
             AND subject IN :subjects UNION ALL SELECT tenant, id FROM runs \
             WHERE status = 'queued' AND available_at IS NOT NULL AND subject IN :subjects \
             UNION ALL SELECT tenant, id FROM runs WHERE status IN \
             ('awaiting_approval', 'awaiting_tool_results', 'needs_review') \
             AND subject IN :subjects",
        );
        let rows = self.backend.read(Work::Data, live.bind("subjects", subjects)).await?;
        rows.iter().map(|row| Ok((row.read("tenant")?, row.read("id")?))).collect()
    }
}

/// The keys to revoke, the named one first; empty if it does not exist.
async fn keys_to_revoke(
    tx: &mut dyn Transaction,
    what: &Revocation<'_>,
) -> Result<Vec<ApiKeyRecord>, StoreError> {
    let keys = if what.with_descendants {
        "WITH RECURSIVE family (id) AS (SELECT id FROM api_keys WHERE id = :id \
         UNION SELECT k.id FROM family f JOIN api_keys k ON k.created_by = f.id) \
         SELECT api_keys.* FROM family JOIN api_keys ON api_keys.id = family.id \
         ORDER BY CASE WHEN api_keys.id = :id THEN 0 ELSE 1 END, api_keys.created_at, api_keys.id"
    } else {
        "SELECT * FROM api_keys WHERE id = :id"
    };
    tx.run(Query::new(keys).bind("id", what.id)).await?.iter().map(Record::read).collect()
}

/// Revokes these keys; with descendants, also keys that were created in the meantime.
async fn revoke(
    tx: &mut dyn Transaction,
    what: &Revocation<'_>,
    mut keys: Vec<ApiKeyRecord>,
) -> Result<Vec<ApiKeyRecord>, StoreError> {
    loop {
        let ids: Vec<String> = keys.iter().map(|key| key.id.clone()).collect();
        let revoke = Query::new(
            "UPDATE api_keys SET revoked_at = {now} WHERE id IN :ids AND revoked_at IS NULL \
             RETURNING *",
        );
        let revoked = tx.run(revoke.bind("ids", &*ids)).await?;
        for row in &revoked {
            let key = ApiKeyRecord::read(row)?;
            add_act(tx, act_on(&key, what.subject, AuditAction::KeyRevoked)).await?;
        }
        keys = keys_to_revoke(tx, what).await?;
        if revoked.is_empty() || keys.iter().all(|key| key.revoked_at.is_some()) {
            return Ok(keys);
        }
    }
}

fn act_on(key: &ApiKeyRecord, subject: &str, action: AuditAction) -> Act {
    let mut details = json!({"key_id": key.id, "name": key.name, "scopes": key.scopes});
    if action == AuditAction::KeyCreated {
        details["expires_at"] = json!(key.expires_at);
        details["rate_limit_per_minute"] = json!(key.rate_limit_per_minute);
        details["rate_limit_burst"] = json!(key.rate_limit_burst);
    }
    Act {
        tenant: key.tenant.clone(),
        subject: subject.to_owned(),
        action,
        run_id: None,
        reason: None,
        details,
    }
}
