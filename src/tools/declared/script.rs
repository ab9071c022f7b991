//! A tool that is a program of the operator's, run in the sandbox like those of `shell`.
//!
//! It gets the arguments as JSON on its standard input and answers on its standard output. It starts in
//! the directory of its file, which it can read and not change. In the workspace it can reach what the
//! agent's path rules permit, and change nothing if its effect is `read`. Its output is processed by
//! `script_output`.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;

use super::file::Entry;
use super::outcome;
use super::reconcile::ReconcileSection;
use super::script_output::{AnswerReader, ProgressReporter};
use super::{Dependencies, Environment, Place, Wrong};
use crate::bounds::json;
use crate::bounds::schema::Schema;
use crate::bounds::secrets;
use crate::bounds::text::quoted;
use crate::fairness;
use crate::governance::{Action, ActionKind, Permit};
use crate::message::tool_schema::ToolSchema;
use crate::run::{Effect, SandboxLevel};
use crate::tools::guarded_work::MAY_HAVE_EFFECT;
use crate::tools::large_contents::{self, Turn};
use crate::tools::proxy::{self, Proxy};
use crate::tools::sandbox::StartablePrograms;
use crate::tools::sandbox::plan::{Access, Command, Grant, GrantKind, Reach, Step, When};
use crate::tools::sandbox::reach::{self, Before};
use crate::tools::sandbox::{Job, JobResult, Sandbox};
use crate::tools::{
    CallOutcome, Defaults, GRACE, Tool, ToolContext, ToolError, ToolInfo, programs,
};

/// Words of a command, and bytes of all of them.
const MAX_WORDS: usize = 64;
const MAX_COMMAND: usize = 8 * 1024;
/// Names of variables.
const MAX_VARIABLES: usize = 64;
/// Seconds that a call may be given.
const TIMEOUTS: std::ops::RangeInclusive<u64> = 1..=86_400;
/// The beginning of the variables by which the service itself is configured.
const OWN: &str = "TOOLLOOP_";
/// Programs whose first argument is the file that they run.
const INTERPRETERS: [&str; 9] =
    ["python", "python3", "node", "sh", "bash", "dash", "perl", "ruby", "deno"];

/// Why a file cannot be named.
const NOT_UTF8: &str = "has a path that is not UTF-8";

/// The files that the program can reach.
struct ReachableFiles {
    reach: Reach,
    /// The workspace, open, and its path.
    handle: OwnedFd,
    workspace: String,
    /// The content of the workspace, if the program may change it.
    before: Option<Before>,
}

/// A program of the tool's.
struct Program {
    /// Absolute.
    path: String,
    /// As they are written, the program's name first.
    arguments: Vec<String>,
    /// What running it does.
    effect: Effect,
}

/// The tool.
pub(super) struct ScriptTool {
    info: ToolInfo,
    does: String,
    program: Program,
    /// The program that is asked about an interrupted call.
    query: Option<Program>,
    /// Absolute, links followed.
    directory: String,
    answers: AnswerReader,
    timeout: Option<Duration>,
    variables: Vec<(String, String)>,
    sandbox: Arc<Sandbox>,
    proxy: Proxy,
}

impl ScriptTool {
    pub(super) fn new(
        place: &Place<'_>,
        entry: Entry,
        Dependencies { environment, proxy, sandbox, .. }: Dependencies<'_>,
    ) -> Result<Self, Wrong> {
        let declared = entry.does();
        let directory = fs::canonicalize(place.dir)
            .map_err(|e| Wrong::at("command", format!("its directory cannot be read: {e}")))?;
        let program = |key, words: &[String], effect| {
            let path = &sandbox.settings().path;
            Program::found(words, &directory, path, effect).map_err(|why| Wrong::at(key, why))
        };
        let query = match &entry.reconcile {
            Some(ReconcileSection::Command(words)) => {
                Some(program("reconcile", words, Effect::Read)?)
            }
            _ => None,
        };
        let program =
            program("command", entry.command.as_deref().unwrap_or_default(), entry.effect)?;
        let variables = variables(&entry.env, environment)?;
        let timeout = entry.timeout_seconds.map(|seconds| {
            if TIMEOUTS.contains(&seconds) {
                return Ok(Duration::from_secs(seconds));
            }
            let (least, most) = TIMEOUTS.into_inner();
            Err(Wrong::at(
                "timeout_seconds",
                format!("{seconds} is not between {least} and {most}"),
            ))
        });
        let timeout = timeout.transpose()?;
        let longest = Defaults::of_timeout(sandbox.settings().timeout).timeout;
        let defaults = entry.defaults(timeout.map_or(longest, |timeout| Some(timeout + GRACE)));
        let output = entry.output_schema.as_ref().map(Schema::of_tool).transpose();
        let output = output.map_err(|refused| Wrong::at("output_schema", refused.0))?;
        let info = ToolInfo {
            name: format!("script:{}/{}", place.set, entry.name),
            description: entry.description,
            input_schema: ToolSchema::from(entry.input_schema),
            effect: entry.effect,
            varies: false,
            concurrent: false,
            source: format!("script:{}", place.set),
            destructive: entry.destructive,
            defaults,
        };
        let does = format!("{} {declared}", program.path);
        let odd = || Wrong::at("command", NOT_UTF8);
        let secret = programs::secrets_among(&variables);
        secrets::remember(secret.clone());
        Ok(Self {
            info,
            does,
            program,
            query,
            directory: directory.into_os_string().into_string().map_err(|_| odd())?,
            answers: AnswerReader::new(output, secret),
            timeout,
            variables,
            sandbox: Arc::clone(sandbox),
            proxy: proxy.clone(),
        })
    }

