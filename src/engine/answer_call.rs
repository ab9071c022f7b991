//! The model call that only writes the final answer (`react.final_via_inference`), where the definition
//! gives it a model or options of its own.
//!
//! Its own model is asked first; those of the run take over where it cannot answer.

use crate::agents::definition::ReactSection;
use crate::run::Sampling;

/// The models and options of the call that only writes the final answer.
#[derive(Debug)]
pub struct AnswerCall {
    /// The model that the definition names for it, if it does, then those of the run.
    pub models: Vec<String>,
    /// Whether the first one is named for it.
    pub has_own_model: bool,
    pub sampling: Sampling,
}

impl AnswerCall {
    /// The call that writes the final answer, if the definition gives it a model or options of its own.
    pub(super) fn of(react: &ReactSection, models: &[String], sampling: &Sampling) -> Option<Self> {
        let ReactSection { final_model, final_sampling, .. } = react;
        if !react.final_via_inference || (final_model.is_none() && final_sampling.is_none()) {
            return None;
        }
        let others = models.iter().filter(|model| final_model.as_ref() != Some(*model));
        Some(Self {
            models: final_model.iter().chain(others).cloned().collect(),
            has_own_model: final_model.is_some(),
            sampling: sampling
                .overridden_by(final_sampling.as_ref().unwrap_or(&Sampling::default())),
        })
    }
}
