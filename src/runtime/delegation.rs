//! Child runs: how they are started, what they inherit, and that none outlives the call that waits for it.
//!
//! A child is a run like any other, with its own row, journal and owner. Its waiting parent lends it its slot.
//! Its id is a function of the call, so that a parent that is resumed after a crash finds the child that it
//! started, on whatever replica. The store's sweep ends children of ended parents, too, in case the replica
//! that waited for them died.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::identity::{Lineage, RunIdentity};
use super::parents::{Parent, narrowed};
use super::refused_children::invalid_inputs;
use super::slots::RunSlot;
use super::start::{Checked, Launch, Mode, StartError, StartRequest, Started, opening};
use super::{Inner, Runtime};
use crate::agents::{Agent, Definition};
use crate::engine::{State, phrases, requirements};
use crate::event::SERVICE;
use crate::run::{
    Autonomy, Budget, Caller, Labels, RunError, RunKind, RunStatus, SpanPlace, TerminationReason,
};
use crate::store::{Ownership, QueuePlace, RunRecord, StoreError};
use crate::tools::subagent::{ChildCall, ChildFailed, ChildResult, StartRun, Task};

/// How often the state of a child that is driven elsewhere is read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The runtime as tools see it.
pub(super) struct Children(pub(super) Weak<Inner>);

#[async_trait]
impl StartRun for Children {
    async fn start_run(&self, call: ChildCall) -> Result<ChildResult, ChildFailed> {
        let gone = || ChildFailed("The calling run is no longer executed by this replica.".into());
        let runtime = Runtime { inner: self.0.upgrade().ok_or_else(gone)? };
        let parent = runtime.inner.driven.parents.get(call.parent).ok_or_else(gone)?;
        let agent = call.agent.clone();
        let read_labels = call.read_labels.clone();
        let waits = Arc::clone(&parent);
        // In its own task: a start in progress must not be dropped in the middle.
        let given_up = CancellationToken::new();
        let _waiting = given_up.clone().drop_guard();
        let tasks = &runtime.inner.driven.tasks;
        let child = tasks.spawn(runtime.clone().run_child_here(parent, call, given_up));
        let ended = child
            .await
            .map_err(|_| ChildFailed(format!("The agent {agent} could not be waited for.")))??;
        read_labels.add(Labels::named(&ended.labels));
        if ended.status.is_parked() {
            return Ok(ChildResult::Parked(ended.id));
        }
        if ended.status == RunStatus::Cancelled {
            runtime.apply_cancel_request(&waits).await;
        }
        match (ended.output, ended.error) {
            (Some(output), _) if ended.status == RunStatus::Completed => {
                Ok(ChildResult::Output(output))
            }
            (_, Some(error)) => {
                let how =
                    if ended.status == RunStatus::Cancelled { "was cancelled" } else { "failed" };
                let RunError { code, message, context } = error;
                let why = format!("The agent {agent} {how} ({code}): {message}");
                if is_over_shared_budget(&code, &context) {
                    Ok(ChildResult::OverBudget(why))
                } else {
                    Err(ChildFailed(why))
                }
            }
            _ => Err(ChildFailed(format!("The agent {agent} ended without an output."))),
        }
    }
}

/// Why a child run was not started, for the model.
fn child_not_started(id: Uuid, agent: &str, error: StartError) -> ChildFailed {
    match error {
        StartError::InvalidInputs(errors) => invalid_inputs(agent, &errors),
        StartError::PromptInjection(error) => invalid_inputs(agent, &[error]),
        error => {
            tracing::warn!(run_id = %id, %error, "a child run could not be started");
            ChildFailed(format!("The agent {agent} could not be started: {error}."))
        }
    }
}

/// Whether the start of a child run is repeated: the database or the files of runs are unavailable, for which its
/// parent waits, too.
fn may_start_later(error: &StartError) -> bool {
    match error {
        StartError::Store(error) => error.is_transient(),
        error => matches!(error, StartError::NoWorkspace),
    }
}

