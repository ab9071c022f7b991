//! Runs that are driven here and can start child runs: what a child takes from its parent, and its lineage.
//! The rows of runs tell the ancestors.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use super::Runtime;
use super::identity::{Lineage, RunIdentity, with_ancestors};
use super::refused_children::RefusedAgents;
use super::slots::ParentSlot;
use super::tree_budget::StoredBudget;
use crate::agents::{Agent, Definition, DefinitionError};
use crate::clock;
use crate::engine::budget::SharedBudget;
use crate::engine::{Plan, RunControl, State};
use crate::message::Usage;
use crate::run::{Amounts, Autonomy, BudgetOverrides, Caps, Delegation, Overrides, Usd};
use crate::store::{Ownership, RunRecord, StoreError};
use crate::tools::subagent::ChildFailed;
use crate::tools::workspace;

/// How many ancestors a run may have.
pub const MAX_DEPTH: usize = 3;

/// A run driven here whose agent can delegate to other agents.
pub(super) struct Parent {
    pub(super) identity: RunIdentity,
    pub(super) plan: Arc<Plan>,
    pub(super) control: Arc<RunControl>,
    /// Whether it shares a budget with other runs by now.
    pub(super) is_open: Arc<AtomicBool>,
    /// Whether its own budget, if it binds the runs below it, is stored.
    pub(super) has_budget: AtomicBool,
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
            None => {
                Lineage { ancestors: Vec::new(), agents: vec![self.identity.new.agent.clone()] }
            }
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
        lineage.ancestors.push(self.identity.new.id);
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

    /// The caps that bind it and the runs below it together: those of a root, and a child's own ones of tokens and
    /// dollars. Those that a child has from its parent bind the runs below it in its parent's budget.
    fn caps_below(&self) -> Option<Caps> {
        let (rules, own) = (&self.plan.rules, &self.plan.agent.definition.governance.budget);
        let caps = Caps::of(&rules.budget, rules.max_network_requests);
        if self.identity.lineage.is_none() {
            return Some(caps);
        }
        let tokens = caps.tokens.filter(|_| rules.budget.max_total_tokens == own.max_total_tokens);
        let micro_usd = caps.micro_usd.filter(|_| rules.budget.max_cost_usd == own.max_cost_usd);
        Caps::of_model_calls(tokens, micro_usd)
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
        let budgets = with_ancestors(run, identity.lineage.as_deref());
        let tree = StoredBudget {
            store: Arc::clone(&self.inner.store),
            patience: self.inner.settings.store_patience,
            tenant: identity.caller.tenant.clone(),
            budgets,
            run,
            owner: Arc::clone(&self.inner.replica.id),
            epoch: identity.epoch,
        };
        Some(SharedBudget::new(Arc::clone(is_open), tree))
    }

    /// Stores the budget that a run shares with its child runs, before it starts one.
    pub(super) async fn open_budget(&self, run: &Parent, now: &State) -> Result<(), StoreError> {
        if run.has_budget.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(caps) = run.caps_below() {
            let under_way =
                Amounts { tool_calls: now.calls_under_way() as u64, ..Amounts::default() };
            let spent = Amounts::of(now.totals()).and(under_way);
            let by = Ownership { owner: &self.inner.replica.id, epoch: run.identity.epoch };
            self.inner.store.open_budget(run.identity.new.id, by, caps, spent).await?;
        }
        run.has_budget.store(true, Ordering::Release);
        run.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// The lineage of a child run, from the rows of its ancestors.
    pub(super) async fn lineage(
        &self,
        run: &RunRecord,
    ) -> Result<Option<Arc<Lineage>>, StoreError> {
        if run.parent_run_id.is_none() {
            return Ok(None);
        }
        let above = self.inner.store.ancestors(&run.tenant, run.id).await?;
        let (ancestors, mut agents): (Vec<Uuid>, Vec<String>) = above.into_iter().unzip();
        agents.push(run.agent.clone());
        Ok(Some(Arc::new(Lineage { ancestors, agents })))
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
