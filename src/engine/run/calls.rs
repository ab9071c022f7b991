//! Executes the tool calls of a response: read-only calls concurrently, all others one at a time.
//!
//! The state decides which calls are due. A call that turns out to be no read-only call waits until the calls
//! before it have their results; then the state returns it again. Results are recorded in the order of the
//! calls.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::large_answers::{self, MemoryPermit};
use super::waiting::ExternalInput;
use super::{CallAdmission, Run, Stopped, instant_of, until};
use crate::clock;
use crate::engine::budget::SharedBudget;
use crate::engine::state::{FoldError, PendingCall};
use crate::event::{
    AuditRecord, CallFailure, Circumstances, LabelCause, LabelsChanged, RunEvent, SkillActivated,
    ToolCallCompleted,
};
use crate::message::CallTarget;
use crate::run::{ClientTool, Consumption, Delegation, Effect, Labels};
use crate::tools::client_calls::ClientCall;
use crate::tools::executor::{Executor, Prepared, ReadyCall, RunScope};
use crate::tools::file_store::NotStored;
use crate::tools::requests::RequestsLeft;
use crate::tools::results::{FatalToolError, Finished, refused};
use crate::tools::scan::scan_result;

/// The start of a read-only call is appended before its end if it takes longer than this.
const LINGER: Duration = Duration::from_millis(1);

/// An executed call whose changes of the workspace are stored.
type Executed = Result<Result<Finished, FatalToolError>, NotStored>;

/// Executes a call, and stores its changes of the workspace however it ends.
async fn executed(
    executor: &Executor,
    ready: ReadyCall,
    scope: &RunScope,
    stop: &CancellationToken,
) -> Executed {
    let (changed, touches_files) = (ready.changed(), ready.touches_files());
    let change = if touches_files { scope.workspace.begin_change().await } else { None };
    let result = executor.execute(ready, scope, stop).await;
    let touched = changed.touched();
    let refused = match change {
        Some(change) => change.save(touched).await?,
        None if touches_files || touched.paths.is_empty() => Vec::new(),
        None => scope.workspace.save(touched.paths).await?,
    };
    Ok(match result {
        Ok(finished) if !refused.is_empty() => Ok(finished.without_change_of(&refused)),
        result => result,
    })
}

/// How a call gets its result.
pub(super) enum NextStep {
    /// It is executed with a permit.
    Ready(ReadyCall),
    /// It has a result without execution.
    Answered(Result<Finished, FatalToolError>),
}

impl NextStep {
    /// Reduces the consumption of a repeated call to what was not counted at its first dispatch.
    fn beyond(mut self, counted: Option<&Consumption>) -> Self {
        if let (Self::Ready(ready), Some(counted)) = (&mut self, counted) {
            ready.consume_beyond(counted);
        }
        self
    }

    /// Adds the circumstances of the decision to the call's event.
    fn with_circumstances(mut self, circumstances: Circumstances) -> Self {
        match &mut self {
            Self::Ready(ready) => ready.note(circumstances),
            Self::Answered(Ok(Finished { event: RunEvent::ToolCallBlocked(call), .. })) => {
                call.circumstances = circumstances;
            }
            Self::Answered(_) => {}
        }
        self
    }

    /// Whether the gate refused it.
    fn is_blocked(&self) -> bool {
        matches!(self, Self::Answered(Ok(Finished { event: RunEvent::ToolCallBlocked(_), .. })))
    }

    /// Whether the gate judged it. Refused calls count towards the caller's rate limit, too.
    fn is_judged(&self) -> bool {
        matches!(self, Self::Ready(_)) || self.is_blocked()
    }

    fn consumes(&self) -> &Consumption {
        const NOTHING: &Consumption = &Consumption::NOTHING;
        match self {
            Self::Ready(ready) => &ready.started().consumes,
            Self::Answered(_) => NOTHING,
        }
    }
}

