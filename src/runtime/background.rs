//! What a run brings along beside its inputs: history, skills, memories.
//!
//! It is looked up once, when the run is opened, and then stands in the run's journal: a run that
//! goes on elsewhere reads it there.

use uuid::Uuid;

use super::Runtime;
use super::history::history;
use super::input_labels::labels_of_inputs;
use crate::agents::prompt::{ActiveSkill, Background};
use crate::agents::{Definition, Skill};
use crate::bounds::text::quoted;
use crate::engine::Plan;
use crate::event::{Event, RunEvent, ValidationError};
use crate::run::{Caller, Labels, OnInjection, Overrides};
use crate::store::{NewRun, StoreError};
use crate::tools::scan::{scan_inputs, scan_memories};

/// Why a run cannot have the skills that it should begin with.
#[derive(Debug, thiserror::Error)]
pub(super) enum SkillError {
    /// The request names one that the agent has not.
    #[error("{}", .0.message)]
    Refused(ValidationError),
    /// The file of one is gone.
    #[error("there is no skill named {0:?}")]
    Missing(String),
}

impl Runtime {
    /// What this run brings along; `earlier` are the runs of its session before it, the oldest
    /// first.
    pub(super) async fn background(
        &self,
        plan: &Plan,
        caller: &Caller,
        new: &NewRun,
        earlier: &[Uuid],
    ) -> Result<Background, StoreError> {
        let mut background = self.skills_of(plan);
        let injection = plan.agent.definition.governance.injection;
        background.labels = labels_of_inputs(plan.agent.definition.inputs.as_ref(), &new.inputs);
        if let Some(session_id) = new.session_id.clone().filter(|_| !earlier.is_empty()) {
            let journals = self.inner.store.journals(&caller.tenant, earlier).await?;
            let history = history(&journals, earlier, plan.agent.definition.history);
            if history.runs > 0 {
                let (runs, turns, tokens) = (history.runs, history.turns.len(), history.tokens);
                background.session =
                    Some(RunEvent::SessionLoaded { session_id, runs, turns, tokens });
                background.turns = history.turns;
                background.labels = background.labels.and(labels_of(&journals));
            }
        }
        if let Some(recall) = plan.agent.definition.memory.and_then(|memory| memory.recall) {
            let (found, labels) = self.memories(recall, caller, new).await?;
            background.labels = background.labels.and(labels);
            (background.memories, background.warnings) = scan_memories(found, injection.results);
        }
        if injection.inputs == OnInjection::Warn {
            background.warnings.extend(scan_inputs(&new.inputs));
        }
        Ok(background)
    }

    fn skills_of(&self, plan: &Plan) -> Background {
        let skills = plan.agent.definition.skills.iter();
        let line = |name: &String| {
            Some((name.clone(), self.inner.catalogue.skills().skill(name)?.description.clone()))
        };
        Background {
            skills: skills.filter_map(line).collect(),
            active: plan.active.clone(),
            ..Background::default()
        }
    }

    /// The skills that are active from the start: those of the definition, then those of the
    /// request.
    pub(super) fn active_skills(
        &self,
        definition: &Definition,
        overrides: &Overrides,
    ) -> Result<Vec<ActiveSkill>, SkillError> {
        let wanted = overrides.active_skills.as_deref().unwrap_or_default();
        let refused = |message: String| {
            SkillError::Refused(ValidationError { pointer: "/active_skills".to_owned(), message })
        };
        if let Some(foreign) = wanted.iter().find(|name| !definition.skills.contains(name)) {
            return Err(refused(format!("{} is not one of this agent's skills", quoted(foreign))));
        }
        let mut names: Vec<&String> = Vec::new();
        for name in definition.active_skills.iter().chain(wanted) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let skill = |name: &String| match self.inner.catalogue.skills().skill(name).as_deref() {
            Some(Skill { bounds, instructions, .. }) => {
                Ok(ActiveSkill { bounds: bounds.clone(), instructions: instructions.clone() })
            }
            None if wanted.contains(name) => {
                Err(refused(format!("the file of the skill {name:?} is gone")))
            }
            None => Err(SkillError::Missing(name.clone())),
        };
        names.into_iter().map(skill).collect()
    }
}

/// What the runs of these journals had read at their ends; each journal stands in one piece.
fn labels_of(journals: &[Event]) -> Labels {
    let of_run = |journal: &[Event]| {
        journal.iter().fold(Labels::default(), |labels, event| event.what.labels_after(labels))
    };
    journals
        .chunk_by(|a, b| a.run_id == b.run_id)
        .fold(Labels::default(), |labels, journal| labels.and(of_run(journal)))
}
