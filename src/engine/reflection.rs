//! Shows a model the output that it proposed, before it submits it.
//!
//! The reflection comes from a template of the definition, or from an endpoint of the operator. If it fails, the
//! model reads the error and may propose again.

use serde_json::Value;
use uuid::Uuid;

use super::handlers::Handlers;
use crate::agents::Agent;
use crate::tools::results::capped;

/// The text, capped like the result of a tool.
///
/// # Errors
/// Why there is no reflection, for the model.
pub async fn reflect(
    agent: &Agent,
    proposal: &Value,
    inputs: &Value,
    run_id: Uuid,
    handlers: &Handlers,
) -> Result<String, String> {
    if let Some(rendered) = agent.reflected(proposal, inputs) {
        return rendered
            .map(capped)
            .map_err(|error| format!("The output cannot be shown: {error}."));
    }
    let reflection =
        agent.definition.output.as_ref().and_then(|contract| contract.reflection.as_ref());
    let endpoint = reflection
        .and_then(|reflection| Some((reflection.url.as_deref()?, reflection.timeout_seconds)));
    match endpoint {
        Some((url, timeout)) => {
            handlers.reflected(url, timeout, proposal, inputs, run_id).await.map(capped)
        }
        None => Err("This output is not reflected.".to_owned()),
    }
}
