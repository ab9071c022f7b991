//! Requests for external input that a response needs: approvals, and results of the caller's tools.
//!
//! All possible requests are made at once, so that the run is parked and resumed only once. An approved call
//! is judged again before its execution. A call of a caller's tool is not, so it is requested early only if
//! no earlier call can change the decision. `state` interprets the answers; the runtime decides who may answer.

use serde_json::Value;

use super::{Run, Stopped};
use crate::clock;
use crate::engine::state::{FoldError, PendingCall};
use crate::event::{
    ApprovalBasis, AuditRecord, Awaited, CallRate, Circumstances, RunEvent, WaitKind,
};
use crate::message::ToolCall;
use crate::run::{ClientTool, Labels};
use crate::tools::approval::Escalated;
use crate::tools::client_calls::ClientPermit;
use crate::tools::executor::{Prepared, RunScope};
use crate::tools::use_skill;

/// External input that a call needs.
pub(super) enum ExternalInput {
    /// It needs an approval.
    Approval(Box<Escalated>),
    /// The caller executes it; with the state of the caller's rate limit.
    Client(Box<ClientPermit>, Option<CallRate>),
}

/// What can be said about a call before the calls before it are done.
enum Outlook {
    Needs(ExternalInput),
    /// It would be refused now; that is decided when it is due.
    Refused,
    Unknown,
}

/// The labels that the run may have when a call is due, for each possible outcome of the calls before it.
/// Unknown after a call that waits for more than the caller's result: it may read anything, and may end the
/// run.
struct LabelsAhead(Option<Vec<Labels>>);

impl LabelsAhead {
    /// The labels after one more call. Its result, if any, has the labels `yields` and may look like a prompt
    /// injection.
    fn behind(self, yields: Option<Labels>) -> Self {
        let (Some(mut known), Some(yields)) = (self.0, yields) else { return Self(None) };
        for labels in known.clone() {
            let given = labels.and(yields);
            for ahead in [given, given.and(Labels::UNTRUSTED)] {
                if !known.contains(&ahead) {
                    known.push(ahead);
                }
            }
        }
        Self(Some(known))
    }
}

impl Run {
    /// Requests what a call needs, and what later calls of the response need as far as that is known. After
    /// a call that reads a skill, nothing is known.
    pub(super) async fn ask(
        &mut self,
        first: &PendingCall,
        need: ExternalInput,
    ) -> Result<(), Stopped> {
        let ahead = LabelsAhead(Some(vec![self.state.labels()]));
        let mut ahead = ahead.behind(self.yields_if_needed(&first.call, &need));
        self.request(&first.call, need)?;
        let mut reads_skill = first.call.name == use_skill::NAME;
        for later in self.state.open_calls(first.index + 1) {
            if reads_skill {
                break;
            }
            let outlook = match self.outlook_of(&later, &ahead).await {
                Outlook::Needs(need) => {
                    self.may_ask(&later, need).await?.map_or(Outlook::Refused, Outlook::Needs)
                }
                known => known,
            };
            ahead = ahead.behind(match &outlook {
                Outlook::Needs(need) => self.yields_if_needed(&later.call, need),
                Outlook::Refused => self.yields_if_refused(&later.call),
                Outlook::Unknown => None,
            });
            if let Outlook::Needs(need) = outlook {
                if self.reserve_external_call(&later, false).await?.is_some() {
                    break;
                }
                self.request(&later.call, need)?;
            }
            reads_skill = later.call.name == use_skill::NAME;
        }
        Ok(())
    }

    /// The labels of the result of a call, if the call needs nothing but the caller's result.
    fn yields_if_needed(&self, call: &ToolCall, need: &ExternalInput) -> Option<Labels> {
        let is_given = matches!(need, ExternalInput::Client(..));
        is_given.then(|| self.yields_from_outside(&call.name))
    }

