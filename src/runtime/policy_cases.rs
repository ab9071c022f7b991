//! Policy cases: calls that an agent's gate judges without a run, to test its decisions.
//!
//! A case gives the arguments of a call, from which the tool derives its actions in a directory
//! made for the case, or the actions themselves, e.g. copied from an event. Nothing is executed.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Runtime;
use super::definition_compiler::executor;
use crate::agents::{Agent, Definition, Skills};
use crate::bounds::name::means;
use crate::event::{RunEvent, ToolCallBlocked};
use crate::fairness;
use crate::governance::{Action, Call, Decision, Objection, Verdict};
use crate::message::{CallTarget, ToolCall};
use crate::run::{Caller, Effect, Labels};
use crate::tools::executor::{Executor, Prepared, RunScope, Slot};
use crate::tools::lease::{Lease, Standing};
use crate::tools::registry::Registry;
use crate::tools::requests::RequestsLeft;
use crate::tools::{Listener, Workspace};

/// The tenant and the workspace of a case.
const TENANT: &str = "default";
const WORKSPACE: &str = "policy-case";
/// How long a tool may take to derive the actions of a call.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// One call, and what is expected of the gate.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyCase {
    /// A name for reports; default: the tool and its number.
    pub name: Option<String>,
    pub tool: String,
    /// The arguments as a model would write them.
    #[serde(default)]
    pub arguments: Option<Value>,
    /// The actions of the call, instead of arguments.
    #[serde(default)]
    pub actions: Option<Vec<Action>>,
    /// The labels of the run.
    #[serde(default)]
    pub labels: Labels,
    /// The scopes of the caller.
    #[serde(default = "every_tool")]
    pub scopes: Vec<String>,
    /// Paths of existing empty files, relative to the workspace.
    #[serde(default)]
    pub files: Vec<String>,
    /// The expected decision.
    pub expect: Decision,
    /// The expected rule; not checked if absent.
    #[serde(default)]
    pub rule: Option<String>,
}

/// The decision of the gate.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseDecision {
    pub decision: String,
    pub rule: String,
    pub reason: Option<String>,
    /// The actions of the call; empty if they could not be derived.
    pub actions: Arc<[Action]>,
}

/// Why the gate does not judge a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotJudged {
    /// The agent has no such tool.
    #[error("{0}")]
    Tool(String),
    /// The file with this index cannot be in a workspace.
    #[error("files[{0}]: {1}")]
    File(usize, String),
    /// Another mistake in the case.
    #[error("{0}")]
    Call(String),
}

fn every_tool() -> Vec<String> {
    vec!["tools:execute".to_owned()]
}

/// A definition's gate and tools, without the agents that it can delegate to.
pub struct PolicyBench {
    executor: Executor,
    /// The definition's list of tools.
    listed: Vec<String>,
}

impl PolicyBench {
    /// # Errors
    /// What is wrong with the definition.
    pub fn new(
        registry: &Registry,
        skills: &Arc<Skills>,
        definition: &Definition,
    ) -> Result<Self, String> {
        let executor = executor(registry, skills, definition, std::iter::empty());
        let executor = executor.map_err(|error| error.to_string())?;
        Ok(Self { executor, listed: definition.tools.clone() })
    }

    /// The decision on a call whose tool the definition does not have: it is blocked.
    pub fn missing(&self, tool: &str) -> Option<CaseDecision> {
        let is_listed = self.listed.iter().any(|name| means(name, tool));
        let has = is_listed || self.executor.infos().any(|info| info.name == tool);
        (!has).then(|| CaseDecision {
            decision: Decision::Blocked.as_str().to_owned(),
            rule: "tools".to_owned(),
            reason: Some("The definition does not have this tool.".to_owned()),
            actions: Arc::default(),
        })
    }

    /// The gate's decision on a call, in a workspace beneath an empty directory.
    ///
    /// # Errors
    /// Why the gate does not judge the call.
    pub async fn decide(
        &self,
        case: &PolicyCase,
        directory: &Path,
    ) -> Result<CaseDecision, NotJudged> {
        let (directory, files) = (directory.to_owned(), case.files.clone());
        let created = fairness::blocking(move || create_workspace(&directory, &files));
        let workspace = created.await.map_err(|error| NotJudged::Call(error.to_string()))??;
        match (&case.actions, &case.arguments) {
            (Some(_), Some(_)) => Err(NotJudged::Call("has both arguments and actions".to_owned())),
            (Some(actions), None) => Ok(self.judge(case, actions, &workspace)),
            (None, arguments) => {
                let arguments = arguments.clone().unwrap_or_else(|| serde_json::json!({}));
                let has = self.executor.infos().any(|tool| tool.name == case.tool);
                let why = if has { NotJudged::Call } else { NotJudged::Tool };
                self.prepare(case, &arguments, workspace).await.map_err(why)
            }
        }
    }

