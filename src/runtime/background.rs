//! What a run brings along beside its inputs: history, skills, memories.
//!
//! It is looked up once, when the run is opened, and then stands in the run's journal: a run that
//! goes on elsewhere reads it there.

use uuid::Uuid;

use super::Runtime;
use super::history::History;
use super::input_labels::labels_of_inputs;
use super::journals;
use crate::agents::prompt::{ActiveSkill, Background};
use crate::agents::{Definition, Skill};
use crate::bounds::text::quoted;
use crate::engine::Plan;
use crate::event::{Event, RunEvent, ValidationError};
use crate::run::{Caller, Labels, OnInjection, Overrides};
use crate::store::{NewRun, StoreError};
use crate::tools::scan::{scan_inputs, scan_memories};

/// What earlier runs of a session give to the next one.
struct Earlier {
    history: History,
    /// What they had read.
    labels: Labels,
    /// Those whose journals are damaged. They give nothing, and what they had read is not known.
    unreadable: Vec<Uuid>,
}

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
            let bounds = plan.agent.definition.history;
            let none_taken = History::within(bounds, &plan.models);
            let Earlier { history, labels, unreadable } =
                self.earlier(&caller.tenant, earlier, none_taken).await?;
            let (runs, tokens) = (history.runs(), history.tokens());
            if runs > 0 {
                background.turns = history.into_turns();
                let turns = background.turns.len();
                background.session =
                    Some(RunEvent::SessionLoaded { session_id, runs, turns, tokens });
                background.labels = background.labels.and(labels);
            }
            if !unreadable.is_empty() {
                background.labels = Labels::ALL;
                background.left_out = unreadable.iter().map(without).collect();
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
            Some((name.clone(), self.inner.agents.skills().skill(name)?.description.clone()))
        };
        Background {
            skills: skills.filter_map(line).collect(),
            active: plan.active.clone(),
            ..Background::default()
        }
    }

    /// What these runs give to the next one of their session; the oldest comes first.
    async fn earlier(
        &self,
        tenant: &str,
        runs: &[Uuid],
        mut history: History,
    ) -> Result<Earlier, StoreError> {
        let store = &self.inner.store;
        let sizes = store.journal_sizes(tenant, runs).await?;
        let newest_first: Vec<Uuid> = runs.iter().rev().copied().collect();
        let (mut labels, mut unreadable) = (Labels::default(), Vec::new());
        let mut left = newest_first.as_slice();
        while !left.is_empty() {
            let (count, bytes) = journals::piece(left, &sizes);
            let (read, rest) = left.split_at(count);
            let _turn = journals::turn(bytes).await;
            let (events, damaged) = store.readable_journals(tenant, read).await?;
            let by_run = journals::by_run(&events);
            for run in read {
                let journal = by_run.get(run).copied().unwrap_or_default();
                if damaged.contains(run) || history.add(journal).is_err() {
                    tracing::warn!(run_id = %run, "an earlier run of the session cannot be read");
                    unreadable.push(*run);
                } else {
                    labels = labels.and(labels_of(journal));
                }
            }
            left = rest;
        }
        Ok(Earlier { history, labels, unreadable })
    }

    /// The skills that are active from the start: those of the definition, then those of the
    /// request.
    pub(super) fn active_skills(
        &self,
        definition: &Definition,
        overrides: &Overrides,
    ) -> Result<Vec<ActiveSkill>, SkillError> {
        let wanted = overrides.active_skills.as_deref().unwrap_or_default();
        let refused = |number: usize, message: String| {
            let pointer = format!("/active_skills/{number}");
            SkillError::Refused(ValidationError { pointer, message })
        };
        let foreign = wanted.iter().enumerate().find(|(_, name)| !definition.skills.contains(name));
        if let Some((number, name)) = foreign {
            let why = format!("{} is not one of this agent's skills", quoted(name));
            return Err(refused(number, why));
        }
        let mut names: Vec<&String> = Vec::new();
        for name in definition.active_skills.iter().chain(wanted) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let skill = |name: &String| match self.inner.agents.skills().skill(name).as_deref() {
            Some(Skill { bounds, instructions, .. }) => {
                Ok(ActiveSkill { bounds: bounds.clone(), instructions: instructions.clone() })
            }
            None => match wanted.iter().position(|wanted| wanted == name) {
                Some(at) => Err(refused(at, format!("the file of the skill {name:?} is gone"))),
                None => Err(SkillError::Missing(name.clone())),
            },
        };
        names.into_iter().map(skill).collect()
    }
}

/// What a run's warnings say of an earlier run that cannot be read.
fn without(run: &Uuid) -> String {
    format!(
        "The earlier run {run} of the session cannot be read: its messages are left out, and this run counts as \
         untrusted and private."
    )
}

/// What a run had read at its end.
fn labels_of(journal: &[Event]) -> Labels {
    journal.iter().fold(Labels::default(), |labels, event| event.what.labels_after(labels))
}