/// Whether a run ended because of the budget that it shared with its parent.
fn is_over_shared_budget(code: &str, context: &Value) -> bool {
    TerminationReason::BudgetExceeded.code() == Some(code) && context["shared"] == true
}

impl Runtime {
    /// Like [`Self::run_child`], until this replica gives its runs back, including the parent.
    async fn run_child_here(
        self,
        parent: Arc<Parent>,
        call: ChildCall,
        given_up: CancellationToken,
    ) -> Result<RunRecord, ChildFailed> {
        let (runtime, control) = (self.clone(), Arc::clone(&parent.control));
        let ended = Box::pin(runtime.run_child(parent, call, given_up));
        self.inner.replica.gives_back.run_until_cancelled(ended).await.unwrap_or_else(|| {
            control.lose(); // before it hears of this
            Err(ChildFailed("The calling run is given back by this replica.".into()))
        })
    }

    /// Starts or finds a child run and waits until it has ended or is parked; cancels it when the
    /// call is given up.
    async fn run_child(
        self,
        parent: Arc<Parent>,
        call: ChildCall,
        given_up: CancellationToken,
    ) -> Result<RunRecord, ChildFailed> {
        let id = self.inner.child_ids.of_call(&call.effect_key);
        let tenant = parent.identity.caller.tenant.clone();
        let refused =
            self.refused_child(&parent.control, &parent.refused, (&tenant, id), &call.agent);
        let refused = given_up.run_until_cancelled(refused);
        if let Some(Some(refused)) = refused.await {
            return Err(refused);
        }
        let slot =
            given_up.run_until_cancelled(self.inner.capacity.slots.for_child(&parent.slot)).await;
        if let Some(slot) = slot.flatten() {
            let child_run = call.child_run.clone();
            let started = self.start_child(&parent, call, id, slot, &given_up).await?;
            child_run.started(id);
            let ended = given_up
                .run_until_cancelled(Box::pin(self.child_outcome(&parent, id, started)))
                .await;
            if let Some(ended) = ended {
                return ended;
            }
        }
        // The parent will wait for it again on another replica.
        while !parent.control.is_lost() {
            match self.cancel_given_up(&parent, id).await {
                Err(error) if error.is_transient() => tokio::time::sleep(POLL_INTERVAL).await,
                Err(error) => {
                    tracing::error!(run_id = %id, %error, "the child run could not be cancelled");
                    break;
                }
                Ok(()) => break,
            }
        }
        Err(ChildFailed("The call was cancelled.".into()))
    }

    /// Cancels a child, unless its parent is driven by another task by now, or will be: there it waits for the child.
    async fn cancel_given_up(&self, parent: &Parent, child: Uuid) -> Result<(), StoreError> {
        let RunIdentity { new, caller, epoch, .. } = &parent.identity;
        let by = Ownership { owner: &self.inner.replica.id, epoch: *epoch };
        if self.inner.store.is_last_owner(new.id, by).await? {
            let reason = Some("the call that waits for it has ended");
            self.cancel(&caller.tenant, child, SERVICE, reason).await?;
        }
        Ok(())
    }

