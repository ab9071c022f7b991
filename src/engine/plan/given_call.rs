//! The plan of a run that consists of one tool call of its caller.

use super::{PlanError, refused};
use crate::bounds::text::quoted;
use crate::providers::ToolOffer;
use crate::run::{GivenCall, Overrides, RunKind};

/// The given call; only its tool stays among the offers.
pub(super) fn only_given_call(
    kind: RunKind,
    overrides: &Overrides,
    offers: &mut Vec<ToolOffer>,
) -> Result<Option<GivenCall>, PlanError> {
    if kind != RunKind::Call {
        return Ok(None);
    }
    let call = overrides.call.clone().ok_or_else(|| refused("/tool", "is missing"))?;
    offers.retain(|offer| offer.name == call.tool);
    if offers.is_empty() {
        let why = format!("{} is not a tool that this agent may call here", quoted(&call.tool));
        return Err(refused("/tool", why));
    }
    Ok(Some(call))
}
