//! Changes of definitions while the service runs, for the audit log.
//!
//! A definition belongs to all tenants; its changes are recorded in the tenant of the operator's own key, by
//! every replica that reads them.

use serde_json::json;

use crate::agents::catalogue::Change;
use crate::agents::{Agent, Definition};
use crate::event::{Act, AuditAction, SERVICE};
use crate::runtime::keys::DEFAULT_TENANT;
use crate::store::Store;

/// Records in the audit log that a definition has changed, with what that means for its policy.
pub(super) async fn record(store: &Store, change: &Change) {
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
        Change::SkillLoaded(_) | Change::SkillRemoved(_) | Change::Broken(_) => return,
    };
    let act = Act {
        tenant: DEFAULT_TENANT.to_owned(),
        subject: SERVICE.to_owned(),
        action: AuditAction::DefinitionChanged,
        run_id: None,
        reason: None,
        details,
    };
    if let Err(error) = store.record_act(act).await {
        tracing::warn!(%error, "a changed definition could not be recorded in the audit log");
    }
}
