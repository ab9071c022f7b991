//! The background of a run: history, skills and memories, in addition to its inputs.
//!
//! It is looked up once, when the run is opened, and recorded in the journal, where a resumed run finds it.

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

/// The warning of a run that begins without its memories.
const NOT_RECALLED: &str =
    "The search for what earlier runs left takes too long: this run begins without it.";

/// What the next run of a session takes from earlier ones.
struct Earlier {
    history: History,
    /// Their labels.
    labels: Labels,
    /// Runs with damaged journals. They contribute no turns, and their labels are unknown.
    unreadable: Vec<Uuid>,
}

/// Why a run cannot begin with its skills.
#[derive(Debug, thiserror::Error)]
pub(super) enum SkillError {
    /// The request names a skill that the agent does not have.
    #[error("{}", .0.message)]
    Refused(ValidationError),
    /// The file of a skill is missing.
    #[error("there is no skill named {0:?}")]
    Missing(String),
}

impl Runtime {
    /// The background of this run; `earlier` are the earlier runs of its session, the oldest first.
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
            if let Some((found, labels)) = self.memories(recall, caller, new).await? {
                background.labels = background.labels.and(labels);
                (background.memories, background.warnings) =
                    scan_memories(found, injection.results);
            } else {
                background.left_out.push(NOT_RECALLED.to_owned());
            }
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

    /// What the next run of their session takes from these runs; the oldest comes first.
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
            let _permit = journals::permit(bytes).await;
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

/// The warning about an earlier run that cannot be read.
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
