//! Records which keys are used and which logins were refused: noted in memory by requests, written by one task.
//!
//! A key's use is written at most once a minute. Refused logins are counted by reason and source:
//! the first is written within a second, those that follow once a minute.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::jwt::JwtRefusal;
use super::keys::DEFAULT_TENANT;
use crate::bounds::tally::Tally;
use crate::clock;
use crate::event::{Act, AuditAction};
use crate::store::{ApiKeyRecord, Store};

/// The pause between two writes about the same key.
const PAUSE: Duration = Duration::from_mins(1);
/// Flush interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The subject of a login that names no key.
const UNKNOWN: &str = "unknown";

/// Why a login was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoginRefusal {
    Malformed,
    UnknownKey,
    WrongSecret,
    Revoked,
    Expired,
    ForgedToken,
    ExpiredToken,
    Jwt(JwtRefusal),
}

impl LoginRefusal {
    fn sentence(self) -> String {
        let known = match self {
            Self::Malformed => "The token is not an API key.",
            Self::UnknownKey => "There is no key with this id.",
            Self::WrongSecret => "The key has another secret.",
            Self::Revoked => "The key is revoked.",
            Self::Expired => "The key has expired.",
            Self::ForgedToken => "The short-lived token was not signed by this service.",
            Self::ExpiredToken => "The short-lived token has expired.",
            Self::Jwt(why) => return why.to_string(),
        };
        known.to_owned()
    }
}

/// Notes logins and writes what was noted.
pub struct Logins {
    store: Arc<Store>,
    key_uses: Mutex<KeyUses>,
    refused: Mutex<Tally<Group>>,
}

#[derive(Debug, Default)]
struct KeyUses {
    /// Keys that were used since the last write.
    waiting: HashSet<String>,
    written: HashMap<String, Instant>,
}

impl KeyUses {
    /// The keys whose use is to be written now.
    fn take(&mut self, now: Instant) -> Vec<String> {
        self.written.retain(|_, at| now.duration_since(*at) < PAUSE);
        let due: Vec<String> =
            self.waiting.extract_if(|id| !self.written.contains_key(id)).collect();
        self.written.extend(due.iter().map(|id| (id.clone(), now)));
        due
    }
}

/// Logins that are counted as one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Group {
    tenant: String,
    subject: String,
    why: LoginRefusal,
    /// The client's address; absent for the group of all further addresses.
    source: Option<IpAddr>,
}

impl Logins {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store, key_uses: Mutex::default(), refused: Mutex::default() }
    }

    /// Notes that a key is in use.
    pub fn note_key_use(&self, id: &str) {
        self.key_uses.lock().waiting.insert(id.to_owned());
    }

    /// Notes a refused login, which may have named a key that exists.
    pub fn note_refused(
        &self,
        why: LoginRefusal,
        key: Option<&ApiKeyRecord>,
        source: Option<IpAddr>,
    ) {
        let group = Group {
            tenant: key.map_or(DEFAULT_TENANT, |key| &key.tenant).to_owned(),
            subject: key.map_or(UNKNOWN, |key| &key.id).to_owned(),
            why,
            source,
        };
        self.refused.lock().note(group, |group| Group { source: None, ..group });
    }

    /// Writes what is noted, until the service stops.
    pub(super) async fn write(self: Arc<Self>, stop: CancellationToken) {
        let mut look = clock::every(POLL_INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = look.tick() => self.write_noted(false).await,
            }
        }
    }

    /// Writes what is due, or all of it.
    pub(super) async fn write_noted(&self, is_last: bool) {
        let now = Instant::now();
        let used = self.key_uses.lock().take(now);
        if !used.is_empty()
            && let Err(error) = self.store.note_key_use(&used, PAUSE).await
        {
            error.log_retry("the use of keys could not be noted; retrying in a minute");
            self.key_uses.lock().waiting.extend(used);
        }
        let refused = self.refused.lock().take(now, is_last);
        for (group, count) in refused {
            let source = group.source.map_or_else(|| "others".into(), |source| source.to_string());
            let act = Act {
                tenant: group.tenant.clone(),
                subject: group.subject.clone(),
                action: AuditAction::LoginRefused,
                run_id: None,
                reason: Some(group.why.sentence()),
                details: json!({"source": source, "count": count}),
            };
            if let Err(error) = self.store.record_act(act).await {
                tracing::warn!(%error, count, "refused logins could not be recorded; retrying in a minute");
                self.refused.lock().give_back(group, count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{AuditFilter, Page, open};

    #[tokio::test]
    async fn refused_writes_are_repeated_later() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("logins.db").display());
        let store = open(&url, 1, false).await.unwrap();
        let logins = Logins::new(Arc::clone(&store));
        logins.note_refused(LoginRefusal::Malformed, None, None);
        logins.write_noted(false).await; // the store has no tables yet
        store.migrate().await.unwrap();
        logins.note_refused(LoginRefusal::Malformed, None, None);
        logins.write_noted(true).await;
        let all = Page { limit: 9, after: None };
        let rows = store.audit(DEFAULT_TENANT, &AuditFilter::default(), &all).await.unwrap();
        let arguments: Vec<&str> = rows.iter().map(|row| row.arguments.as_str()).collect();
        assert!(matches!(&arguments[..], [one] if one.contains("\"count\":2")), "{arguments:?}");
    }

    #[test]
    fn the_use_of_a_key_is_written_once_a_minute() {
        let (start, mut used) = (Instant::now(), KeyUses::default());
        for (second, written) in [(0, true), (1, false), (59, false), (60, true), (61, false)] {
            used.waiting.insert("k".to_owned());
            let due = used.take(start + Duration::from_secs(second));
            assert_eq!(due == ["k"], written, "{second}");
        }
        assert_eq!(used.take(start + Duration::from_mins(2)), ["k"], "the use at 61 s");
        assert_eq!(used.take(start + Duration::from_mins(3)).len(), 0, "no use since");
    }
}
