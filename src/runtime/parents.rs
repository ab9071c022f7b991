//! Runs that are driven here and can start child runs: what a child takes from its parent, and its lineage.
//! The rows of runs tell the ancestors.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use super::Runtime;
use super::identity::{Lineage, RunIdentity};
use super::refused_children::RefusedAgents;
use super::slots::ParentSlot;
use super::tree_budget::StoredBudget;
use crate::agents::{Agent, Definition, DefinitionError};
use crate::clock;
use crate::engine::budget::SharedBudget;
use crate::engine::{Plan, RunControl, State};
use crate::message::Usage;
use crate::run::{Autonomy, BudgetOverrides, Delegation, Overrides, Usd};
use crate::store::{RunRecord, StoreError};
use crate::tools::subagent::ChildFailed;
use crate::tools::workspace;

/// How many ancestors a run may have.
pub const MAX_DEPTH: usize = 3;

/// A run driven here whose agent can delegate to other agents.
pub(super) struct Parent {
    pub(super) identity: RunIdentity,
    pub(super) plan: Arc<Plan>,
    pub(super) control: Arc<RunControl>,
    /// Whether its budget is already shared.
    pub(super) is_open: Arc<AtomicBool>,
    /// Its workspace, relative to its tenant's directory.
    pub(super) directory: Arc<str>,
    /// Its slot, lent to its children.
    pub(super) slot: ParentSlot,
    /// Agents whose providers have refused recently.
    pub(super) refused: RefusedAgents,
}

/// The parents that are driven here, by id.
#[derive(Default)]
pub(super) struct Parents(Mutex<HashMap<Uuid, Arc<Parent>>>);

/// Keeps a parent known for as long as it is driven here.
pub(super) struct ParentGuard {
    parents: Arc<Parents>,
    parent: Arc<Parent>,
}

impl Parents {
    /// Registers a run, if its agent can delegate to other agents.
    pub(super) fn note(self: &Arc<Self>, parent: Parent) -> Option<ParentGuard> {
        if !delegates(&parent.plan) {
            return None;
        }
        let parent = Arc::new(parent);
        self.0.lock().insert(parent.identity.new.id, Arc::clone(&parent));
        Some(ParentGuard { parents: Arc::clone(self), parent })
    }

    pub(super) fn get(&self, run: Uuid) -> Option<Arc<Parent>> {
        self.0.lock().get(&run).cloned()
    }
}

impl Drop for ParentGuard {
    fn drop(&mut self) {
        let mut parents = self.parents.0.lock();
        let id = self.parent.identity.new.id;
        // The run may have been claimed again by then.
        if parents.get(&id).is_some_and(|parent| Arc::ptr_eq(parent, &self.parent)) {
            parents.remove(&id);
        }
    }
}

/// Whether a run can start others.
fn delegates(plan: &Plan) -> bool {
    plan.offers.iter().any(|offer| Delegation::of_tool(&offer.name).is_some())
}

impl Parent {
    fn lineage(&self) -> Lineage {
        match &self.identity.lineage {
            Some(lineage) => Lineage::clone(lineage),
            None => Lineage {
                root: self.identity.new.id,
                agents: vec![self.identity.new.agent.clone()],
            },
        }
    }

    /// The lineage of a child.
    pub(super) fn lineage_of(&self, child: &str) -> Result<Lineage, ChildFailed> {
        let mut lineage = self.lineage();
        if lineage.agents.iter().any(|agent| agent == child) {
            let chain = lineage.agents.join(" → ");
            return Err(ChildFailed(format!(
                "{child} already works on this task ({chain}) and cannot be called again."
            )));
        }
        if lineage.agents.len() > MAX_DEPTH {
            return Err(ChildFailed(format!(
                "Delegation is limited to {MAX_DEPTH} levels; do this yourself."
            )));
        }
        lineage.agents.push(child.to_owned());
        Ok(lineage)
    }

