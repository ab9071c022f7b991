//! Whether a proposed output is accepted: its schema, then its rules, then the validator that the operator
//! asks over HTTP.
//!
//! Each stage judges only what the ones before it accept, so that a rule need not fear a missing
//! key and no validator is asked about malformed output. What a rejection means for the run is the state
//! machine's.

use serde_json::Value;
use uuid::Uuid;

use super::handlers::Handlers;
use super::state::Proposal;
use crate::agents::Agent;
use crate::event::ValidationError;

/// What is wrong with a proposal; nothing where it is accepted.
pub async fn errors_of(
    agent: &Agent,
    proposal: &Proposal,
    inputs: &Value,
    run_id: Uuid,
    handlers: &Handlers,
) -> Vec<ValidationError> {
    if let Some(message) = &proposal.malformed {
        return vec![ValidationError { pointer: String::new(), message: message.clone() }];
    }
    let output = &proposal.output;
    if let Err(errors) = agent.check_output(output) {
        return errors;
    }
    let broken = agent.rules_broken_by(output, inputs);
    let validator =
        agent.definition.output.as_ref().and_then(|contract| contract.validator.as_ref());
    match validator {
        Some(validator) if broken.is_empty() => {
            handlers.judged(validator, output, inputs, run_id).await
        }
        _ => broken,
    }
}
