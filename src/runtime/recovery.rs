//! What becomes of a run that was claimed: it is ended or parked where no work is left to do, else
//! it goes on.
//!
//! Its journal is folded, what happened outside is added, and its state machine decides. To end or
//! park a run takes no slot, so full workers delay no cancel. A run
//! whose journal cannot be read is failed by itself, from its row.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use chrono::SubsecRound as _;
use futures::FutureExt;
use futures::future::BoxFuture;
use uuid::Uuid;

use super::Runtime;
use super::claimed::{ResumeError, Resumption, lacking, unreadable, unusable};
use super::identity::RunIdentity;
use super::journals;
use super::loaded::LoadedAgent;
use super::ownership::{OwnedRun, Reclaimed};
use super::slots::RunSlot;
use super::waiting::expiry;
use super::worker::{DrivenRun, RunNotices};
use super::workspaces::{OpenError, User};
use crate::agents::prompt::ActiveSkill;
use crate::clock;
use crate::engine::{Disposal, Entry, FoldError, Plan, Rules, State, Stopped};
use crate::event::{AuditRecord, Event, LabelCause, LabelsChanged, Resolution, RunEvent};
use crate::run::Overrides;
use crate::store::writer::AppendError;
use crate::store::{ApprovalRecord, ClaimedRun, GivenBack, Ownership, RunRecord, StoreError};
use crate::tools::results::lost;

/// Journal entries read at once during recovery.
const PAGE: u32 = 500;
/// How long a run waits that this replica cannot drive and another one may.
const ELSEWHERE: Duration = Duration::from_secs(3);
/// Cancelled runs that are claimed at once.
const MAX_CLAIM: u32 = 64;

/// What becomes of a claimed run.
enum Claimed {
    GoesOn(Box<DrivenRun>),
    /// It is ended or parked with this.
    Disposed(Box<(RunIdentity, Entry)>),
}

/// The state of a run, with what has happened since its last event.
struct Recovered {
    run: Uuid,
    state: State,
    events: Vec<Event>,
    audit: Vec<AuditRecord>,
}

impl Recovered {
    fn record(&mut self, what: RunEvent) -> Result<(), FoldError> {
        let at = clock::now().trunc_subsecs(6);
        let labels = self.state.labels();
        self.audit.extend(self.state.settles(&what).map(|call| lost(call, labels)));
        let event = Event { seq: self.state.last_seq() + 1, at, run_id: self.run, what };
        self.state.apply(&event)?;
        self.events.push(event);
        Ok(())
    }
}

