//! What a run brings along beside its inputs: history, skills, memories.
//!
//! It is looked up once, when the run is opened, and then stands in the run's journal: a run that goes on elsewhere
//! reads it there.

use super::Runtime;
use crate::agents::prompt::Background;
use crate::engine::Plan;
use crate::run::Caller;
use crate::store::{NewRun, StoreError};

impl Runtime {
    /// What this run brings along.
    #[expect(clippy::unused_async, reason = "history, skills and memories are looked up here")]
    pub(super) async fn background(&self, _: &Plan, _: &Caller, _: &NewRun) -> Result<Background, StoreError> {
        Ok(Background::default())
    }
}
