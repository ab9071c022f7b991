//! Refuses child runs whose provider is known to refuse requests.
//!
//! The router remembers a refusal for seconds only. Here it is remembered for one response of the parent's
//! model, so that the children of a long batch do not ask a refusing provider again. The parent itself goes
//! on; if it has the same provider, its own next call may fail.

use std::collections::HashMap;

use parking_lot::Mutex;
use uuid::Uuid;

use super::Runtime;
use crate::engine::RunControl;
use crate::event::ValidationError;
use crate::providers::ProviderError;
use crate::tools::subagent::ChildFailed;

/// Attempt and iteration of a response.
type ResponseId = (u32, u32);

/// Agents of which no more children are started in one response, and why.
#[derive(Debug, Default)]
pub(super) struct RefusedAgents(Mutex<(ResponseId, HashMap<String, ChildFailed>)>);

impl RefusedAgents {
    fn of(&self, response: ResponseId, agent: &str) -> Option<ChildFailed> {
        let mut refused = self.0.lock();
        if refused.0 != response {
            *refused = (response, HashMap::new());
        }
        refused.1.get(agent).cloned()
    }

    fn note(&self, agent: &str, why: ChildFailed) {
        self.0.lock().1.insert(agent.to_owned(), why);
    }
}

impl Runtime {
    /// Why a child is not started whose models are all refused by their providers. Waits while that
    /// is being found out. A child that was started before goes on.
    pub(super) async fn refused_child(
        &self,
        control: &RunControl,
        refused: &RefusedAgents,
        (tenant, id): (&str, Uuid),
        agent: &str,
    ) -> Option<ChildFailed> {
        let response = control.delegating().map(|now| (now.attempt(), now.iteration()))?;
        let failed = if let Some(failed) = refused.of(response, agent) {
            failed
        } else {
            let known = self.inner.agents.named(agent)?;
            let models = known.definition.models_from(&known.definition.model);
            let refusal = self.inner.router.refusal(&models).await?;
            tracing::warn!(agent, %refusal, "no more child runs are started for now");
            refused_child(agent, &refusal)
        };
        if !matches!(self.inner.store.run(tenant, id).await, Ok(None)) {
            return None;
        }
        refused.note(agent, failed.clone());
        Some(failed)
    }
}

fn refused_child(agent: &str, refusal: &ProviderError) -> ChildFailed {
    let ProviderError { provider, message, .. } = refusal;
    let code = refusal.code.as_deref().unwrap_or(refusal.kind.as_str());
    ChildFailed(format!(
        "The agent {agent} was not started: the provider {provider} of its model refuses ({code}): {message}"
    ))
}

/// Why a child cannot work on what it was given.
pub(super) fn invalid_inputs(agent: &str, errors: &[ValidationError]) -> ChildFailed {
    let lines = errors.iter().map(|error| {
        let at = if error.pointer.is_empty() { "(root)" } else { &error.pointer };
        format!("\n- at {at}: {}", error.message)
    });
    ChildFailed(format!(
        "The inputs do not match the schema of the agent {agent}:{}",
        lines.collect::<String>()
    ))
}
