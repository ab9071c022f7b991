//! Resumes claimed runs: a run is ended or parked if no work is left to do, otherwise it is driven.
//!
//! The journal is folded, events outside the run are added, and the state machine decides. Ending or parking a
//! run takes no slot, so that busy workers delay no cancellation. A run whose journal cannot be read fails,
//! using only its row.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use uuid::Uuid;

use super::Runtime;
use super::answers::expiry_record;
use super::claimed_run::{ResumeError, Resumption, missing_requirement, unreadable, unusable};
use super::identity::{RunIdentity, with_ancestors};
use super::journals;
use super::loaded_agents::LoadedAgent;
use super::ownership::{OwnedRun, ReclaimReason};
use super::slots::RunSlot;
use super::worker::{DrivenRun, RunNotices};
use super::workspaces::{OpenError, User};
use crate::agents::prompt::ActiveSkill;
use crate::clock;
use crate::engine::{Disposal, Entry, FoldError, Plan, Rules, State, Stopped};
use crate::event::{AuditRecord, Event, LabelCause, LabelsChanged, Resolution, RunEvent};
use crate::run::Overrides;
use crate::store::writer::AppendError;
use crate::store::{ApprovalRecord, ClaimedRun, Ownership, Requeue, RunRecord, StoreError};
use crate::tools::results::{audit_of_unfinished_call, audit_of_unfinished_row};

/// Journal entries read at once during recovery.
const PAGE: u32 = 500;
/// How long a run waits in the queue after this replica could not drive it.
const RETRY_PAUSE: Duration = Duration::from_secs(3);
/// Cancelled runs that are claimed at a time.
const MAX_CLAIM: u32 = 64;

/// What to do with a claimed run.
enum Claimed {
    Driven(Box<DrivenRun>),
    /// It is ended or parked with this entry.
    Disposed(Box<(RunIdentity, Entry)>),
}

/// The state of a run, with events that are not in its journal yet.
struct Recovered {
    run: Uuid,
    state: State,
    events: Vec<Event>,
    audit: Vec<AuditRecord>,
}

impl Recovered {
    fn record(&mut self, what: RunEvent) -> Result<(), FoldError> {
        let at = clock::now();
        let labels = self.state.labels();
        self.audit
            .extend(self.state.settles(&what).map(|call| audit_of_unfinished_call(call, labels)));
        let event = Event { seq: self.state.last_seq() + 1, at, run_id: self.run, what };
        self.state.apply(&event)?;
        self.events.push(event);
        Ok(())
    }
}

impl Runtime {
    /// Resumes a claimed run, or ends or parks it. Without a given slot, a run that is driven takes a free one.
    pub(super) async fn resume(
        &self,
        claimed: ClaimedRun,
        ownership: OwnedRun,
        slot: Option<RunSlot>,
    ) {
        let identity = RunIdentity::of_claimed(&claimed, self.inner.settings.sample_ratio);
        let recover = AssertUnwindSafe(self.recover(claimed, identity.clone(), slot));
        let recover = Box::pin(recover.catch_unwind());
        let recovered = self.inner.replica.gives_back.run_until_cancelled(recover).await;
        match recovered.unwrap_or(Ok(Err(ResumeError::LeftToOthers(Requeue::AtOnce)))) {
            Ok(Ok(Claimed::Driven(owned))) => owned.spawn(ownership, RunNotices::default()),
            Ok(Ok(Claimed::Disposed(ended))) => {
                let (identity, entry) = *ended;
                self.dispose(&identity, ownership, entry).await;
            }
            Ok(Err(error)) => self.not_resumed(&identity, ownership, error).await,
            Err(_panic) => {
                self.interrupt(&identity, ownership, "the service failed while reading it".into())
                    .await;
            }
        }
    }