    async fn reached(
        &self,
        program: &Program,
        permit: Permit,
        context: &ToolContext,
        leads_out: bool,
    ) -> Result<ReachableFiles, ToolError> {
        let has_mounts = self.sandbox.kernel().await.confinement.namespaces;
        let writes = program.effect != Effect::Read;
        let path = self.sandbox.settings().path.clone();
        let root = context.workspace.root();
        let own = [(&self.directory, GrantKind::Tree), (&program.path, GrantKind::File)];
        let own = own.map(|(path, kind)| Grant { path: path.clone(), access: Access::RUN, kind });
        let looked = fairness::on_files(move || {
            let in_words = |e: &dyn std::error::Error| e.to_string();
            let (mut reach, before) = reach::workspace(&permit, &root, writes, false, has_mounts)
                .map_err(|e| in_words(&e))?;
            reach.grants.extend(reach::system(&path, StartablePrograms::System));
            reach.grants.extend(reach::certificates().filter(|_| leads_out));
            reach.grants.extend(own);
            let handle = root.as_fd().try_clone_to_owned().map_err(|e| in_words(&e))?;
            let real = format!("/proc/self/fd/{}", handle.as_raw_fd());
            let real = fs::read_link(real).map_err(|e| in_words(&e))?;
            let real = real.into_os_string().into_string();
            let workspace = real.map_err(|_| "its path is not UTF-8".to_owned())?;
            Ok(ReachableFiles { reach, handle, workspace, before })
        });
        let unreadable = |why: &str| {
            ToolError::ForModel(format!("the workspace cannot be given to a program: {why}"))
        };
        let reached = looked
            .await
            .map_err(|_| unreadable("the service failed"))?
            .map_err(|e: String| unreadable(&e))?;
        let (tools, files) = (Path::new(&self.directory), Path::new(&reached.workspace));
        if tools.starts_with(files) || files.starts_with(tools) {
            let message = "this tool's directory and the workspace lie in one another, so the program does not run; \
                           this is for the operator to change";
            return Err(ToolError::ForModel(message.into()));
        }
        Ok(reached)
    }

    /// The action of running one of its programs.
    async fn actions_of(&self, program: &Program, context: &ToolContext) -> Vec<Action> {
        let what = ActionKind::Exec { argv: program.argv(), declared: true };
        let destructive = self.info.destructive && program.effect != Effect::Read;
        let egress = proxy::leads_out(&self.sandbox, context).await;
        vec![Action { destructive, egress, ..Action::new(what, program.effect) }]
    }

    fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(self.sandbox.settings().timeout)
    }

    /// Runs one of its programs, which reads the input.
    async fn run(
        &self,
        program: &Program,
        input: String,
        permit: Permit,
        context: &ToolContext,
    ) -> Result<JobResult, ToolError> {
        let leads_out = proxy::leads_out(&self.sandbox, context).await;
        let way_out = leads_out.then(|| self.proxy.way_out(&permit, context));
        let of_proxy = if leads_out { self.proxy.variables(&permit) } else { Vec::new() };
        let rules = permit.clone();
        let ReachableFiles { reach, handle, workspace, before } =
            self.reached(program, permit, context, leads_out).await?;
        let of_call = [
            ("TOOLLOOP_RUN_ID", context.run_id.to_string()),
            ("TOOLLOOP_EFFECT_KEY", context.effect_key.clone()),
            ("TOOLLOOP_WORKSPACE", workspace),
        ];
        let of_call = of_call.map(|(name, value)| (name.to_owned(), value));
        let command = Command {
            program: program.path.clone(),
            arguments: program.arguments.clone(),
            environment: Vec::new(),
            redirections: Vec::new(),
            is_read_only: false, // nothing is to be written where its effect is `read`
        };
        let mut progress = ProgressReporter::new(context, &self.info.name);
        let mut each_line = |line: &str| progress.is_output(line);
        let job = Job {
            steps: vec![Step { when: When::Always, negated: false, commands: vec![command] }],
            directory: self.directory.clone(),
            workspace: &handle,
            environment: of_call
                .into_iter()
                .chain(of_proxy)
                .chain(self.variables.iter().cloned())
                .collect(),
            input: Some(input),
            reach,
            timeout: self.timeout(),
            largest_file: None,
            max_stdout: None,
            way_out,
            each_line: Some(&mut each_line),
            held: None,
        };
        let ran = programs::run(&self.sandbox, job, context, rules, before).await?;
        self.answers.log(&ran, context, &self.info.name);
        Ok(ran)
    }
}