impl Run {
    /// Executes as many of the calls as can be executed together, if the budget allows it. Unless they only
    /// read, their starts are durable first.
    pub(super) async fn call_tools(&mut self, calls: Vec<PendingCall>) -> Result<(), Stopped> {
        if !self.refresh_files().await? {
            return Ok(());
        }
        let mut group = Vec::with_capacity(calls.len());
        let mut writes_ahead = false;
        let mut delegates = false;
        for pending in calls {
            let next = match self.next_step_of(&pending).await {
                Some(Ok(next)) => next,
                Some(Err(need)) if group.is_empty() => match self.may_ask(&pending, need).await? {
                    Ok(need) => {
                        return match self.reserve_external_call(&pending, true).await? {
                            Some(events) => Ok(self.record_all(self.state.or_reviews(events))?),
                            None => self.ask(&pending, need).await,
                        };
                    }
                    Err(refused) => refused,
                },
                Some(Err(_)) | None => break,
            };
            let goes_alone = matches!(&next, NextStep::Ready(ready) if !ready.is_concurrent());
            if goes_alone && !group.is_empty() {
                break;
            }
            let is_new = self.state.counted(pending.call.id).is_none();
            let next = self.uncounted(&pending, next);
            match self.reserve_tool_call(is_new, next.consumes(), group.is_empty()).await? {
                Some(events) if group.is_empty() => {
                    return Ok(self.record_all(self.state.or_reviews(events))?);
                }
                Some(_) => break,
                None => {}
            }
            if let NextStep::Ready(ready) = &next {
                match self.state.over_budget_with(&ready.started().consumes, clock::now()) {
                    Some(events) if group.is_empty() => {
                        return Ok(self.record_all(self.state.or_reviews(events))?);
                    }
                    Some(_) => break, // the calls before it get their results first
                    None => {}
                }
            }
            // Last, because a call that waits for those before it comes again.
            let next = self.admitted(&pending, next).await?;
            if let NextStep::Ready(ready) = &next {
                writes_ahead |= ready.effect() != Effect::Read;
                delegates |= Delegation::of_tool(&pending.call.name).is_some();
                self.record(RunEvent::ToolCallStarted(ready.started().clone()))?;
                let handoff = ready.handoff().filter(|_| !pending.was_started);
                handoff.into_iter().try_for_each(|handoff| self.record(handoff))?;
            }
            let is_last = goes_alone || (next.is_blocked() && self.plan.rules.stop_on_tool_block);
            group.push(next);
            if is_last {
                break;
            }
        }
        // Runs that wait for child runs hold no permit that those may need.
        let permit = large_answers::permit_for_calls(group.len());
        let _permit = if delegates { None } else { self.in_time(permit).await };
        if writes_ahead {
            self.persist().await?;
            self.lease.until_valid().await;
        }
        if delegates {
            self.control.set_delegating(Some(self.state.clone()));
            self.memory_share.lend();
        }
        let executed = self.execute(group).await;
        self.control.set_delegating(None);
        self.memory_share.take_back();
        executed?;
        if delegates {
            self.count_below().await?;
        }
        Ok(())
    }

    /// The step with what it consumes beyond what is counted. Sending the call again with input, and asking for
    /// its outcome, are requests to the network, too.
    fn uncounted(&self, pending: &PendingCall, next: NextStep) -> NextStep {
        let counted = self.state.counted(pending.call.id);
        let is_sent_again = pending.input.is_some() || pending.interrupted.is_some();
        let sent = counted.filter(|_| is_sent_again);
        let sent = sent.map(|counted| Consumption { network_requests: 0, ..counted.clone() });
        next.beyond(sent.as_ref().or(counted))
    }

    /// The permit. `None` also where the run has to end first.
    async fn in_time(
        &mut self,
        permit: impl Future<Output = Option<MemoryPermit>>,
    ) -> Option<MemoryPermit> {
        tokio::select! {
            biased;
            permit = permit => permit,
            () = self.control.token.cancelled() => None,
            () = until(self.state.deadline().map(instant_of)) => None,
        }
    }

    /// Downloads the changes of other runs into the workspace; false if the run is cancelled or out of time.
    async fn refresh_files(&mut self) -> Result<bool, Stopped> {
        let deadline = self.state.deadline().map(instant_of);
        tokio::select! {
            biased;
            () = self.control.token.cancelled() => Ok(false),
            () = until(deadline) => Ok(false),
            refreshed = self.scope.workspace.refresh() => Ok(refreshed.map(|()| true)?),
        }
    }

    /// The input that a call needs; or the refusal of a caller's tool call beyond the rate limit.
    pub(super) async fn may_ask(
        &mut self,
        pending: &PendingCall,
        need: ExternalInput,
    ) -> Result<Result<ExternalInput, NextStep>, Stopped> {
        let ExternalInput::Client(permit, _) = need else { return Ok(Ok(need)) };
        let CallAdmission { refused, rate } = self.admission_of(&pending.call.name).await?;
        Ok(match refused {
            Some(why) => Err(NextStep::Answered(Ok(permit.not_admitted(&pending.call, &why)))),
            None => Ok(ExternalInput::Client(permit, rate)),
        })
    }

    async fn admission_of(&mut self, tool: &str) -> Result<CallAdmission, Stopped> {
        let own = match self.executor.per_minute(tool) {
            None if self.plan.client_tools.tool(tool).is_some() => {
                self.plan.agent.definition.calls_per_minute(tool)
            }
            of_tool => of_tool,
        };
        Ok(self.admission.admit(tool, own).await?)
    }