    /// Cancels a run with a stored cancel request that it has not received yet: the request may have reached
    /// its child first.
    async fn apply_cancel_request(&self, run: &Parent) {
        let (tenant, id) = (&run.identity.caller.tenant, run.identity.new.id);
        match self.inner.store.run(tenant, id).await {
            Ok(Some(row)) if row.cancel_requested_at.is_some() => {
                run.control.cancel(row.cancel_reason);
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(run_id = %id, %error, "the run could not be read"),
        }
    }

    /// Starts the child here. `None`: it has been started before.
    async fn start_child(
        &self,
        parent: &Arc<Parent>,
        call: ChildCall,
        id: Uuid,
        slot: RunSlot,
        given_up: &CancellationToken,
    ) -> Result<Option<Started>, ChildFailed> {
        let lineage = parent.lineage_of(&call.agent)?;
        let Some(now) = parent.control.delegating() else {
            return Err(ChildFailed("The call was cancelled.".into()));
        };
        loop {
            let started = self.try_start(parent, &now, &call, id, lineage.clone(), slot.clone());
            match started.await {
                Ok(started) => return Ok(Some(started)),
                Err(StartError::RunIdTaken(_)) => return Ok(None),
                Err(error) => {
                    let known = self.inner.store.run(&parent.identity.caller.tenant, id).await;
                    let is_unknown = known.as_ref().is_err_and(StoreError::is_transient);
                    if matches!(known, Ok(Some(_))) {
                        return Ok(None); // its agent was changed or removed since
                    }
                    if given_up.is_cancelled() || !(is_unknown || may_start_later(&error)) {
                        return Err(child_not_started(id, &call.agent, error));
                    }
                    tracing::debug!(run_id = %id, %error, "a child run is started later");
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    async fn try_start(
        &self,
        parent: &Parent,
        now: &State,
        call: &ChildCall,
        id: Uuid,
        lineage: Lineage,
        slot: RunSlot,
    ) -> Result<Started, StartError> {
        let RunIdentity { new, caller, .. } = &parent.identity;
        let inputs = match &call.task {
            Task::Inputs(inputs) => inputs.clone(),
            Task::Handoff { .. } => Value::clone(&new.inputs),
        };
        let mut request = StartRequest {
            caller: Arc::clone(caller),
            agent: call.agent.clone(),
            kind: RunKind::Iterative,
            mode: Mode::Stored,
            idempotency: None,
            traceparent: Some(
                parent.identity.origin.trace.span(SpanPlace::Tool(call.call_id)).to_string(),
            ),
            run_id: Some(id),
            inputs,
            metadata: BTreeMap::new(),
            session_id: None,
            overrides: parent.bounds(now),
            webhook: None, // its parent's, as that was accepted
            uploads: None,
            queue: QueuePlace::default(),
            until: None,
        };
        let agent = self.narrowed_by_parent(&call.agent, parent.autonomy(now), parent)?;
        let budget = &agent.definition.governance.budget;
        request.overrides.budget = request.overrides.budget.map(|bounds| bounds.below(budget));
        let mut checked = self.check(agent, request, now.skills().to_vec())?;
        if self.weighs_cost(parent).await? {
            let priced = checked.plan.check_prices(&self.inner.router);
            priced.map_err(|error| StartError::InvalidOverride(error.0))?;
        }
        checked.new.parent_run_id = Some(new.id);
        checked.new.webhook.clone_from(&new.webhook);
        let Checked { new: child, plan, caller, .. } = &checked;
        let mut background = self.background(plan, caller, child, &[]).await?;
        background.labels = background.labels.and(now.labels());
        let mut opening = opening(plan, &child.inputs, &background)?;
        if let Task::Handoff { reason } = &call.task {
            background.turns = now.conversation().turns().to_vec();
            opening.user = phrases::handed_over(&new.agent, reason.as_deref());
        }
        self.open_budget(parent, now).await?;
        let lineage = Some(Arc::new(lineage));
        self.launch(Launch { checked, opening, background, lineage, slot, mode: Mode::Stored })
            .await
    }

    /// Whether the run or an ancestor, wherever it is driven or parked, has a limit on the cost of its tree. Runs
    /// that only execute a given call do not count.
    async fn weighs_cost(&self, run: &Parent) -> Result<bool, StoreError> {
        let has_limit = |kind: RunKind, budget: &Budget| {
            kind != RunKind::Call && requirements::needs_price(budget).is_some()
        };
        let store = &self.inner.store;
        let mut weighs = has_limit(run.identity.new.kind, &run.plan.rules.budget);
        let mut above = run.identity.new.parent_run_id;
        let mut seen = BTreeSet::new(); // in damaged rows, parents can be a circle
        while let Some(id) = above.filter(|id| !weighs && seen.insert(*id)) {
            (weighs, above) = match self.inner.driven.parents.get(id) {
                Some(parent) => {
                    let new = &parent.identity.new;
                    (has_limit(new.kind, &parent.plan.rules.budget), new.parent_run_id)
                }
                None => match store.run(&run.identity.caller.tenant, id).await? {
                    Some(row) => {
                        let json = store.definition(&row.definition_hash).await?;
                        let definition: Option<Definition> =
                            json.and_then(|json| serde_json::from_str(&json).ok());
                        let has_limit =
                            definition.is_some_and(|it| has_limit(row.kind, &it.governance.budget));
                        (has_limit, row.parent_run_id)
                    }
                    None => (false, None),
                },
            };
        }
        Ok(weighs)
    }

    /// An agent, restricted by the rules and the autonomy of its parent.
    fn narrowed_by_parent(
        &self,
        name: &str,
        autonomy: Autonomy,
        parent: &Parent,
    ) -> Result<Arc<Agent>, StartError> {
        let agent = self.agent(name)?;
        let definition = &parent.plan.agent.definition;
        narrowed(&agent, autonomy, definition, &parent.directory)
            .map_err(|e| StartError::broken(name, &e))
    }

    /// Waits until a child has ended or is parked, wherever it is driven. A queued child is claimed here, because
    /// it may be waiting for the slot of its own parent.
    async fn child_outcome(
        &self,
        parent: &Parent,
        id: Uuid,
        started: Option<Started>,
    ) -> Result<RunRecord, ChildFailed> {
        if let Some(started) = started
            && let Ok(ended) = started.finished().await
        {
            return Ok(ended);
        }
        let Caller { tenant, .. } = &*parent.identity.caller;
        loop {
            let look = Instant::now() + POLL_INTERVAL;
            match self.inner.store.run(tenant, id).await {
                Ok(Some(run)) if run.parent_run_id == Some(parent.identity.new.id) => {
                    if run.status.is_terminal() || run.status.is_parked() {
                        return Ok(run);
                    }
                    if run.status == RunStatus::Queued {
                        self.take_child(parent, id).await;
                    }
                    let has_halted = tokio::time::timeout_at(
                        look,
                        self.until_halted(tenant, id, run.last_seq()),
                    )
                    .await;
                    if has_halted == Ok(true) {
                        continue;
                    }
                }
                Ok(_) => {
                    return Err(ChildFailed("The child run's id is already in use.".into()));
                }
                Err(error) if error.is_transient() => {}
                Err(error) => {
                    return Err(ChildFailed(format!("The child run cannot be read: {error}.")));
                }
            }
            tokio::time::sleep_until(look).await;
        }
    }

    /// Waits until the child has ended or may be parked; false if the service stops or the journal
    /// cannot be read.
    async fn until_halted(&self, tenant: &str, id: Uuid, seen: i64) -> bool {
        let mut follower = self.follow(tenant, id, seen);
        while let Ok(Some(published)) = follower.next().await {
            if published.item.is_the_end() || published.item.may_park() {
                return true;
            }
        }
        false
    }

    async fn take_child(&self, parent: &Parent, id: Uuid) {
        if !self.inner.replica.takes_runs() {
            return;
        }
        if let Some(slot) = self.inner.capacity.slots.of_parent_or_free(Some(&parent.slot)) {
            self.take_over(id, Some(slot)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_waits_for_the_database_and_for_files() {
        let unavailable = StoreError::Unavailable("away".to_owned());
        assert!(may_start_later(&StartError::Store(unavailable)));
        assert!(may_start_later(&StartError::NoWorkspace));
        let refused = StoreError::Failed("a column is missing".to_owned());
        assert!(!may_start_later(&StartError::Store(refused)));
        assert!(!may_start_later(&StartError::UnknownAgent("reader".to_owned())));
    }
}