impl Program {
    /// The program of a command.
    fn found(
        words: &[String],
        directory: &Path,
        path: &[PathBuf],
        effect: Effect,
    ) -> Result<Self, String> {
        check_words(words)?;
        let found = programs::found(&words[0], directory, path)?;
        check_file(words, directory)?;
        let path = found.into_os_string().into_string().map_err(|_| NOT_UTF8.to_owned())?;
        Ok(Self { path, arguments: words.to_vec(), effect })
    }

    /// Its file, and its arguments.
    fn argv(&self) -> Vec<String> {
        let arguments = self.arguments.iter().skip(1).cloned();
        std::iter::once(self.path.clone()).chain(arguments).collect()
    }
}

#[async_trait]
impl Tool for ScriptTool {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    fn does(&self) -> String {
        self.does.clone()
    }

    fn sandbox_level(&self) -> Option<SandboxLevel> {
        self.sandbox.known_level()
    }

    fn unavailable(&self) -> Option<String> {
        self.sandbox.refusal()
    }

    async fn actions(&self, _: &Value, context: &ToolContext) -> Result<Vec<Action>, ToolError> {
        Ok(self.actions_of(&self.program, context).await)
    }

    async fn execute(
        &self,
        permit: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let ran = self.run(&self.program, arguments.to_string(), permit, context).await?;
        let _turn = answer_turn(&ran).await;
        let unanswered = context.requests.refusals();
        self.answers.of(&ran, self.timeout()).map_err(|mut message| {
            if ran.stopped.is_some() && self.info.effect != Effect::Read {
                message = format!("{message}\n{MAY_HAVE_EFFECT}");
            }
            if !unanswered.is_empty() {
                message = format!("{message}\nIts requests met: {}.", unanswered.join("; "));
            }
            ToolError::ForModel(message)
        })
    }

    fn can_reconcile(&self) -> bool {
        self.query.is_some()
    }

    async fn reconcile_actions(
        &self,
        _: &Value,
        context: &ToolContext,
    ) -> Result<Vec<Action>, ToolError> {
        match &self.query {
            Some(query) => Ok(self.actions_of(query, context).await),
            None => Ok(Vec::new()),
        }
    }

    async fn reconcile(
        &self,
        permit: Permit,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<CallOutcome, ToolError> {
        let Some(query) = &self.query else { return Ok(CallOutcome::not_asked()) };
        let question = outcome::question(arguments, context);
        let ran = self.run(query, question, permit, context).await?;
        let _turn = answer_turn(&ran).await;
        Ok(self.answers.of_query(&ran, self.timeout()))
    }
}

/// Waits until the answer may be in memory as a value.
async fn answer_turn(ran: &JobResult) -> Option<Turn> {
    let bytes = ran.stdout.text.len() * json::IN_MEMORY;
    large_contents::turn(bytes as u64).await
}

fn check_words(words: &[String]) -> Result<(), String> {
    let size: usize = words.iter().map(String::len).sum();
    if words.len() > MAX_WORDS || size > MAX_COMMAND {
        return Err(format!("has more than {MAX_WORDS} words or {MAX_COMMAND} bytes"));
    }
    if words.first().is_none_or(String::is_empty) || words.iter().any(|word| word.contains('\0')) {
        let message = "is a list of a program and its arguments, e.g. [python3, count.py]";
        return Err(message.to_owned());
    }
    Ok(())
}

/// An interpreter without the file that it is to run fails in every call.
fn check_file(words: &[String], directory: &Path) -> Result<(), String> {
    let name = words[0].rsplit('/').next().unwrap_or_default();
    let file = words.get(1).filter(|file| !file.starts_with('-'));
    match file.filter(|_| INTERPRETERS.contains(&name)) {
        Some(file) if !directory.join(file).is_file() => {
            Err(format!("there is no file {}", quoted(file)))
        }
        _ => Ok(()),
    }
}

/// The variables that are set, with their values.
fn variables(
    names: &[String],
    environment: Environment<'_>,
) -> Result<Vec<(String, String)>, Wrong> {
    if names.len() > MAX_VARIABLES {
        return Err(Wrong::at("env", format!("has more than {MAX_VARIABLES} names")));
    }
    let is_name = |name: &String| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    for (i, name) in names.iter().enumerate() {
        if !is_name(name) {
            let message = format!("{} is not the name of an environment variable", quoted(name));
            return Err(Wrong::at(format!("env[{i}]"), message));
        }
        if name.starts_with(OWN) {
            let message = format!("{name} is the service's own; no program sees it");
            return Err(Wrong::at(format!("env[{i}]"), message));
        }
    }
    Ok(names.iter().filter_map(|name| Some((name.clone(), environment(name)?))).collect())
}
