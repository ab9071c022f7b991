//! Requests for external input that a response needs: approvals, and the results of the
//! caller's own tools.
//!
//! What can be asked for is asked at once, so that several calls can be answered at the same time
//! and the run goes on once. An approval is judged again before its call is made. A call that the
//! caller executes is not, so it is asked for when nothing that comes before it can change what the
//! rules say. What the answers mean is decided in `state`; who may answer, and how, is not known
//! here.

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
    /// The caller executes it; how its calls of this minute stand.
    Client(Box<ClientPermit>, Option<CallRate>),
}

/// What is known of a call whose turn has not come.
enum Outlook {
    Needs(ExternalInput),
    /// It is not made, as things stand: it gets its result when its turn has come.
    Refused,
    Unknown,
}

/// The labels that the run may have when the turn of a call has come, for each way in which the calls
/// before it may end. Unknown behind a call that waits for more than the caller's result: it may read
/// anything, and its end may mean that no other is made.
struct LabelsAhead(Option<Vec<Labels>>);

impl LabelsAhead {
    /// The same behind a call whose result, if there is one, yields this, and may look like an
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
    /// Asks for what a call needs, and for what later calls of the response need, so far as that is
    /// known: not behind a skill that is to be read.
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
                if self.reserve_asked(&later, false).await?.is_some() {
                    break;
                }
                self.request(&later.call, need)?;
            }
            reads_skill = later.call.name == use_skill::NAME;
        }
        Ok(())
    }

    /// What the result of a call yields, where that is all it needs.
    fn yields_if_needed(&self, call: &ToolCall, need: &ExternalInput) -> Option<Labels> {
        let is_given = matches!(need, ExternalInput::Client(..));
        is_given.then(|| self.yields_from_outside(&call.name))
    }

    /// What a refused call of the caller yields at most, unless it ends the run: it may be let in when
    /// its turn has come. What one of our own reads then is not known.
    fn yields_if_refused(&self, call: &ToolCall) -> Option<Labels> {
        let rules = &self.plan.rules;
        let may_end_run = rules.stop_on_tool_block || rules.throw_on_tool_failure;
        let is_clients = self.plan.client_tools.tool(&call.name).is_some();
        (is_clients && !may_end_run).then(|| self.yields_from_outside(&call.name))
    }

    /// What a call needs that is not due yet. Whatever else is to be said to it is said when its
    /// turn has come.
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

    /// The same of a call that the caller executes, and does so at once: it is asked for where the
    /// rules let it pass whatever comes before it.
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
        let Escalated { arguments, actions, reason, tool_hash, audit } = match need {
            ExternalInput::Approval(escalated) => *escalated,
            ExternalInput::Client(permit, _) => {
                let ClientPermit { arguments, actions, reason, audit } = *permit;
                Escalated { arguments, actions, reason, tool_hash: None, audit }
            }
        };
        let labels = self.state.labels();
        let decision = (kind == WaitKind::Client).then(|| audit.decision.clone());
        let awaited = Awaited {
            basis: ApprovalBasis { tool_hash, labels },
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
