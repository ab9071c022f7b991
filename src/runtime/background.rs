//! What a run brings along beside its inputs: history, skills, memories.
//!
//! It is looked up once, when the run is opened, and then stands in the run's journal: a run that goes on elsewhere
//! reads it there.

use uuid::Uuid;

use super::Runtime;
use super::history::history;
use crate::agents::prompt::Background;
use crate::engine::Plan;
use crate::event::RunEvent;
use crate::run::Caller;
use crate::store::{NewRun, StoreError};

impl Runtime {
    /// What this run brings along; `earlier` are the runs of its session before it, the oldest first.
    pub(super) async fn background(
        &self,
        plan: &Plan,
        caller: &Caller,
        new: &NewRun,
        earlier: &[Uuid],
    ) -> Result<Background, StoreError> {
        let mut background = Background::default();
        if let Some(session_id) = new.session_id.clone().filter(|_| !earlier.is_empty()) {
            let journals = self.inner.store.journals(&caller.tenant, earlier).await?;
            let history = history(&journals, earlier, plan.agent.definition.history);
            if history.runs > 0 {
                let (runs, turns, tokens) = (history.runs, history.turns.len(), history.tokens);
                background.session = Some(RunEvent::SessionLoaded { session_id, runs, turns, tokens });
                background.turns = history.turns;
            }
        }
        if let Some(recall) = plan.agent.definition.memory.and_then(|memory| memory.recall) {
            background.memories = self.memories(recall, caller, new).await?;
        }
        Ok(background)
    }
}