    /// The next step, or a refusal beyond the caller's rate limit. A repeated call was counted before. The
    /// circumstances of the decision are added.
    async fn admitted(
        &mut self,
        pending: &PendingCall,
        next: NextStep,
    ) -> Result<NextStep, Stopped> {
        let is_counted = self.state.counted(pending.call.id).is_some();
        let CallAdmission { refused, rate } = if next.is_judged() && !is_counted {
            self.admission_of(&pending.call.name).await?
        } else {
            CallAdmission::default()
        };
        let next = match (refused, next) {
            (Some(reason), NextStep::Ready(ready)) => {
                NextStep::Answered(Ok(ready.not_admitted(&pending.call, &reason)))
            }
            (_, next) => next,
        };
        Ok(next.with_circumstances(Circumstances { rate, ..self.state.circumstances() }))
    }

    /// The next step of a call, or the external input that it needs first; `None` if the run is cancelled or
    /// out of time.
    async fn next_step_of(
        &mut self,
        pending: &PendingCall,
    ) -> Option<Result<NextStep, ExternalInput>> {
        match self.plan.client_tools.called(&pending.call.name, &pending.call.arguments) {
            Some(Ok(called)) => return Some(self.client_call(pending, called, &self.scope)),
            Some(Err(wrong)) => {
                let refused = refused(&pending.call, CallFailure::InvalidArguments, &wrong);
                return Some(Ok(NextStep::Answered(Ok(refused))));
            }
            None => {}
        }
        let deadline = self.state.deadline().map(instant_of);
        let prepared = tokio::select! {
            biased;
            () = self.control.token.cancelled() => return None,
            () = until(deadline) => return None,
            prepared = self.executor.prepare(&pending.call, pending.slot(), &self.scope, pending.earlier_decisions()) => prepared,
        };
        Some(Ok(match prepared {
            Ok(Prepared::Answered(finished)) => NextStep::Answered(Ok(finished)),
            Ok(Prepared::Escalated(escalated)) => {
                return Some(Err(ExternalInput::Approval(Box::new(escalated))));
            }
            Ok(Prepared::Ready(ready)) => {
                match self.state.cached_result(&ready.made(&pending.call)) {
                    Some(known) if ready.effect() == Effect::Read => {
                        NextStep::Answered(Ok(ready.answered_with(known.to_owned())))
                    }
                    _ => NextStep::Ready(ready),
                }
            }
            Err(fault) => NextStep::Answered(Err(fault)),
        }))
    }

    /// The next step of a call of a caller's tool, judged in this scope.
    pub(super) fn client_call(
        &self,
        pending: &PendingCall,
        called: (&ClientTool, Value),
        scope: &RunScope,
    ) -> Result<NextStep, ExternalInput> {
        let granted = pending.granted_approval();
        let schema = self.plan.client_tools.schema(&pending.call.name);
        match self.executor.judge_client_call(&pending.call, called, scope, granted, schema) {
            ClientCall::Permitted(permit) => Err(ExternalInput::Client(permit, None)),
            ClientCall::Escalated(escalated) => Err(ExternalInput::Approval(escalated)),
            ClientCall::Answered(finished) => Ok(NextStep::Answered(Ok(*finished))),
        }
    }

    /// Executes calls concurrently and records their results in order. Earlier events are appended as soon as
    /// the calls take a while.
    ///
    /// Calls that change something are stopped when this replica's lease expires, because another replica may
    /// take the run over.
    async fn execute(&mut self, calls: Vec<NextStep>) -> Result<(), Stopped> {
        let changes = |call: &NextStep| matches!(call, NextStep::Ready(ready) if ready.changes());
        let lease = calls.iter().any(changes).then(|| Arc::clone(&self.lease));
        let over = async {
            match lease {
                Some(lease) => lease.over().await,
                None => std::future::pending().await,
            }
        };
        let mut over = std::pin::pin!(over);
        let listener = self.audience.listener(self.state.last_seq());
        let requests_left = RequestsLeft::of(self.state.requests_left())
            .shared_by(self.shared.as_ref().map(SharedBudget::requests));
        let files_left = Some(self.state.files_left());
        let scope = RunScope { listener, requests_left, files_left, ..self.scope.clone() };
        let executor = Arc::clone(&self.executor);
        let stop = self.control.token.child_token();
        let deadline = self.state.deadline().map(instant_of);
        let work = calls.into_iter().map(|call| async {
            match call {
                NextStep::Ready(ready) => executed(&executor, ready, &scope, &stop).await,
                NextStep::Answered(answer) => Ok(answer),
            }
        });
        let mut execution = std::pin::pin!(join_all(work));
        let quick = tokio::select! {
            biased;
            results = &mut execution => Some(results),
            () = tokio::time::sleep(LINGER) => None,
        };
        if let Some(results) = quick {
            return self.results(results).await;
        }
        self.hand_over();
        let results = tokio::select! {
            biased;
            results = &mut execution => results,
            () = until(deadline) => {
                stop.cancel();
                execution.await
            }
            () = &mut over => return Err(Stopped::LeaseOver),
        };
        self.results(results).await
    }

