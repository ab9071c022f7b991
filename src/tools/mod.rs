//! Tools: the trait, the context of a call, and the two ways it can fail.
//!
//! [`executor`] takes a call from its arguments to its result; nothing else calls
//! [`Tool::execute`].

pub mod approval;
pub mod arguments;
mod audit_arguments;
pub mod browser;
mod call_options;
mod change_recorder;
mod characters;
pub mod client_calls;
pub mod credentials;
pub mod declared;
mod declared_paths;
mod entries;
pub mod executor;
pub mod file_content;
pub mod file_locks;
pub mod file_ops;
pub mod file_store;
mod guarded_work;
pub mod interceptors;
pub mod interrupted_call;
mod large_contents;
pub mod layout;
pub mod lease;
pub mod listener;
pub mod marker;
pub mod mcp;
mod offered_tool;
mod own_writes;
mod parse_pool;
pub mod pdf;
mod programs;
pub mod proxy;
pub mod quarantine;
pub mod quota;
mod ready_call;
pub mod recall;
pub mod registry;
mod removal;
pub mod requests;
pub mod results;
pub mod run_scope;
pub mod sandbox;
pub mod scan;
pub mod shell;
pub mod staged_bytes;
pub mod staged_file;
pub mod stored_files;
pub mod subagent;
pub mod use_skill;
pub mod web_fetch;
pub mod workspace;

use crate::message::tool_schema::ToolSchema;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::event::{InputAnswer, InputRequired, SkillActivated, ValidationError};
use crate::governance::{Action, Permit};
use crate::run::{Caller, Effect, Labels, SandboxLevel};

pub use change_recorder::ChangeRecorder;
pub use lease::Standing;
pub use listener::Listener;
use requests::Requests;
pub use workspace::Workspace;

/// The description of a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolInfo {
    /// Our name, e.g. `file_ops`, `mcp:time/now`.
    pub name: String,
    /// For the model.
    pub description: String,
    /// JSON Schema 2020-12 of the arguments.
    pub input_schema: ToolSchema,
    /// The strongest effect that a call can have.
    pub effect: Effect,
    /// Whether single calls may have a weaker effect, which their actions show.
    pub varies: bool,
    /// Whether its calls may be executed at the same time as neighbouring ones although they do not
    /// only read.
    pub concurrent: bool,
    /// Where it comes from: `builtin`, `http:<set>`, `script:<set>`, `mcp:<server>`, `agent`.
    pub source: String,
    /// Whether some of its calls destroy existing data.
    pub destructive: bool,
    /// The defaults that were declared with it.
    pub defaults: Defaults,
}

/// A tool in its current state.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolNow {
    pub info: ToolInfo,
    /// Whether its calls are programs in the sandbox.
    pub runs_programs: bool,
    /// Whether these programs can be given network access.
    pub may_lead_out: bool,
    /// Why its calls fail, as a sentence.
    pub unavailable: Option<String>,
}

/// The options of a tool's calls that apply where a definition sets none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Defaults {
    /// The labels that its results give to a run.
    pub yields: Option<Labels>,
    /// Labels that its results do not give to a run, whatever was read to produce them.
    pub sanitizes: Labels,
    /// How long one call may take.
    pub timeout: Option<Duration>,
}

/// How much later than its own timeout a tool's call is ended. The tool ends the call itself first,
/// because it can report more.
const GRACE: Duration = Duration::from_secs(3);

impl Defaults {
    /// The defaults of a tool that ends its calls itself after `setting`: a call is ended later than that.
    pub fn of_timeout(setting: Duration) -> Self {
        /// What every call may take where a definition says nothing.
        const USUAL: Duration = Duration::from_mins(1);
        Self { timeout: Some((setting + GRACE).max(USUAL)), ..Self::default() }
    }
}

impl ToolInfo {
    /// About how many bytes it takes in a request or an answer.
    pub fn bytes(&self) -> usize {
        self.name.len() + self.description.len() + self.input_schema.json_len()
    }

    /// The SHA-256, in hexadecimal digits, of what a model and an approver read about the tool and of its
    /// declaration `does`.
    pub fn hash(&self, does: &str) -> String {
        let effect = (self.effect.as_str(), self.destructive);
        let hashed = (&self.name, &self.description, &self.input_schema, effect, does);
        let hashed = serde_json::to_vec(&hashed).unwrap_or_default();
        hex::encode(Sha256::digest(&hashed))
    }

    /// Whether there are calls of the tool that only read.
    pub fn may_only_read(&self) -> bool {
        self.effect == Effect::Read || self.varies
    }

    /// Whether there are calls of the tool that may be executed at the same time as neighbouring
    /// ones.
    pub fn may_be_concurrent(&self) -> bool {
        self.concurrent || self.may_only_read()
    }
}