    /// The labels of the result of a caller's tool call that would be refused now, unless the refusal ends the
    /// run: it may be allowed when it is due. For other tools this is unknown.
    fn yields_if_refused(&self, call: &ToolCall) -> Option<Labels> {
        let rules = &self.plan.rules;
        let may_end_run = rules.stop_on_tool_block || rules.throw_on_tool_failure;
        let is_clients = self.plan.client_tools.tool(&call.name).is_some();
        (is_clients && !may_end_run).then(|| self.yields_from_outside(&call.name))
    }

    /// What a call needs that is not due yet. All other decisions on it are made when it is due.
    async fn outlook_of(&mut self, pending: &PendingCall, ahead: &LabelsAhead) -> Outlook {
        let call = &pending.call;
        if self.state.was_asked_for(call.id) {
            return Outlook::Unknown;
        }
        match self.plan.client_tools.called(&call.name, &call.arguments) {
            Some(Ok(called)) => return self.outlook_of_clients(pending, called, ahead),
            Some(Err(_)) => return Outlook::Refused,
            None => {}
        }
        let prepare = self.executor.prepare(call, pending.slot(), &self.scope, None);
        match self.control.token.run_until_cancelled(prepare).await {
            Some(Ok(Prepared::Escalated(escalated))) => {
                Outlook::Needs(ExternalInput::Approval(Box::new(escalated)))
            }
            _ => Outlook::Unknown,
        }
    }

    /// The same for a call of a caller's tool. It is requested early if the rules allow it whatever the calls
    /// before it do.
    fn outlook_of_clients(
        &self,
        pending: &PendingCall,
        called: (&ClientTool, Value),
        ahead: &LabelsAhead,
    ) -> Outlook {
        let (tool, arguments) = called;
        let need = |labels| {
            let scope = RunScope { labels, ..self.scope.clone() };
            self.client_call(pending, (tool, arguments.clone()), &scope).err()
        };
        let passes = |labels: &Labels| matches!(need(*labels), Some(ExternalInput::Client(..)));
        let Some(input) = need(self.state.labels()) else { return Outlook::Refused };
        let may_wait = matches!(input, ExternalInput::Approval(_));
        let is_due = || ahead.0.as_ref().is_some_and(|ahead| ahead.iter().all(passes));
        if may_wait || is_due() { Outlook::Needs(input) } else { Outlook::Unknown }
    }

    fn request(&mut self, call: &ToolCall, need: ExternalInput) -> Result<(), FoldError> {
        let definition = &self.plan.agent.definition;
        let (kind, patience) = match &need {
            ExternalInput::Approval(_) => {
                (WaitKind::Approval, definition.governance.approval_timeout)
            }
            ExternalInput::Client(..) => (WaitKind::Client, definition.client_tool_timeout),
        };
        let rate = if let ExternalInput::Client(_, rate) = &need { *rate } else { None };
        let Escalated { arguments, actions, actions_hash, reason, tool_hash, audit } = match need {
            ExternalInput::Approval(escalated) => *escalated,
            ExternalInput::Client(permit, _) => {
                let ClientPermit { arguments, actions, reason, audit } = *permit;
                Escalated { arguments, actions, actions_hash: None, reason, tool_hash: None, audit }
            }
        };
        let labels = self.state.labels();
        let decision = (kind == WaitKind::Client).then(|| audit.decision.clone());
        let awaited = Awaited {
            basis: ApprovalBasis { tool_hash, actions_hash, labels },
            circumstances: Circumstances { rate, ..self.state.circumstances() },
            decision,
            escalation_target: definition.owner.get("escalation_target").cloned(),
            call_id: call.id,
            kind,
            tool: call.name.clone(),
            arguments,
            reason,
            actions,
            expires_at: Some(clock::now() + patience.delta()),
            condition: None,
            child_run_id: None,
            input: None,
        };
        self.audit.push(AuditRecord { labels, ..audit });
        self.record(match kind {
            WaitKind::Client => RunEvent::ToolCallAwaitingClient(awaited),
            _ => RunEvent::ApprovalRequested(awaited),
        })
    }
}