    /// Records results. A tool that failed because of a fault of the service ends the run, once all results
    /// are recorded.
    async fn results(&mut self, results: Vec<Executed>) -> Result<(), Stopped> {
        let results = results.into_iter().collect::<Result<Vec<_>, NotStored>>()?;
        let bytes = results.iter().flatten().map(Finished::bytes).sum();
        self.large_answer = self.in_time(large_answers::permit(bytes)).await;
        if let Some(requested) =
            self.control.requested().filter(|_| !self.state.is_cancel_requested())
        {
            self.record(requested)?; // while the calls are open, so that the event names the right phase
        }
        let mut faulty = None;
        let judged_with = self.state.labels();
        for result in results {
            match result {
                Ok(finished) => self.finish(finished, judged_with)?,
                Err(fault) => {
                    let FatalToolError { tool, message, finished } = fault;
                    tracing::error!(run_id = %self.scope.run_id, tool, error = %message, "tool fault");
                    self.finish(*finished, judged_with)?;
                    faulty = faulty.or(Some(tool));
                }
            }
        }
        let events = faulty.map(|tool| self.state.tool_fault(&tool, clock::now()));
        Ok(self.record_all(events.unwrap_or_default())?)
    }

    /// Adds the labels of a call's result to the run.
    pub(super) fn label(
        &mut self,
        call: &ToolCallCompleted,
        yields: Labels,
    ) -> Result<(), FoldError> {
        let labels = self.state.labels().and(yields);
        if labels == self.state.labels() {
            return Ok(());
        }
        let (call_id, tool) = (Some(call.call_id), Some(call.tool.clone()));
        let changed = LabelsChanged { labels, cause: LabelCause::Result, call_id, tool };
        self.record(RunEvent::LabelsChanged(changed))
    }

    /// Whether a result was given by a caller or a reviewer.
    pub(super) fn is_from_outside(call: &ToolCallCompleted) -> bool {
        let is_of_tool = call.failure.is_none_or(CallFailure::is_of_tool);
        call.target == CallTarget::Tool && is_of_tool
    }

    /// The labels of such a result.
    pub(super) fn yields_from_outside(&self, tool: &str) -> Labels {
        match self.plan.client_tools.tool(tool) {
            Some(_) => self.plan.agent.definition.client_tool_yields(tool),
            None => self.executor.yields_of_reported(tool),
        }
    }

    /// Applies the definition's interceptors to such a result.
    pub(super) fn revise(&self, result: &mut ToolCallCompleted) {
        let shown = self.state.arguments_shown(result.call_id).cloned();
        self.executor.revise(result, &shown.unwrap_or_default(), &self.scope.inputs);
    }

    /// Scans a result for prompt injection; it may be withheld.
    pub(super) fn scanned(&self, call: &mut ToolCallCompleted) -> Option<RunEvent> {
        let rule = self.plan.agent.definition.governance.injection.results;
        scan_result(call, rule).map(RunEvent::ScanWarned)
    }

    /// Records the result of a call that was judged in a run with these labels.
    fn finish(&mut self, mut finished: Finished, labels: Labels) -> Result<(), FoldError> {
        if let RunEvent::ToolCallCompleted(call) = &mut finished.event {
            let since_begun = self.state.with_ended_child(call.call_id, clock::now());
            call.duration_ms = since_begun.unwrap_or(call.duration_ms);
            self.label(call, finished.yields)?;
            if let Some(warned) = self.scanned(call) {
                self.record(warned)?;
            }
            call.note = self.state.stuck_note(call.call_id, &call.content);
        } else if let RunEvent::ToolCallBlocked(call) = &mut finished.event
            && let Some(note) = self.state.stuck_note(call.call_id, &call.reason)
        {
            call.content = format!("{}\n\n{note}", call.content);
        }
        if let RunEvent::ToolCallAwaitingClient(awaited) = &mut finished.event {
            let patience = self.plan.agent.definition.client_tool_timeout;
            awaited.expires_at = Some(clock::now() + patience.delta());
            awaited.circumstances = self.state.circumstances();
        }
        let records = finished.requests.into_iter().chain(finished.audit);
        self.audit.extend(records.map(|record| AuditRecord { labels, ..record }));
        self.record(finished.event)?;
        let is_new = |skill: &SkillActivated| {
            let mut own = self.state.skills().iter().filter(|active| !active.inherited);
            own.all(|active| active.skill != skill.skill)
        };
        let activated = finished.activates.filter(is_new).map(RunEvent::SkillActivated);
        activated.map_or(Ok(()), |activated| self.record(activated))
    }
}