impl Runtime {
    /// Goes on with a run that was claimed, or ends or parks it. Without a slot it takes a free one
    /// where it goes on.
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
        match recovered.unwrap_or(Ok(Err(ResumeError::Left(GivenBack::AtOnce)))) {
            Ok(Ok(Claimed::GoesOn(owned))) => owned.spawn(ownership, RunNotices::default()),
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

    /// Gives a run back that cannot continue now, and fails one that never can.
    pub(super) async fn not_resumed(
        &self,
        identity: &RunIdentity,
        ownership: OwnedRun,
        error: ResumeError,
    ) {
        match error {
            ResumeError::NoFreeSlot => self.requeue_uncounted(ownership, GivenBack::AtOnce).await,
            ResumeError::Left(how) => self.requeue_uncounted(ownership, how).await,
            ResumeError::Stopped(error @ (Stopped::FilesNotKept | Stopped::NoRoom)) => {
                tracing::warn!(run_id = %ownership.run(), %error, "run is given back");
                self.requeue_uncounted(ownership, GivenBack::After(ELSEWHERE)).await;
            }
            #[cfg(test)]
            ResumeError::Workspace(error @ OpenError::NotHere(_))
                if super::simulation::has(super::simulation::Fault::WorkspaceBlamedOnRuns) =>
            {
                self.interrupt(identity, ownership, error.to_string()).await;
            }
            ResumeError::Workspace(error @ OpenError::NotHere(_)) => {
                tracing::warn!(run_id = %ownership.run(), %error, "run is left to other replicas");
                self.requeue_uncounted(ownership, GivenBack::After(ELSEWHERE)).await;
            }
            ResumeError::Store(error) if error.is_transient() => {
                tracing::warn!(run_id = %ownership.run(), %error, "run could not be read; it is tried again");
                self.inner.driven.live.abandon(ownership);
            }
            error => self.interrupt(identity, ownership, error.to_string()).await,
        }
    }

    /// Ends the runs that were asked to cancel while they were not being driven.
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

    /// Ends a run as cancelled whose own end came after the request; from its journal, which has all that
    /// came before.
    pub(super) fn end_as_cancelled(&self, ownership: OwnedRun) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            tracing::debug!(run_id = %ownership.run(), "asked to cancel before its end was stored");
            self.requeue_uncounted(ownership, GivenBack::AtOnce).await;
            if let Err(error) = self.end_cancelled().await {
                error.log_retry("the run is cancelled later");
            }
        })
    }

    /// Ends or parks those of these queued runs that need no work.
    pub(super) async fn decide(&self, runs: Vec<Uuid>) {
        let inner = &self.inner;
        for run in runs {
            if !inner.replica.takes_runs() || !self.serves_the_queue() {
                return;
            }
            self.take_over(run, None).await;
        }
    }

    /// Claims this run and goes on with it, unless another replica was faster, it is left to others,
    /// its turn has not come, or it needs a place: then it is taken from the queue when there is one.
    pub(super) async fn take_over(&self, run: Uuid, slot: Option<RunSlot>) {
        let inner = &self.inner;
        if inner.queue.left.is_excluded(run) {
            return;
        }
        let claimed = if inner.settings.run_limits.is_unlimited() {
            self.claimed(inner.store.claim_run(&inner.replica.id, run)).await
        } else {
            self.claimed(inner.store.claim_placed_run(&inner.replica.id, run)).await
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
        let turn = self.journal_turn(row).await?;
        let journal = self.counted_journal(row).await?;
        // A run can be ended without its plan.
        let planned = self.plan_of(&claimed, &journal);
        if let Err(ResumeError::Lacking(lack)) = &planned {
            self.leave_to_others(row, lack).await?;
        }
        let is_child = row.parent_run_id.is_some();
        let rules = planned.as_ref().map(|(_, plan)| plan.rules_of(is_child)).unwrap_or_default();
        let rules = Rules { max_crashes: self.inner.settings.max_crashes, ..rules };
        let mut state = State::new(rules);
        journal.iter().try_for_each(|event| state.apply(event))?;
        drop(journal);
        let (has_crashed, is_alone) =
            (state.has_crashed(row.crash_count), state.is_suspect(row.crash_count));
        let mut recovered = Recovered { run: row.id, state, events: Vec::new(), audit: Vec::new() };
        self.catch_up(&mut recovered, &claimed, is_alone).await?;
        let was_begun = recovered.state.started_at().is_some();
        let slot = slot.or_else(|| self.free_slot(was_begun));
        // One that is to be cancelled does not wait for a slot to have delivered results checked.
        let is_driveable = slot.is_some() || row.cancel_requested_at.is_none();
        let checks_results = planned.is_ok() && is_driveable;
        if let Some(Disposal { events, park }) =
            recovered.state.disposal(checks_results, clock::now())
        {
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
        if let Some(lack) = self.lack_of(&plan) {
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
        if !owned.run.room.resize(owned.run.state.bytes()) {
            return Err(Stopped::NoRoom.into());
        }
        drop(turn);
        owned.resumption = Some(Resumption { claimed, has_crashed, is_alone });
        Ok(Claimed::GoesOn(Box::new(owned)))
    }

    /// States what a run of a tree has spent, before another run of the tree can go on.
    async fn settle_share(
        &self,
        row: &RunRecord,
        state: &State,
        has_ended: bool,
    ) -> Result<(), StoreError> {
        let lineage = self.lineage(row).await?;
        let root = lineage.map_or(row.id, |lineage| lineage.root);
        let ownership = Ownership { owner: &self.inner.replica.id, epoch: row.epoch };
        // Where it is another owner's by now, its end is not stored either.
        self.inner
            .store
            .settle((root, row.id), ownership, state.spent_of_shared(), has_ended)
            .await?;
        Ok(())
    }

    /// Records what has happened since the journal's last event.
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
                let expired = expiry(&answer).map(|record| AuditRecord { labels, ..record });
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

    /// How long the child run was under way that a call waited for; nothing where it is gone or cannot
    /// be read.
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

    /// A slot for a run that brings none along. Without workers only own runs go on, which do.
    fn free_slot(&self, was_begun: bool) -> Option<RunSlot> {
        let slots = &self.inner.capacity.slots;
        match (self.is_draining() || !self.serves_the_queue(), was_begun) {
            (true, _) => None,
            (false, true) => slots.free(),
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
            .map_err(|error| lacking(&error))?;
        let overrides: Overrides =
            serde_json::from_value(row.overrides.clone()).map_err(|error| unusable(&error))?;
        let active = match skills_at_start(journal)? {
            Some(active) => active,
            None => self
                .active_skills(&loaded.agent.definition, &overrides)
                .map_err(|error| lacking(&error))?,
        };
        let plan =
            Plan::new(Arc::clone(&loaded.agent), &loaded.executor, &overrides, row.kind, active)
                .map_err(|error| lacking(&error))?;
        Ok((loaded, plan.informed(&self.inner.router)))
    }

    /// Commits the end of a run, or that it is parked.
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

    /// Waits until the journal of a run may be in memory.
    pub(super) async fn journal_turn(
        &self,
        run: &RunRecord,
    ) -> Result<Option<journals::Turn>, StoreError> {
        if run.started_at.is_none() {
            return Ok(None); // nothing has happened yet
        }
        let sizes = self.inner.store.journal_sizes(&run.tenant, &[run.id]).await?;
        Ok(journals::turn(sizes.get(&run.id).copied().unwrap_or(0)).await)
    }

    /// The journal of a claimed run: neither shorter nor longer than its row says.
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

    /// Fails a run that cannot go on, without its journal and its state machine. One whose end cannot
    /// be written goes back to the queue, to wait the longer the more often it comes.
    pub(super) async fn interrupt(
        &self,
        identity: &RunIdentity,
        ownership: OwnedRun,
        reason: String,
    ) {
        let id = identity.new.id;
        tracing::error!(run_id = %id, %reason, "run interrupted");
        let (store, owner) = (&self.inner.store, &self.inner.replica.id);
        let row = match store.count_events(owner, id, ownership.epoch()).await {
            Ok(()) => store.run(&identity.caller.tenant, id).await,
            Err(error) => Err(error),
        };
        let row = match row {
            Ok(Some(row)) => row,
            Ok(None) => return, // it was deleted
            Err(error) if error.is_transient() => return self.inner.driven.live.abandon(ownership),
            Err(error) => return self.not_ended(&ownership, error.to_string()).await,
        };
        let what = RunEvent::interrupted(format!("The run cannot be resumed: {reason}"));
        let end = Event { seq: row.next_seq, at: clock::now(), run_id: id, what };
        let entry =
            Entry { events: vec![end], audit: Vec::new(), totals: row.totals(), park: None };
        match self.inner.writer.append(identity.write(None, entry)).await {
            Ok(()) => {}
            Err(AppendError::Unavailable) => self.inner.driven.live.abandon(ownership),
            Err(error) => self.not_ended(&ownership, error.to_string()).await,
        }
    }

    async fn not_ended(&self, ownership: &OwnedRun, error: String) {
        tracing::error!(run_id = %ownership.run(), %error, "the interrupted run could not be ended");
        self.reclaim(ownership, Reclaimed::Unended).await;
    }
}

/// The skills that a run began with, as its journal has them; nothing where it has not begun. The
/// instructions are in its conversation.
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