    /// Gives back a run that cannot continue now, and fails a run that never can.
    pub(super) async fn not_resumed(
        &self,
        identity: &RunIdentity,
        ownership: OwnedRun,
        error: ResumeError,
    ) {
        match error {
            ResumeError::NoFreeSlot => self.requeue_uncounted(ownership, Requeue::AtOnce).await,
            ResumeError::LeftToOthers(how) => self.requeue_uncounted(ownership, how).await,
            ResumeError::Stopped(error @ (Stopped::FilesNotStored | Stopped::OutOfMemory)) => {
                tracing::warn!(run_id = %ownership.run(), %error, "run is given back");
                self.requeue_uncounted(ownership, Requeue::After(RETRY_PAUSE)).await;
            }
            #[cfg(test)]
            ResumeError::Workspace(error @ OpenError::NotHere(_))
                if super::simulation::has(super::simulation::Fault::WorkspaceBlamedOnRuns) =>
            {
                self.interrupt(identity, ownership, error.to_string()).await;
            }
            ResumeError::Workspace(error @ OpenError::NotHere(_)) => {
                tracing::warn!(run_id = %ownership.run(), %error, "run is left to other replicas");
                self.requeue_uncounted(ownership, Requeue::After(RETRY_PAUSE)).await;
            }
            ResumeError::Store(error) if error.is_transient() => {
                tracing::warn!(run_id = %ownership.run(), %error, "run could not be read; it is tried again");
                self.inner.driven.live.abandon(ownership);
            }
            error => self.interrupt(identity, ownership, error.to_string()).await,
        }
    }

    /// Ends the runs with a cancel request that are not driven.
    pub(super) async fn end_cancelled(&self) -> Result<(), StoreError> {
        let inner = &self.inner;
        while inner.replica.lease.holds() {
            let claimed =
                self.claimed(inner.store.claim_cancelled(&inner.replica.id, MAX_CLAIM)).await?;
            let has_more = claimed.len() == MAX_CLAIM as usize;
            for (claimed, ownership) in claimed {
                let runtime = self.clone();
                inner
                    .driven
                    .tasks
                    .spawn(async move { runtime.resume(claimed, ownership, None).await });
            }
            if !has_more {
                break;
            }
        }
        Ok(())
    }

