//! `shell`: runs programs in the sandbox, by a command line that no shell ever sees.
//!
//! Before the gate judges the call, the line is parsed, every program is looked up on a fixed search path
//! and every path is resolved. Exactly what was judged is run. A command's exit code is part of the
//! result and not a failure. Programs can access the workspace as far as the permit's path rules allow. If
//! every command of the line is known to only read, no file can be changed.

mod patterns;
mod preparation;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::proxy::{self, Proxy};
use super::results::MAX_RESULT;
use super::sandbox::StartablePrograms;
use super::sandbox::reach::{self, ReachError};
use super::sandbox::{Job, JobResult, Sandbox, shortened};
use super::{Defaults, Tool, ToolContext, ToolError, ToolInfo, programs};
use crate::bounds::secrets::without_known_secrets;
use crate::event::NetworkUse;
use crate::fairness;
use crate::governance::{Action, ActionKind, CommandRules, Permit};
use crate::message::tool_schema::ToolSchema;
use crate::run::{Effect, SandboxLevel};
use preparation::PreparedLine;

/// The tool's name.
pub const NAME: &str = "shell";

const DESCRIPTION: &str = "Runs programs in your workspace: `command` is a line of simple commands, joined by pipes, \
    `&&`, `||` or `;`, with quotes and the redirections <, >, >>, 2>, 2>&1 and &>. The only patterns are \
    *, ? and [] in paths. It is not a shell: there are no variables, substitutions, loops, functions, \
    here-documents or background jobs. `cd DIR &&` may stand first. Only listed programs may run; ";
const ANSWERS: &str =
    "Returns exit_code, stdout, stderr and duration_ms; the middle of a long output is left out.";
const NO_NETWORK: &str = "there is no network.";
const NETWORK: &str = "they reach the network only by http and https, through the proxy that http_proxy and https_proxy \
    name, and only hosts that you are allowed to use.";
const NO_NETWORK_HERE: &str =
    "there is no network, because this machine cannot isolate a network for programs.";

const NO_NEW_FILES: &str = "Programs can create files only in directories that paths.write names as a whole (dir/**); elsewhere use a \
    redirection or file_ops.";

/// The tool, for one agent's rules.
#[derive(Clone)]
pub struct Shell {
    info: ToolInfo,
    sandbox: Arc<Sandbox>,
    proxy: Proxy,
    rules: Arc<CommandRules>,
}

impl Shell {
    /// The tool of an agent with these rules, which may let programs ask the network.
    pub fn new(
        sandbox: Arc<Sandbox>,
        proxy: Proxy,
        rules: Arc<CommandRules>,
        has_network: bool,
    ) -> Self {
        let input_schema = json!({
            "type": "object",
            "properties": {
                "command": {"type": "string", "minLength": 1, "description": "The command line."}
            },
            "required": ["command"],
            "additionalProperties": false
        });
        let kernel = sandbox.known_kernel();
        let level = kernel.map(|kernel| <&str>::from(kernel.level()));
        let level = level.map(|level| format!(" Sandbox: {level}.")).unwrap_or_default();
        let network = match kernel {
            _ if !has_network => NO_NETWORK,
            Some(kernel) if !kernel.confinement.network => NO_NETWORK_HERE,
            _ => NETWORK,
        };
        let info = ToolInfo {
            name: NAME.into(),
            description: format!("{DESCRIPTION}{network} {ANSWERS}{level}"),
            input_schema: ToolSchema::from(input_schema),
            effect: Effect::Once,
            varies: true,
            concurrent: false,
            source: "builtin".into(),
            destructive: true,
            defaults: Defaults::of_timeout(sandbox.settings().timeout),
        };
        Self { info, sandbox, proxy, rules }
    }

    async fn prepared(
        &self,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<PreparedLine, ToolError> {
        let line = arguments["command"].as_str().unwrap_or_default().to_owned();
        let (workspace, rules) = (context.workspace.clone(), Arc::clone(&self.rules));
        let path = self.sandbox.settings().path.clone();
        let prepare = move || preparation::prepare(&line, &workspace, &path, &rules);
        let prepared = fairness::on_files(prepare).await;
        prepared.map_err(|_| ToolError::ForModel("the command line cannot be read".into()))?
    }
}

#[async_trait]
impl Tool for Shell {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    fn sandbox_level(&self) -> Option<SandboxLevel> {
        self.sandbox.known_level()
    }

    fn unavailable(&self) -> Option<String> {
        self.sandbox.refusal()
    }

