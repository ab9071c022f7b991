//! The model that a request may choose. The fallback models are always those of the definition.

use std::fmt::Write as _;

use super::{PlanError, refused};
use crate::agents::Definition;
use crate::bounds::name;
use crate::bounds::text::quoted;
use crate::run::Overrides;

/// A refusal names at most this many models.
const MAX_NAMED: usize = 8;

/// Refuses what is not the name of a model, and models that the definition does not allow.
pub(super) fn check_selected_model(
    overrides: &Overrides,
    definition: &Definition,
) -> Result<(), PlanError> {
    let Some(model) = &overrides.model else { return Ok(()) };
    name::check_model(model)
        .map_err(|wrong| refused("/model", format!("{} {wrong}", quoted(model))))?;
    if definition.may_use(model) {
        return Ok(());
    }
    let mut selectable: Vec<&str> = definition.selectable_models().collect();
    let more = selectable.split_off(selectable.len().min(MAX_NAMED));
    let mut message = format!(
        "{} may not be chosen for this agent, whose definition allows {}",
        quoted(model),
        selectable.join(", ")
    );
    if !more.is_empty() {
        let _ = write!(message, " and {} more", more.len());
    }
    Err(refused("/model", message))
}
