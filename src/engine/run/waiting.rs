//! Asking for what a response needs from somebody outside.
//!
//! Everything that can be asked for is asked at once, so that several calls can be decided on at the same time and the
//! run goes on once. What the answers mean is decided in `state`; who may answer, and how, is not known here.

use chrono::Utc;

use super::Run;
use crate::engine::FoldError;
use crate::engine::state::PendingCall;
use crate::event::{Awaited, RunEvent, WaitKind};
use crate::message::ToolCall;
use crate::tools::approval::Escalated;
use crate::tools::executor::Prepared;

impl Run {
    /// Asks for an approval of a call, and of every later call of the response that needs one.
    pub(super) async fn ask(&mut self, first: &PendingCall, escalated: Escalated) -> Result<(), FoldError> {
        self.request(&first.call, escalated)?;
        for later in self.state.open_calls(first.index + 1) {
            let prepare = self.executor.prepare(&later.call, later.slot(), &self.scope, None);
            // What is to be said to any other call is said when its turn has come.
            if let Some(Ok(Prepared::Escalated(escalated))) = self.control.token.run_until_cancelled(prepare).await {
                self.request(&later.call, escalated)?;
            }
        }
        Ok(())
    }

    fn request(&mut self, call: &ToolCall, escalated: Escalated) -> Result<(), FoldError> {
        self.audit.push(escalated.audit);
        self.record(RunEvent::ApprovalRequested(Awaited {
            call_id: call.id,
            kind: WaitKind::Approval,
            tool: call.name.clone(),
            arguments: escalated.arguments,
            reason: escalated.reason,
            expires_at: Utc::now() + self.plan.agent.definition.governance.approval_timeout.delta(),
            condition: None,
        }))
    }
}
