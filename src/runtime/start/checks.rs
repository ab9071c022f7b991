//! The checks of a request before anything is stored.

use std::ops::RangeInclusive;
use std::sync::Arc;

use chrono::TimeDelta;
use serde_json::Value;
use tokio::time::Instant;
use uuid::Uuid;

use super::StartRequest;
use super::error::{StartError, at};
use crate::agents::Agent;
use crate::agents::prompt::{ActiveSkill, Background, Opening};
use crate::bounds::secrets;
use crate::clock;
use crate::engine::Plan;
use crate::event::{ScanWarned, SkillActivated, ValidationError};
use crate::run::{Caller, OnInjection, RunStatus};
use crate::runtime::Runtime;
use crate::runtime::background::SkillError;
use crate::runtime::loaded_agents::LoadedAgent;
use crate::runtime::uploads::Uploads;
use crate::store::{NewRun, QueuePlace};
use crate::tools::scan::scan_inputs;

/// The priorities of queued runs.
const PRIORITIES: RangeInclusive<i64> = -100..=100;
/// The longest delay of a queued run.
const LONGEST_DELAY: TimeDelta = TimeDelta::days(30);

/// A request that passed every check.
#[derive(Clone)]
pub(in crate::runtime) struct Checked {
    pub(in crate::runtime) new: NewRun,
    pub(in crate::runtime) caller: Arc<Caller>,
    pub(in crate::runtime) loaded: LoadedAgent,
    pub(in crate::runtime) plan: Arc<Plan>,
    /// The earlier runs of its session, the oldest first.
    pub(in crate::runtime) earlier: Vec<Uuid>,
    pub(in crate::runtime) uploads: Option<Arc<Uploads>>,
    pub(in crate::runtime) until: Option<Instant>,
}

impl Checked {
    /// The run's workspace, relative to its tenant's directory.
    pub(in crate::runtime) fn directory(&self) -> String {
        self.plan.agent.workspace_of(self.new.id, self.new.session_id.as_deref())
    }
}

impl Runtime {
    /// Checks everything that can be refused. `inherited` are the skills of the run that starts this
    /// one, if another one does.
    pub(in crate::runtime) fn check(
        &self,
        agent: Arc<Agent>,
        mut request: StartRequest,
        inherited: Vec<SkillActivated>,
    ) -> Result<Checked, StartError> {
        let inner = &self.inner;
        check_queue(request.queue)?;
        secrets::remove_known(&mut request.inputs);
        let webhook = inner.housekeeping.webhooks.address(request.webhook.as_deref())?;
        agent.check_inputs(&request.inputs).map_err(StartError::InvalidInputs)?;
        if agent.definition.governance.injection.inputs == OnInjection::Block
            && let Some(warned) = scan_inputs(&request.inputs)
        {
            return Err(StartError::PromptInjection(suspicious(warned)));
        }
        let loaded =
            inner.agents.get(&agent).map_err(|e| StartError::broken(&request.agent, &e))?;
        let mut active =
            self.active_skills(&agent.definition, &request.overrides).map_err(|e| match e {
                SkillError::Refused(error) => StartError::InvalidOverride(error),
                SkillError::Missing(_) => StartError::broken(&request.agent, &e),
            })?;
        active.extend(inherited.into_iter().map(ActiveSkill::inherited));
        let plan = Plan::new(agent, &loaded.executor, &request.overrides, request.kind, active)
            .map_err(|e| StartError::InvalidOverride(e.0))?;
        check_tools(&plan, &request.caller)?;
        if plan.rules.given.is_none() {
            plan.check_models(&inner.router).map_err(|e| StartError::InvalidOverride(e.0))?;
        }
        let plan = plan.informed(&inner.router);
        let new = NewRun {
            id: request.run_id.unwrap_or_else(Uuid::now_v7),
            agent: request.agent,
            agent_version: plan.agent.definition.version.clone(),
            definition: Arc::clone(&loaded.snapshot),
            kind: request.kind,
            status: RunStatus::Running,
            inputs: Arc::new(request.inputs),
            overrides: serde_json::to_value(&request.overrides).unwrap_or_default(),
            session_id: request.session_id,
            session_place: None,
            parent_run_id: None,
            metadata: request.metadata.into_iter().map(|(k, v)| (k, Value::String(v))).collect(),
            idempotency: request.idempotency,
            traceparent: request.traceparent,
            webhook,
            queue: QueuePlace {
                available_at: request.queue.available_at.filter(|at| *at > clock::now()),
                ..request.queue
            },
            created_at: clock::now(),
        };
        Ok(Checked {
            new,
            caller: request.caller,
            loaded,
            plan: Arc::new(plan),
            earlier: Vec::new(),
            uploads: request.uploads,
            until: request.until,
        })
    }
}

fn check_queue(queue: QueuePlace) -> Result<(), StartError> {
    let refused = |pointer, why: &str| Err(StartError::InvalidOverride(at(pointer, why.into())));
    if !PRIORITIES.contains(&queue.priority) {
        return refused("/priority", "must be from -100 to 100");
    }
    if queue.available_at.is_some_and(|at| at > clock::now() + LONGEST_DELAY) {
        return refused("/available_at", "must be at most 30 days ahead");
    }
    Ok(())
}

/// Refuses a run if the caller's scopes allow none of its tools.
fn check_tools(plan: &Plan, caller: &Caller) -> Result<(), StartError> {
    let tools: Vec<&str> = plan.tools().collect();
    let is_allowed =
        |tool: &&str| caller.may_execute(tool) || plan.client_tools.tool(tool).is_some();
    let mut names = tools.iter();
    match (names.next(), names.next()) {
        (None, _) => Ok(()),
        _ if tools.iter().any(is_allowed) => Ok(()),
        (Some(only), None) => Err(StartError::MissingScope(format!("tools:{only}"))),
        _ => Err(StartError::MissingScope("tools:execute".to_owned())),
    }
}

/// The first messages. An error of a template is reported as one of the inputs.
pub(in crate::runtime) fn opening(
    plan: &Plan,
    inputs: &Value,
    background: &Background,
) -> Result<Opening, StartError> {
    plan.opening(inputs, background)
        .map_err(|e| StartError::InvalidInputs(vec![at("", e.to_string())]))
}

fn suspicious(ScanWarned { pointer, suspicion, .. }: ScanWarned) -> ValidationError {
    let message = format!("looks like a prompt injection: {}", suspicion.in_words());
    ValidationError { pointer: pointer.unwrap_or_default(), message }
}