    fn judge(&self, case: &PolicyCase, actions: &[Action], workspace: &Workspace) -> CaseDecision {
        let call = Call {
            tool: &case.tool,
            effect: actions.iter().map(|action| action.effect).max().unwrap_or(Effect::Once),
            is_undeclared: false,
            actions: actions.into(),
            approved_by: None,
            labels: case.labels,
            skills: &[],
            directory: workspace.directory(),
        };
        let (decision, rule, reason) = match self.executor.judge(&case.scopes, call) {
            Verdict::Pass { decision, rule, reason, .. } => (decision, rule, reason),
            Verdict::Stop(Objection { decision, rule, reason, .. }) => {
                (decision, rule, Some(reason))
            }
        };
        CaseDecision {
            decision: decision.as_str().to_owned(),
            rule: rule.to_owned(),
            reason,
            actions: actions.into(),
        }
    }

    async fn prepare(
        &self,
        case: &PolicyCase,
        arguments: &Value,
        workspace: Workspace,
    ) -> Result<CaseDecision, String> {
        let call = ToolCall {
            id: Uuid::nil(),
            name: case.tool.clone(),
            arguments: arguments.to_string(),
            provider_id: String::new(),
            target: CallTarget::Tool,
        };
        let lease = Arc::new(Lease::new(Duration::from_hours(1)));
        let scope = RunScope {
            run_id: Uuid::nil(),
            agent: WORKSPACE.into(),
            caller: Arc::new(Caller { scopes: case.scopes.clone(), ..Caller::local() }),
            workspace,
            timeout: MAX_WAIT,
            delegation_timeout: MAX_WAIT,
            longest: None,
            tools: Arc::new(self.executor.infos().map(|tool| tool.name.clone()).collect()),
            inputs: Arc::new(serde_json::json!({})),
            labels: case.labels,
            trace: None,
            skills: Arc::default(),
            standing: Standing::new(lease, CancellationToken::new()),
            listener: Listener::default(),
            requests_left: RequestsLeft::default(),
            files_left: None,
        };
        let slot = Slot { attempt: 1, iteration: 1, index: 0 };
        let prepared = self.executor.prepare(&call, slot, &scope, None).await;
        match prepared.map_err(|error| error.to_string())? {
            Prepared::Ready(ready) => Ok(CaseDecision {
                decision: ready.started().decision.clone(),
                rule: ready.rule().to_owned(),
                reason: ready.started().reason.clone(),
                actions: Arc::clone(&ready.started().actions),
            }),
            Prepared::Escalated(escalated) => Ok(CaseDecision {
                decision: escalated.audit.decision,
                rule: escalated.audit.rule,
                reason: Some(escalated.reason),
                actions: escalated.actions,
            }),
            Prepared::Answered(finished) => decision_of_event(finished.event),
        }
    }
}

/// A workspace with these files, which are empty.
fn create_workspace(directory: &Path, files: &[String]) -> Result<Workspace, NotJudged> {
    let workspace = Workspace::open(directory, TENANT, WORKSPACE)
        .map_err(|error| NotJudged::Call(error.to_string()))?;
    let root = directory.join(TENANT).join(WORKSPACE);
    for (at, file) in files.iter().enumerate() {
        make_file(&root, file).map_err(|why| NotJudged::File(at, why))?;
    }
    Ok(workspace)
}

fn make_file(root: &Path, file: &str) -> Result<(), String> {
    let is_normal = |part| matches!(part, std::path::Component::Normal(_));
    let path = Path::new(file);
    if file.is_empty() || file.contains('\0') || !path.components().all(is_normal) {
        return Err("must be the path of a file in the workspace".to_owned());
    }
    let path = root.join(path);
    let parent = path.parent().unwrap_or(root);
    let made = std::fs::create_dir_all(parent).and_then(|()| std::fs::write(&path, ""));
    made.map_err(|error| match error.kind() {
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "leads through another file of the list".to_owned()
        }
        ErrorKind::IsADirectory => "is a directory of another file of the list".to_owned(),
        ErrorKind::InvalidFilename => "has a name that is too long".to_owned(),
        _ => format!("cannot be made: {error}"),
    })
}

impl Runtime {
    /// The decision of an agent's gate on a call, in an empty workspace; the call is not executed.
    ///
    /// # Errors
    /// Why the gate does not judge the call.
    pub async fn judge_call(
        &self,
        agent: &Agent,
        case: &PolicyCase,
    ) -> Result<CaseDecision, NotJudged> {
        let (registry, skills) = self.inner.agents.tools();
        let bench =
            PolicyBench::new(registry, skills, &agent.definition).map_err(NotJudged::Call)?;
        let directory = tempfile::tempdir().map_err(|error| NotJudged::Call(error.to_string()))?;
        let decided = bench.decide(case, directory.path()).await;
        tokio::task::spawn_blocking(move || drop(directory));
        decided
    }
}

/// The decision on a call that was refused before its execution, or why the gate did not judge it.
fn decision_of_event(event: RunEvent) -> Result<CaseDecision, String> {
    if let RunEvent::ToolCallCompleted(completed) = event {
        return Err(completed.content);
    }
    let RunEvent::ToolCallBlocked(blocked) = event else {
        return Err("the call was answered without a decision".to_owned());
    };
    let ToolCallBlocked { decision, rule, reason, actions, .. } = blocked;
    Ok(CaseDecision { decision, rule, reason: Some(reason), actions })
}
