//! Changes of definitions while the service runs, for the audit log.
//!
//! A definition belongs to all tenants; its changes are recorded in the tenant of the operator's own key, by
//! every replica that reads them. A record that the store refuses is tried again.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::agents::catalogue::Change;
use crate::agents::{Agent, Definition};
use crate::event::{Act, AuditAction, SERVICE};
use crate::runtime::keys::DEFAULT_TENANT;
use crate::store::Store;

/// Records that wait for the store, at most.
const MAX_WAITING: usize = 256;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_secs(2);
static WAITING: Semaphore = Semaphore::const_new(MAX_WAITING);

/// Records in the audit log that a definition or a skill has changed, with what that means for its
/// policy.
pub(super) async fn record(store: &Arc<Store>, change: &Change) {
    let details = match change {
        Change::Loaded(agent, before) => {
            let policy = |agent: &Agent| {
                let Definition { governance, tools, tool_options, interceptors, .. } =
                    &agent.definition;
                json!([governance, tools, tool_options, interceptors])
            };
            let changes_policy = before.as_ref().is_none_or(|old| policy(old) != policy(agent));
            json!({"agent": agent.definition.name, "definition_hash": agent.hash,
                "previous_hash": before.as_ref().map(|old| &old.hash), "changes_policy": changes_policy})
        }
        Change::Removed(agent) => json!({"agent": agent, "definition_hash": null}),
        Change::SkillLoaded(skill, before) => {
            let changes_policy = before.as_ref().is_none_or(|old| old.bounds != skill.bounds);
            json!({"skill": skill.bounds.skill, "changes_policy": changes_policy, "removed": false})
        }
        Change::SkillRemoved(skill) => {
            json!({"skill": skill, "changes_policy": true, "removed": true})
        }
        Change::Broken(_) => return,
    };
    let act = Act {
        tenant: DEFAULT_TENANT.to_owned(),
        subject: SERVICE.to_owned(),
        action: AuditAction::DefinitionChanged,
        run_id: None,
        reason: None,
        details,
    };
    let Err(error) = store.record_act(act.clone()).await else { return };
    let Ok(permit) = WAITING.try_acquire() else {
        let details = &act.details;
        tracing::error!(%error, %details, "a changed definition is not recorded in the audit log");
        return;
    };
    tracing::warn!(%error, "a changed definition is recorded in the audit log later");
    tokio::spawn(record_later(Arc::clone(store), act, permit));
}

async fn record_later(store: Arc<Store>, act: Act, _permit: SemaphorePermit<'static>) {
    loop {
        tokio::time::sleep(PAUSE).await;
        match store.record_act(act.clone()).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, "a changed definition is still to be recorded"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{AuditFilter, Page, open};

    #[tokio::test]
    async fn a_change_is_recorded_when_the_store_is_usable_again() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("changes.db").display());
        let store = open(&url, 1, false).await.unwrap();
        record(&store, &Change::SkillRemoved("careful".to_owned())).await; // it has no tables yet
        store.migrate().await.unwrap();
        let all = Page { limit: 9, after: None };
        for _ in 0..1000 {
            let rows = store.audit(DEFAULT_TENANT, &AuditFilter::default(), &all).await.unwrap();
            if let Some(row) = rows.first() {
                assert!(row.arguments.contains("\"skill\":\"careful\""), "{}", row.arguments);
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the change is not recorded");
    }
}
