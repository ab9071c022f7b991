//! The common context of the calls of one run, and the position of a call in the run.
//!
//! Nothing in it comes from the model. Which calls are made and permitted is decided elsewhere.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::requests::{Requests, RequestsLeft};
use super::{ChangeRecorder, ChildRun, LabelRecorder, Listener, Standing, ToolContext, Workspace};
use crate::event::SkillActivated;
use crate::run::{Caller, Labels, SpanPlace, TraceContext};

/// The common context of the calls of one run.
#[derive(Debug, Clone)]
pub struct RunScope {
    /// The run.
    pub run_id: Uuid,
    /// Its agent.
    pub agent: Arc<str>,
    /// Who started it.
    pub caller: Arc<Caller>,
    /// Where its files lie.
    pub workspace: Workspace,
    /// How long one call may take, where its tool's options say nothing else.
    pub timeout: Duration,
    /// The same for calls that leave work to another agent, which has bounds of its own.
    pub delegation_timeout: Duration,
    /// How long any call may take, whatever options say.
    pub longest: Option<Duration>,
    /// Names of the tools that it may use; others are unknown to it.
    pub tools: Arc<BTreeSet<String>>,
    /// Its inputs, which interceptors may look at.
    pub inputs: Arc<Value>,
    /// The labels of what it has read.
    pub labels: Labels,
    /// The trace that it belongs to.
    pub trace: Option<TraceContext>,
    /// The skills that are active.
    pub skills: Arc<[SkillActivated]>,
    /// Whether it may change something.
    pub standing: Standing,
    /// The listener for the progress of its calls.
    pub listener: Listener,
    /// The network requests that programs and pages may still send.
    pub requests_left: RequestsLeft,
    /// Files that it may still change; `None` where that is not known.
    pub files_left: Option<u64>,
}

impl RunScope {
    pub(super) fn context_of(&self, call_id: Uuid, effect_key: String) -> ToolContext {
        ToolContext {
            run_id: self.run_id,
            agent: Arc::clone(&self.agent),
            caller: Arc::clone(&self.caller),
            call_id,
            effect_key,
            traceparent: self.trace.map(|it| it.span(SpanPlace::Tool(call_id)).to_string()),
            workspace: self.workspace.clone(),
            standing: self.standing.clone(),
            read_labels: LabelRecorder::default(),
            child_run: ChildRun::default(),
            listener: self.listener.clone(),
            changed: ChangeRecorder::default(),
            has_network: false,
            requests: Requests::of(&self.caller.tenant),
            input: None,
        }
    }
}

/// The position of a call in its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The call within the response, 0-based.
    pub index: u32,
}

/// Identifies a call: the same after a crash, and for no other call.
pub(super) fn effect_key(
    run_id: Uuid,
    slot: Slot,
    tool: &str,
    canonical_arguments: &str,
) -> String {
    let Slot { attempt, iteration, index } = slot;
    let key = format!("{run_id}\0{attempt}\0{iteration}\0{index}\0{tool}\0{canonical_arguments}");
    hex::encode(Sha256::digest(key))
}
