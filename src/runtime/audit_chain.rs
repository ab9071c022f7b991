//! Closes stretches of the audit log, and signs them.
//!
//! Every replica tries regularly, and one at a time closes; no commit waits for it. Each replica remembers the
//! newest stretch of each tenant. If that stretch is missing or different, the database was tampered with, and
//! the replica signs nothing more of this tenant. The store defines stretches and compares them with their
//! records.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use hmac::{Hmac, KeyInit, Mac};
use parking_lot::Mutex;
use serde_json::json;
use sha2::Sha256;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::event::{Act, AuditAction, SERVICE};
use crate::store::{
    ChainHead, CheckedStretch, Closed, Closing, IsSigned, KnownHead, Page, Signatures, Store,
    StoreError,
};

/// Records in a full stretch.
const STRETCH_RECORDS: usize = 1000;
/// The age of a record at which fewer records are closed.
const STRETCH_AGE: TimeDelta = TimeDelta::hours(1);
/// The age at which no older record can still be committed: longer than a record that is not dated as late can take.
const SETTLED_AGE: TimeDelta = TimeDelta::minutes(5);
/// How often this replica tries to close stretches.
const POLL_INTERVAL: Duration = Duration::from_secs(30);

/// Signs stretches: HMAC-SHA256 of their hashes. Keys that were replaced still verify what they
/// signed.
#[derive(Clone)]
pub struct AuditKey {
    signing: Hmac<Sha256>,
    replaced: Vec<Hmac<Sha256>>,
}

impl AuditKey {
    /// The first key signs; the others only verify. `None` if there are no keys.
    pub fn new<'k>(keys: impl IntoIterator<Item = &'k [u8]>) -> Option<Self> {
        let mut keys = keys.into_iter().map(|key| Hmac::new_from_slice(key).ok());
        let signing = keys.next()??;
        Some(Self { signing, replaced: keys.flatten().collect() })
    }

    /// The signature of a hash.
    pub fn sign(&self, hash: &[u8]) -> Vec<u8> {
        let mut mac = self.signing.clone();
        mac.update(hash);
        mac.finalize().into_bytes().to_vec()
    }

    /// Whether that is the signature of a hash by one of the keys.
    pub fn has_signed(&self, hash: &[u8], signature: &[u8]) -> bool {
        std::iter::once(&self.signing).chain(&self.replaced).any(|key| {
            let mut mac = key.clone();
            mac.update(hash);
            mac.verify_slice(signature).is_ok()
        })
    }
}

impl fmt::Debug for AuditKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AuditKey")
    }
}

/// The state of a tenant's chain, as known to this process.
#[derive(Debug, Clone)]
enum Seen {
    Head(ChainHead),
    /// The known head was replaced. Nothing more is closed.
    Replaced(Act, TamperRecord),
}

/// Whether the replacement is recorded in the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TamperRecord {
    Written,
    Pending,
}

/// Closes stretches of the store's audit log, and checks those that are closed.
pub struct AuditChain {
    store: Arc<Store>,
    /// The key that signs the stretches; absent: they are not signed.
    key: Option<AuditKey>,
    /// How long records are kept; for ever where absent.
    retention: Option<TimeDelta>,
    /// By tenant.
    heads: Mutex<BTreeMap<String, Seen>>,
}

/// Logs that the known head of a chain was replaced, and makes the audit record of that.
fn replaced(tenant: String, known: &ChainHead, stored: Option<&ChainHead>) -> Act {
    let (number, hash) = (known.number, hex::encode(&known.hash));
    let stored_number = stored.map(|head| head.number);
    let stored_hash = stored.map(|head| hex::encode(&head.hash));
    tracing::error!(
        tenant,
        number,
        hash,
        stored_number,
        stored_hash,
        "the audit log was tampered with: a closed stretch is missing or differs; this process closes \
         no more of it"
    );
    let details = json!({"number": number, "hash": hash,
        "stored_number": stored_number, "stored_hash": stored_hash});
    let subject = SERVICE.to_owned();
    Act { tenant, subject, action: AuditAction::ChainReplaced, run_id: None, reason: None, details }
}

