//! Requests for external input that a response needs: approvals, and the results of the
//! caller's own tools.
//!
//! Everything that can be asked for is asked at once, so that several calls can be answered at the
//! same time and the run goes on once. What the answers mean is decided in `state`; who may answer,
//! and how, is not known here.

use super::{Run, Stopped};
use crate::clock;
use crate::engine::state::{FoldError, PendingCall};
use crate::event::{
    ApprovalBasis, AuditRecord, Awaited, CallRate, Circumstances, RunEvent, WaitKind,
};
use crate::message::ToolCall;
use crate::tools::approval::Escalated;
use crate::tools::client_calls::ClientPermit;
use crate::tools::executor::Prepared;

/// External input that a call needs.
pub(super) enum ExternalInput {
    /// It needs an approval.
    Approval(Box<Escalated>),
    /// The caller executes it; how its calls of this minute stand.
    Client(Box<ClientPermit>, Option<CallRate>),
}

impl Run {
    /// Asks for what a call needs, and for what every later call of the response needs.
    pub(super) async fn ask(
        &mut self,
        first: &PendingCall,
        need: ExternalInput,
    ) -> Result<(), Stopped> {
        self.request(&first.call, need)?;
        for later in self.state.open_calls(first.index + 1) {
            let Some(need) = self.external_input_of(&later).await else { continue };
            // A refused call gets its result when its turn has come.
            if let Ok(need) = self.may_ask(&later, need).await? {
                self.request(&later.call, need)?;
            }
        }
        Ok(())
    }

    /// What a call needs that is not due yet. Whatever else is to be said to it is said when its
    /// turn has come.
    async fn external_input_of(&mut self, pending: &PendingCall) -> Option<ExternalInput> {
        if let Some(called) =
            self.plan.client_tools.called(&pending.call.name, &pending.call.arguments)
        {
            return self.client_call(pending, called.ok()?).err();
        }
        let prepare = self.executor.prepare(&pending.call, pending.slot(), &self.scope, None);
        match self.control.token.run_until_cancelled(prepare).await {
            Some(Ok(Prepared::Escalated(escalated))) => {
                Some(ExternalInput::Approval(Box::new(escalated)))
            }
            _ => None,
        }
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