    /// Ends a run as cancelled whose own end came after the cancel request, from its journal.
    pub(super) fn end_as_cancelled(&self, ownership: OwnedRun) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            tracing::debug!(run_id = %ownership.run(), "asked to cancel before its end was stored");
            self.requeue_uncounted(ownership, Requeue::AtOnce).await;
            if let Err(error) = self.end_cancelled().await {
                error.log_retry("the run is cancelled later");
            }
        })
    }

    /// Ends or parks those of these queued runs that have no work left.
    pub(super) async fn decide(&self, runs: Vec<Uuid>) {
        let inner = &self.inner;
        for run in runs {
            if !inner.replica.takes_runs() || !self.serves_the_queue() {
                return;
            }
            self.take_over(run, None).await;
        }
    }

    /// Claims this run and resumes it. It stays in the queue if another replica was faster, it is deferred,
    /// it is not due, or the limits apply to it.
    pub(super) async fn take_over(&self, run: Uuid, slot: Option<RunSlot>) {
        let inner = &self.inner;
        if inner.queue.deferred.is_excluded(run) {
            return;
        }
        let claimed = if inner.settings.run_limits.is_unlimited() {
            self.claimed(inner.store.claim_run(&inner.replica.id, run)).await
        } else {
            self.claimed(inner.store.claim_exempt_run(&inner.replica.id, run)).await
        };
        match claimed {
            Ok(claimed) => {
                for (claimed, ownership) in claimed {
                    Box::pin(self.resume(claimed, ownership, slot.clone())).await;
                }
            }
            Err(error) => tracing::debug!(run_id = %run, %error, "the run is claimed later"),
        }
    }

    async fn recover(
        &self,
        claimed: ClaimedRun,
        mut identity: RunIdentity,
        slot: Option<RunSlot>,
    ) -> Result<Claimed, ResumeError> {
        let row = &claimed.run;
        #[cfg(test)]
        if super::simulation::has(super::simulation::Fault::DeathsBlamed)
            && row.crash_count >= self.inner.settings.max_crashes
        {
            return Err(ResumeError::Unusable("its replicas died too often".to_owned()));
        }
        let permit = self.journal_permit(row).await?;
        let journal = self.counted_journal(row).await?;
        // A run can be ended even if its plan cannot be made.
        let planned = self.plan_of(&claimed, &journal);
        if let Err(ResumeError::MissingRequirement(lack)) = &planned {
            self.leave_to_others(row, lack).await?;
        }
        if let Ok((_, plan)) = &planned
            && let Some(lack) = self.missing_price_of(plan)
        {
            self.leave_to_others(row, &lack).await?; // without it, the budget counts as used up
        }
        let is_child = row.parent_run_id.is_some();
        let rules = planned.as_ref().map(|(_, plan)| plan.rules_of(is_child)).unwrap_or_default();
        let rules = Rules { max_crashes: self.inner.settings.max_crashes, ..rules };
        let mut state = State::new(rules);
        journal.iter().try_for_each(|event| state.apply(event))?;
        let children = self.children_of(&journal);
        drop(journal);
        let (has_crashed, is_alone) =
            (state.has_crashed(row.crash_count), state.is_suspect(row.crash_count));
        let mut recovered = Recovered { run: row.id, state, events: Vec::new(), audit: Vec::new() };
        self.catch_up(&mut recovered, &claimed, is_alone).await?;
        let was_begun = recovered.state.started_at().is_some();
        let slot = slot.or_else(|| self.free_slot(was_begun));
        // A run with a cancel request does not wait for a slot to check delivered results.
        let is_driveable = slot.is_some() || row.cancel_requested_at.is_none();
        let checks_results = planned.is_ok() && is_driveable;
        if let Some(Disposal { events, park }) =
            recovered.state.disposal(checks_results, clock::now())
        {
            let events = self.with_child_ids(&children, row, events).await?;
            events.into_iter().try_for_each(|event| recovered.record(event))?;
            if let Ok((_, plan)) = &planned {
                identity.planned(plan);
            }
            let Recovered { state, events, audit, .. } = recovered;
            Box::pin(self.settle_share(row, &state, park.is_none())).await?;
            let entry = Entry { events, audit, totals: state.totals().clone(), park };
            return Ok(Claimed::Disposed(Box::new((identity, entry))));
        }
        let slot = slot.ok_or(ResumeError::NoFreeSlot)?;
        let (loaded, plan) = planned?;
        if let Some(lack) = self.missing_requirement_of(&plan) {
            self.leave_to_others(row, &lack).await?;
        }
        let directory = loaded.agent.workspace_of(row.id, row.session_id.as_deref());
        let workspace = self.inner.workspaces.open(&row.tenant, &directory, User::Run).await?;
        identity.lineage = self.lineage(row).await?;
        let Recovered { state, events, audit, .. } = recovered;
        let executor = loaded.executor;
        let mut owned =
            DrivenRun::new(self, identity, Arc::new(plan), executor, workspace, state, slot);
        (owned.run.outbox, owned.run.audit) = (events, audit);
        if !owned.run.memory_share.resize(owned.run.state.bytes()) {
            return Err(Stopped::OutOfMemory.into());
        }
        drop(permit);
        owned.resumption = Some(Resumption { claimed, has_crashed, is_alone });
        Ok(Claimed::Driven(Box::new(owned)))
    }

    /// The ids of the child runs of dispatched calls, by call.
    fn children_of(&self, journal: &[Event]) -> HashMap<Uuid, Uuid> {
        let child = |event: &Event| match &event.what {
            RunEvent::ToolCallStarted(call) => {
                Some((call.call_id, self.child_of(&call.tool, &call.effect_key)?))
            }
            _ => None,
        };
        journal.iter().filter_map(child).collect()
    }

    /// Adds the ids of child runs, which a crash has hidden, to the results of their calls.
    async fn with_child_ids(
        &self,
        children: &HashMap<Uuid, Uuid>,
        row: &RunRecord,
        mut events: Vec<RunEvent>,
    ) -> Result<Vec<RunEvent>, StoreError> {
        for event in &mut events {
            if let RunEvent::ToolCallCompleted(call) = event
                && call.child_run_id.is_none()
                && let Some(child) = children.get(&call.call_id)
                && self.inner.store.run(&row.tenant, *child).await?.is_some()
            {
                call.child_run_id = Some(*child);
            }
        }
        Ok(events)
    }

    /// States what a run of a tree has spent, before other runs of the tree continue.
    async fn settle_share(
        &self,
        row: &RunRecord,
        state: &State,
        has_ended: bool,
    ) -> Result<(), StoreError> {
        let lineage = self.lineage(row).await?;
        let budgets = with_ancestors(row.id, lineage.as_deref());
        let ownership = Ownership { owner: &self.inner.replica.id, epoch: row.epoch };
        // If another replica owns it by now, its end will not be stored either.
        self.inner
            .store
            .settle((budgets.as_slice(), row.id), ownership, state.spent_of_shared(), has_ended)
            .await?;
        Ok(())
    }

    /// Records answers, cancel requests and the resumption since the journal's last event.
    async fn catch_up(
        &self,
        recovered: &mut Recovered,
        claimed: &ClaimedRun,
        is_alone: bool,
    ) -> Result<(), ResumeError> {
        let row = &claimed.run;
        if recovered.state.started_at().is_some() || row.crash_count > 0 {
            let (epoch, deaths) = (row.epoch, row.crash_count);
            recovered.record(RunEvent::RunResumed {
                epoch,
                deaths,
                is_alone,
                waited_ms: 0, // so far
            })?;
        }
        if recovered.state.waiting().next().is_some() {
            for answer in self.answers_to(row, &recovered.state).await? {
                let labels = recovered.state.labels();
                let expired = expiry_record(&answer).map(|record| AuditRecord { labels, ..record });
                recovered.audit.extend(expired);
                if let Some(mut resolved) = answer.resolved() {
                    if resolved.resolution == Resolution::ChildEnded {
                        resolved.child_duration_ms = self.duration_of_child(row, &answer).await?;
                    }
                    let before = recovered.state.labels();
                    recovered.record(RunEvent::ApprovalResolved(resolved))?;
                    let labels = recovered.state.labels();
                    if labels != before {
                        recovered.record(RunEvent::LabelsChanged(LabelsChanged {
                            labels,
                            cause: LabelCause::Approval,
                            call_id: Some(answer.call_id),
                            tool: Some(answer.tool.clone()),
                        }))?;
                    }
                }
            }
        }
        if row.cancel_requested_at.is_some() {
            let reason = row.cancel_reason.clone();
            recovered.record(RunEvent::RunCancelRequested { reason })?;
        }
        Ok(())
    }

    /// How long the child run of a waiting call was in progress; `None` if it was deleted or cannot be read.
    async fn duration_of_child(
        &self,
        parent: &RunRecord,
        answer: &ApprovalRecord,
    ) -> Result<Option<u64>, StoreError> {
        let Some(child) = answer.child_run_id else { return Ok(None) };
        let child = match self.inner.store.run(&parent.tenant, child).await {
            Err(error) if !error.is_transient() => {
                tracing::warn!(run_id = %parent.id, %error, "the ended child run cannot be read");
                return Ok(None);
            }
            child => child?,
        };
        Ok(child.and_then(|child| u64::try_from(child.active().num_milliseconds()).ok()))
    }

    /// A slot for a run without one; `None` without workers, where only own runs are resumed, which have slots.
    fn free_slot(&self, was_begun: bool) -> Option<RunSlot> {
        let slots = &self.inner.capacity.slots;
        match (self.is_draining() || !self.serves_the_queue(), was_begun) {
            (true, _) => None,
            (false, true) => slots.try_acquire(),
            (false, false) => slots.for_worker(),
        }
    }

    pub(super) fn plan_of(
        &self,
        claimed: &ClaimedRun,
        journal: &[Event],
    ) -> Result<(LoadedAgent, Plan), ResumeError> {
        let row = &claimed.run;
        let loaded = self
            .inner
            .agents
            .of_snapshot(&row.definition_hash, &claimed.definition)
            .map_err(|error| missing_requirement(&error))?;
        let overrides: Overrides =
            serde_json::from_value(row.overrides.clone()).map_err(|error| unusable(&error))?;
        let active = match skills_at_start(journal)? {
            Some(active) => active,
            None => self
                .active_skills(&loaded.agent.definition, &overrides)
                .map_err(|error| missing_requirement(&error))?,
        };
        let plan =
            Plan::new(Arc::clone(&loaded.agent), &loaded.executor, &overrides, row.kind, active)
                .map_err(|error| missing_requirement(&error))?;
        Ok((loaded, plan.informed(&self.inner.router)))
    }

    /// Commits that a run ends or is parked.
    async fn dispose(&self, identity: &RunIdentity, ownership: OwnedRun, entry: Entry) {
        match self.inner.writer.append(identity.write(None, entry)).await {
            Ok(()) => {}
            Err(AppendError::Unavailable) => self.inner.driven.live.abandon(ownership),
            Err(AppendError::Cancelling) => self.end_as_cancelled(ownership).await,
            Err(AppendError::Refused) => {
                self.interrupt(identity, ownership, "the store refused to record it".to_owned())
                    .await;
            }
            Err(AppendError::Fenced | AppendError::IdTaken) => self.fenced(ownership).await,
        }
    }

    /// Waits until there is memory for the journal of a run.
    pub(super) async fn journal_permit(
        &self,
        run: &RunRecord,
    ) -> Result<Option<journals::Permit>, StoreError> {
        if run.started_at.is_none() {
            return Ok(None); // nothing has happened yet
        }
        let sizes = self.inner.store.journal_sizes(&run.tenant, &[run.id]).await?;
        Ok(journals::permit(sizes.get(&run.id).copied().unwrap_or(0)).await)
    }

    /// The journal of a claimed run. It must have as many events as its row says.
    async fn counted_journal(&self, row: &RunRecord) -> Result<Vec<Event>, ResumeError> {
        let journal = match self.journal_of(&row.tenant, row.id).await {
            Err(StoreError::UnreadableEvent { seq, why, .. }) => {
                return Err(unreadable(&format!("event {seq}: {why}")));
            }
            Err(error) if !error.is_transient() => return Err(unreadable(&error.to_string())),
            journal => journal?,
        };
        if journal.last().is_some_and(|last| last.seq > row.last_seq()) {
            return Err(unreadable(&format!("event {}: its row does not count it", row.next_seq)));
        }
        Ok(journal)
    }

    pub(super) async fn journal_of(
        &self,
        tenant: &str,
        id: Uuid,
    ) -> Result<Vec<Event>, StoreError> {
        let mut events: Vec<Event> = Vec::new();
        loop {
            let after = events.last().map_or(0, |e| e.seq);
            let page = self.inner.store.events(tenant, id, after, PAGE).await?;
            if page.is_empty() {
                return Ok(events);
            }
            events.extend(page);
        }
    }

    /// Fails a run that cannot continue, without its journal and state machine. If its end cannot be written, it
    /// is requeued, with a growing pause.
    pub(super) async fn interrupt(
        &self,
        identity: &RunIdentity,
        ownership: OwnedRun,
        reason: String,
    ) {
        let id = identity.new.id;
        tracing::error!(run_id = %id, %reason, "run interrupted");
        let (store, owner) = (&self.inner.store, &self.inner.replica.id);
        let tenant = &identity.caller.tenant;
        let read = async {
            store.count_events(owner, id, ownership.epoch()).await?;
            let calls = store.calls_under_way(tenant, id).await?;
            Ok::<_, StoreError>(store.run(tenant, id).await?.map(|row| (row, calls)))
        };
        let read = read.await;
        let (row, calls) = match read {
            Ok(Some(read)) => read,
            Ok(None) => return, // it was deleted
            Err(error) if error.is_transient() => return self.inner.driven.live.abandon(ownership),
            Err(error) => return self.not_ended(&ownership, error.to_string()).await,
        };
        let what = RunEvent::interrupted(format!("The run cannot be resumed: {reason}"));
        let end = Event { seq: row.next_seq, at: clock::now(), run_id: id, what };
        let totals = row.totals();
        let audit = calls
            .iter()
            .map(|call| {
                audit_of_unfinished_row(call.call_id, &call.tool, &call.arguments, totals.labels)
            })
            .collect();
        let entry = Entry { events: vec![end], audit, totals, park: None };
        match self.inner.writer.append(identity.write(None, entry)).await {
            Ok(()) => {}
            Err(AppendError::Unavailable) => self.inner.driven.live.abandon(ownership),
            Err(error) => self.not_ended(&ownership, error.to_string()).await,
        }
    }

    async fn not_ended(&self, ownership: &OwnedRun, error: String) {
        tracing::error!(run_id = %ownership.run(), %error, "the interrupted run could not be ended");
        self.reclaim(ownership, ReclaimReason::Unended).await;
    }
}

/// The skills that a run began with, from its journal; `None` if it has not begun. Their instructions are in its
/// conversation.
fn skills_at_start(journal: &[Event]) -> Result<Option<Vec<ActiveSkill>>, FoldError> {
    let mut state = State::new(Rules::default());
    for event in journal {
        if state.attempt() > 0 {
            break;
        }
        state.apply(event)?;
    }
    let active = |bounds: &crate::event::SkillActivated| ActiveSkill {
        bounds: bounds.clone(),
        instructions: String::new(),
    };
    Ok(state.started_at().map(|_| state.skills().iter().map(active).collect()))
}
