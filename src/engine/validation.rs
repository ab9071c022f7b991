//! Checks a proposed output: by the schema, then by the rules, then by the operator's validator over HTTP.
//!
//! Each stage sees only what the earlier stages have accepted. So a rule can rely on required keys, and the
//! validator gets no malformed output. The state machine decides what a verdict means for the run.

use serde_json::Value;
use uuid::Uuid;

use super::handlers::Handlers;
use super::state::Proposal;
use crate::agents::Agent;
use crate::event::ValidationError;

/// The verdict on a proposal.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// What is wrong with it; nothing if it is accepted.
    Errors(Vec<ValidationError>),
    /// The validator gave no usable answer, for this reason: nothing that the model could correct.
    Undecided(String),
}

pub async fn verdict_on(
    agent: &Agent,
    proposal: &Proposal,
    inputs: &Value,
    run_id: Uuid,
    handlers: &Handlers,
) -> Verdict {
    if let Some(message) = &proposal.malformed {
        let error = ValidationError { pointer: String::new(), message: message.clone() };
        return Verdict::Errors(vec![error]);
    }
    let output = &proposal.output;
    if let Err(errors) = agent.check_output(output) {
        return Verdict::Errors(errors);
    }
    let broken = agent.rules_broken_by(output, inputs);
    let validator =
        agent.definition.output.as_ref().and_then(|contract| contract.validator.as_ref());
    match validator {
        Some(validator) if broken.is_empty() => handlers
            .judged(validator, output, inputs, run_id)
            .await
            .map_or_else(Verdict::Undecided, Verdict::Errors),
        _ => Verdict::Errors(broken),
    }
}