    /// The overrides of a child's request, which narrow its definition.
    pub(super) fn bounds(&self, now: &State) -> Overrides {
        let of_request = |field: &str| self.identity.new.overrides.get(field);
        let is_private = of_request("private").and_then(Value::as_bool);
        let tools = of_request("tools").and_then(|tools| Vec::deserialize(tools).ok());
        // Rounded up to whole seconds; the parent's own deadline still ends the child.
        let left = now.milliseconds_left(clock::now());
        let max_duration_seconds =
            left.map(|left| u64::try_from(left).unwrap_or(0).div_ceil(1000).max(1));
        let caps = &self.plan.rules.budget;
        // The budget that the tree shares bounds what a root and the runs below it take.
        let taken = if self.identity.lineage.is_some() { now.taken() } else { Usage::default() };
        let micro_usd_taken = taken.cost_micro_usd.unwrap_or(0);
        let used = &now.totals().consumption;
        let files = used.files();
        Overrides {
            private: is_private.filter(|is_private| *is_private),
            tools,
            budget: Some(BudgetOverrides {
                max_duration_seconds,
                // Caps of a root make the child look up prices.
                max_total_tokens: caps
                    .max_total_tokens
                    .map(|max| max.saturating_sub(taken.total_tokens()).max(1)),
                max_cost_usd: caps
                    .max_cost_usd
                    .map(|max| Usd::from_micro(max.micro().saturating_sub(micro_usd_taken).max(1))),
                // Only an explicit cap is passed on; the tree's budget enforces the default.
                max_files_modified: self
                    .plan
                    .rules
                    .budget
                    .max_files_modified
                    .map(|max| max.saturating_sub(files)),
                max_lines_changed: Some(
                    self.plan.rules.budget.max_lines_changed.saturating_sub(used.lines_changed),
                ),
                ..BudgetOverrides::default()
            }),
            ..Overrides::default()
        }
    }

    pub(super) fn autonomy(&self, now: &State) -> Autonomy {
        let defined = self.plan.agent.definition.governance.autonomy;
        now.skills().iter().filter_map(|skill| skill.autonomy).fold(defined, Autonomy::min)
    }
}

impl Runtime {
    /// The shared budget of a run that has a parent or can start child runs.
    pub(super) fn sharing(
        &self,
        identity: &RunIdentity,
        plan: &Plan,
        is_open: &Arc<AtomicBool>,
    ) -> Option<SharedBudget> {
        if identity.lineage.is_none() && !delegates(plan) {
            return None;
        }
        let run = identity.new.id;
        let root = identity.lineage.as_ref().map_or(run, |lineage| lineage.root);
        let tree = StoredBudget {
            store: Arc::clone(&self.inner.store),
            patience: self.inner.settings.store_patience,
            tenant: identity.caller.tenant.clone(),
            root,
            run,
            owner: Arc::clone(&self.inner.replica.id),
            epoch: identity.epoch,
        };
        Some(SharedBudget::new(Arc::clone(is_open), tree))
    }

    /// The lineage of a child run, from the rows of its ancestors.
    pub(super) async fn lineage(
        &self,
        run: &RunRecord,
    ) -> Result<Option<Arc<Lineage>>, StoreError> {
        if run.parent_run_id.is_none() {
            return Ok(None);
        }
        let mut lineage = Lineage { root: run.id, agents: vec![run.agent.clone()] };
        let mut next = run.parent_run_id;
        while let Some(id) = next.filter(|_| lineage.agents.len() <= MAX_DEPTH) {
            let Some(ancestor) = self.inner.store.run(&run.tenant, id).await? else { break };
            lineage.root = ancestor.id;
            lineage.agents.insert(0, ancestor.agent);
            next = ancestor.parent_run_id;
        }
        Ok(Some(Arc::new(lineage)))
    }
}

/// An agent, restricted to what the parent's definition, autonomy and workspace directory allow.
pub(super) fn narrowed(
    agent: &Arc<Agent>,
    autonomy: Autonomy,
    parent: &Definition,
    directory: &str,
) -> Result<Arc<Agent>, DefinitionError> {
    let is_elsewhere = !is_always_in(directory, &agent.definition.workspace);
    agent.narrowed_by_parent(autonomy, parent, (directory, is_elsewhere))
}

/// Whether runs of an agent with that workspace work in this directory.
fn is_always_in(directory: &str, workspace: &str) -> bool {
    !workspace.contains('{')
        && workspace::normalise(workspace).is_ok_and(|workspace| workspace == directory)
}