impl AuditChain {
    pub(super) fn new(
        store: Arc<Store>,
        key: Option<AuditKey>,
        retention: Option<Duration>,
    ) -> Self {
        let retention = retention.and_then(|retention| TimeDelta::from_std(retention).ok());
        Self { store, key, retention, heads: Mutex::default() }
    }

    /// Closes stretches, until the service stops.
    pub(super) async fn close(self: Arc<Self>, stop: CancellationToken) {
        let mut look = clock::every(POLL_INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = look.tick() => {}
            }
            if let Err(error) = self.close_complete().await {
                error.log_retry("stretches of the audit log are closed later");
            }
        }
    }

    async fn close_complete(&self) -> Result<(), StoreError> {
        let now = self.store.now().await?;
        let closing = Closing {
            records: STRETCH_RECORDS,
            settled: now - SETTLED_AGE,
            aged: now - STRETCH_AGE,
        };
        let mut tenants: BTreeSet<String> = self.heads.lock().keys().cloned().collect();
        tenants.extend(self.store.audited_tenants().await?);
        for tenant in tenants {
            match self.close_of(&tenant, closing).await {
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, tenant, "the audit log of a tenant could not be closed; retrying");
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Closes the stretches of a tenant that are complete.
    async fn close_of(&self, tenant: &str, closing: Closing) -> Result<(), StoreError> {
        let (store, heads) = (&self.store, &self.heads);
        let sign = |hash: &[u8]| self.key.as_ref().map(|key| key.sign(hash));
        let is_signed = self
            .key
            .as_ref()
            .map(|key| |hash: &[u8], signature: &[u8]| key.has_signed(hash, signature));
        let is_signed = is_signed.as_ref().map(|it| it as IsSigned<'_>);
        let note = |seen| heads.lock().insert(tenant.to_owned(), seen);
        loop {
            let seen = heads.lock().get(tenant).cloned();
            let known = match seen {
                None => None,
                Some(Seen::Head(head)) => {
                    Some(KnownHead { head, retention: self.retention, is_signed })
                }
                Some(Seen::Replaced(_, TamperRecord::Written)) => break,
                Some(Seen::Replaced(act, TamperRecord::Pending)) => {
                    store.record_act(act.clone()).await?;
                    note(Seen::Replaced(act, TamperRecord::Written));
                    break;
                }
            };
            match store.close_stretch(tenant, closing, known.as_ref(), &sign).await? {
                Closed::Stretch(closed) => {
                    let (number, hash) = (closed.number, hex::encode(&closed.hash));
                    tracing::info!(tenant, number, hash, "a stretch of the audit log is closed");
                    note(Seen::Head(ChainHead::from(&closed)));
                }
                Closed::Nothing(Some(head)) => {
                    note(Seen::Head(head));
                    break;
                }
                Closed::Nothing(None) | Closed::NotNow => break,
                Closed::Replaced(stored) => {
                    let Some(KnownHead { head, .. }) = known else { break };
                    let act = replaced(tenant.to_owned(), &head, stored.as_ref());
                    note(Seen::Replaced(act, TamperRecord::Pending));
                }
            }
        }
        Ok(())
    }

    /// Deletes stretches of all tenants whose records were all written before that instant, until
    /// about `limit` records are gone; how many.
    pub(super) async fn delete(
        &self,
        before: DateTime<Utc>,
        limit: u32,
    ) -> Result<u64, StoreError> {
        let sign = |hash: &[u8]| self.key.as_ref().map(|key| key.sign(hash));
        self.store.delete_audit(before, limit, &sign).await
    }

    /// A page of a tenant's stretches, each compared with its records and its signature. Where there
    /// is a key, only those up to `unsigned_until` may be without a signature.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub async fn checked_stretches(
        &self,
        tenant: &str,
        page: &Page<i64>,
        unsigned_until: i64,
    ) -> Result<Vec<CheckedStretch>, StoreError> {
        let is_signed = self
            .key
            .as_ref()
            .map(|key| |hash: &[u8], signature: &[u8]| key.has_signed(hash, signature));
        let is_signed = is_signed.as_ref().map(|it| it as IsSigned<'_>);
        let signatures = Signatures { is_signed, unsigned_until };
        self.store.checked_stretches(tenant, page, signatures).await
    }
}