/// The context of a call. Nothing in it comes from the model.
#[derive(Debug, Clone)]
pub struct ToolContext {
    /// The run.
    pub run_id: Uuid,
    /// Its agent.
    pub agent: Arc<str>,
    /// Who started it.
    pub caller: Arc<Caller>,
    /// The call.
    pub call_id: Uuid,
    /// Stable over crashes and retries; goes to outside services as their idempotency key.
    pub effect_key: String,
    /// The call's place in a trace, for outside services that take part in it.
    pub traceparent: Option<String>,
    /// The directory that the run's files lie beneath.
    pub workspace: Workspace,
    /// Checked immediately before something is changed.
    pub standing: Standing,
    /// The labels of what the call has read of other runs.
    pub read_labels: LabelRecorder,
    /// The run that the call has started.
    pub child_run: ChildRun,
    /// The listener for the call's progress.
    pub listener: Listener,
    /// The recorder of its changes.
    pub changed: ChangeRecorder,
    /// Whether the agent's rules give programs network access.
    pub has_network: bool,
    /// The network requests of programs or of a page.
    pub requests: Requests,
    /// The answer to the tool's question in an earlier execution of this call.
    pub input: Option<Arc<InputAnswer>>,
}

/// The labels of what a call has read of other runs: memories, and what a child run has read.
#[derive(Debug, Clone, Default)]
pub struct LabelRecorder(Arc<parking_lot::Mutex<Labels>>);

impl LabelRecorder {
    pub fn add(&self, labels: Labels) {
        let mut all = self.0.lock();
        *all = all.and(labels);
    }

    pub fn labels(&self) -> Labels {
        *self.0.lock()
    }
}

impl PartialEq for LabelRecorder {
    fn eq(&self, other: &Self) -> bool {
        self.labels() == other.labels()
    }
}

/// The run that a call of another agent has started, once it has.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChildRun(Arc<OnceLock<Uuid>>);

impl ChildRun {
    pub fn started(&self, run: Uuid) {
        let _ = self.0.set(run);
    }

    pub fn id(&self) -> Option<Uuid> {
        self.0.get().copied()
    }
}

/// How a tool call fails: there is no third way.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The model made a mistake or can react to the failure; it reads this text.
    #[error("{0}")]
    ForModel(String),
    /// The service is at fault: the run ends.
    #[error("{0}")]
    Fatal(String),
    /// The budget that all runs of the tree share is used up; the model reads this text.
    #[error("{0}")]
    OverBudget(String),
    /// The call started this child run, which is parked: it is repeated when the child has ended.
    #[error("the child run {0} is parked")]
    AwaitsChild(Uuid),
    /// The tool asks for input: the call is repeated with the answer.
    #[error("{} asks for input", .0.server)]
    AwaitsInput(Box<InputRequired>),
}

/// The outcome of a call that a crash interrupted, as its tool reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallOutcome {
    /// It took effect, and this is its result, or why that cannot be shown.
    Happened(Result<String, String>),
    /// It had no effect, and will have none.
    DidNotHappen,
    /// There is no answer, for this reason: a clause without secrets.
    Unknown(String),
}

impl CallOutcome {
    fn not_asked() -> Self {
        Self::Unknown("the tool cannot be asked".to_owned())
    }
}

/// Something that a model can call.
#[async_trait]
pub trait Tool: Send + Sync {
    /// What is known of it.
    fn info(&self) -> &ToolInfo;

    /// The errors in arguments that match the schema and that the tool would refuse in any case. May take
    /// long, so it belongs on the blocking pool.
    fn mistakes(&self, _arguments: &Value) -> Vec<ValidationError> {
        Vec::new()
    }

    /// The skill that a successful call with these arguments makes active.
    fn activates(&self, _arguments: &Value) -> Option<SkillActivated> {
        None
    }

    /// What it does, as its operator declared it; empty for what the service itself does.
    fn does(&self) -> String {
        String::new()
    }

    /// Whether nothing is declared of what it does, so that the worst is assumed.
    fn is_undeclared(&self) -> bool {
        false
    }

    /// How well the programs that it starts are confined; `None` for a tool that starts none.
    fn sandbox_level(&self) -> Option<SandboxLevel> {
        None
    }

    /// Whether these programs can be given network access.
    fn may_lead_out(&self) -> bool {
        true
    }

    /// Why all its calls currently fail; `None` if they need not.
    fn unavailable(&self) -> Option<String> {
        None
    }

    /// This replica does not drive a run any more: it has ended, another one drives it, or it is
    /// parked.
    fn release_run(&self, _run: Uuid, _is_parked: bool) {}

    /// The actions of a call with these arguments, which match the schema. May read files, but must not
    /// change anything.
    ///
    /// # Errors
    /// [`ToolError::ForModel`] where the arguments make no sense, e.g. a path that leaves the
    /// workspace.
    async fn actions(
        &self,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<Vec<Action>, ToolError>;

    /// Executes the call, and nothing that the permit does not cover. Returns the result for the model.
    /// Dropping the future stops the execution.
    ///
    /// # Errors
    /// See [`ToolError`].
    async fn execute(
        &self,
        permit: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError>;

    /// Whether the tool can be asked about the outcome of a call.
    fn can_reconcile(&self) -> bool {
        false
    }

    /// The actions of that query, which only read.
    ///
    /// # Errors
    /// As of [`Self::actions`].
    async fn reconcile_actions(
        &self,
        _arguments: &Value,
        _context: &ToolContext,
    ) -> Result<Vec<Action>, ToolError> {
        Ok(Vec::new())
    }

    /// Asks for the outcome of the call with these arguments, which a crash interrupted.
    ///
    /// # Errors
    /// Why it could not be asked.
    async fn reconcile(
        &self,
        _permit: Permit,
        _arguments: &Value,
        _context: &ToolContext,
    ) -> Result<CallOutcome, ToolError> {
        Ok(CallOutcome::not_asked())
    }
}