    async fn actions(
        &self,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<Vec<Action>, ToolError> {
        let egress = proxy::leads_out(&self.sandbox, context).await;
        Ok(leading(self.prepared(arguments, context).await?.actions, egress))
    }

    async fn execute(
        &self,
        permit: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let PreparedLine { steps, directory, actions, runs_others } =
            self.prepared(&arguments, context).await?;
        let leads_out = proxy::leads_out(&self.sandbox, context).await;
        let actions = leading(actions, leads_out);
        if actions != permit.actions() {
            let message = "files changed while the command was about to run; read them again";
            return Err(ToolError::ForModel(message.into()));
        }
        let listed: Vec<String> = actions.iter().filter_map(program_of).collect();
        let writes = actions.iter().any(|action| action.effect != Effect::Read);
        let by_glob = writes && permit.writable().by_glob;
        let has_mounts = self.sandbox.kernel().await.confinement.namespaces;
        let path = self.sandbox.settings().path.clone();
        let (root, rules) = (context.workspace.root(), permit.clone());
        let way_out = leads_out.then(|| self.proxy.way_out(&permit, context));
        let environment = if leads_out { self.proxy.variables(&permit) } else { Vec::new() };
        let reached = fairness::on_files(move || {
            let (mut reach, before) =
                reach::workspace(&permit, &root, writes, runs_others, has_mounts)?;
            let startable =
                if runs_others { StartablePrograms::All } else { StartablePrograms::Only(&listed) };
            reach.grants.extend(reach::system(&path, startable));
            reach.grants.extend(reach::certificates().filter(|_| leads_out));
            let handle: OwnedFd = root.as_fd().try_clone_to_owned()?;
            Ok::<_, ReachError>((reach, handle, before))
        });
        let (reach, handle, before) = reached
            .await
            .map_err(|_| ToolError::ForModel("the workspace could not be read".into()))?
            .map_err(|e| ToolError::ForModel(e.to_string()))?;
        let timeout = self.sandbox.settings().timeout;
        let job = Job {
            steps,
            directory,
            workspace: &handle,
            environment,
            input: None,
            reach,
            timeout,
            largest_file: None,
            max_stdout: Some(MAX_RESULT),
            way_out,
            each_line: None,
            held: None,
        };
        let ran = programs::run(&self.sandbox, job, context, rules, before).await?;
        let mut about = summary(&ran);
        if let Some(asked) = context.requests.totals() {
            let NetworkUse { requests, .. } = asked;
            let refused = context.requests.refusals();
            about["network"] = json!({"requests": requests, "refused": refused});
        } else if context.has_network && !leads_out {
            about["network"] = "unavailable".into();
        }
        if by_glob && is_refused_a_file(&ran) {
            about["note"] = NO_NEW_FILES.into();
        }
        Ok(with_streams(about, &ran))
    }
}

/// Whether the output of programs says that they may not create or change a file.
fn is_refused_a_file(ran: &JobResult) -> bool {
    let says = |what: &str| ran.stderr.text.contains(what);
    ran.exit_code != Some(0) && (says("Read-only file system") || says("Permission denied"))
}

/// Programs with network access send bytes.
fn leading(mut actions: Vec<Action>, egress: bool) -> Vec<Action> {
    for action in &mut actions {
        action.egress = egress && matches!(action.what, ActionKind::Exec { .. });
    }
    actions
}

fn program_of(action: &Action) -> Option<String> {
    match &action.what {
        ActionKind::Exec { argv, .. } => argv.first().cloned(),
        _ => None,
    }
}

/// How programs ended, without what they wrote.
fn summary(ran: &JobResult) -> Value {
    let mut result = json!({
        "exit_code": ran.exit_code,
        "stdout": "",
        "stderr": "",
        "duration_ms": u64::try_from(ran.duration.as_millis()).unwrap_or(u64::MAX),
        "sandbox": ran.level,
    });
    if let Some(stopped) = ran.stopped {
        result["stopped"] = json!(stopped);
    }
    result
}

/// The result as JSON text with both streams, shortened so that the text itself is not.
fn with_streams(mut about: Value, ran: &JobResult) -> String {
    let room = MAX_RESULT.saturating_sub(about.to_string().len());
    let streams = [("stdout", &ran.stdout), ("stderr", &ran.stderr)].map(|(name, output)| {
        let (head, tail) = output.ends();
        let ends = [head, tail].map(|end| without_known_secrets(end).into_owned());
        let whole = shortened((&ends[0], &ends[1]), output.omitted, usize::MAX, json_size);
        (name, ends, output.omitted, whole.chars().map(json_size).sum::<usize>())
    });
    let [(.., out), (.., err)] = &streams;
    // What one stream does not need is available to the other.
    let rooms = [room.saturating_sub(*err).max(room / 2), room.saturating_sub(*out).max(room / 2)];
    for ((name, [head, tail], omitted, _), room) in streams.into_iter().zip(rooms) {
        about[name] = shortened((&head, &tail), omitted, room, json_size).into();
    }
    about.to_string()
}

/// Bytes that a character takes in JSON text.
fn json_size(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        other => other.len_utf8(),
    }
}

#[cfg(test)]
#[path = "shell_tests.rs"]
mod tests;
