//! A tool of a server, as agents have it.
//!
//! What a call does is as the operator declared it, or as the server says now where that is worse.
//! Whatever becomes of the server, a call has an answer.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use url::Url;

use super::answer;
use super::listing::Described;
use super::messages::{self, Failure};
use super::server::Server;
use crate::bounds::schema::{Fault, Schema};
use crate::governance::{Action, ActionKind, Permit};
use crate::run::{Effect, SandboxLevel, Target};
use crate::tools::{Tool, ToolContext, ToolError, ToolInfo};

/// Faults of an answer that are told.
const MAX_FAULTS: usize = 5;

/// A tool that its server has listed.
pub(super) struct McpTool {
    pub(super) described: Described,
    pub(super) server: Arc<Server>,
}

/// What stands for a tool that its server has not listed so far.
pub(super) struct Missing {
    pub(super) info: ToolInfo,
    pub(super) server: Arc<Server>,
}

/// What a call does, for the gate.
fn actions_of(
    info: &ToolInfo,
    effect: Effect,
    destructive: bool,
    url: Option<&Url>,
) -> Vec<Action> {
    let call = Action {
        destructive,
        egress: true,
        ..Action::new(ActionKind::Call { tool: info.name.clone() }, effect)
    };
    let fetch = url.map(|url| Action {
        egress: true,
        ..Action::new(ActionKind::Fetch(Target::of(url, true)), effect)
    });
    std::iter::once(call).chain(fetch).collect()
}

#[async_trait]
impl Tool for McpTool {
    fn info(&self) -> &ToolInfo {
        &self.described.info
    }

    fn does(&self) -> String {
        self.server.does()
    }

    fn sandbox_level(&self) -> Option<SandboxLevel> {
        self.server.sandbox_level()
    }

    fn may_lead_out(&self) -> bool {
        self.server.leads_out()
    }

    fn unavailable(&self) -> Option<String> {
        self.server.fault()
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let own = &self.described.info;
        let (effect, destructive) = match self.server.listed(&own.name) {
            Some(now) => (own.effect.max(now.effect), own.destructive || now.destructive),
            None => (own.effect, own.destructive),
        };
        Ok(actions_of(own, effect, destructive, self.server.url()))
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let name = self.server.name();
        let told = |why: String| ToolError::ForModel(why);
        let link = self.server.link().map_err(told)?;
        let (key, trace) = (&context.effect_key, context.traceparent.as_deref());
        let params = messages::call(&self.described.own_name, &arguments, key, trace);
        let result = match link.ask("tools/call", params, &context.requests).await {
            Ok(result) => result,
            Err(failure @ (Failure::NotSent(_) | Failure::Refused(_))) => {
                return Err(told(format!("The MCP server {name} did not do it: {failure}.")));
            }
            Err(failure) if self.described.info.effect == Effect::Read => {
                return Err(told(format!("The MCP server {name} did not answer: {failure}.")));
            }
            Err(failure) => {
                return Err(told(format!(
                    "The MCP server {name} did not answer: {failure}. It is unknown whether the call took effect."
                )));
            }
        };
        let text = answer::of(&result).map_err(ToolError::ForModel)?;
        self.check(&result).map_err(told)?;
        Ok(text)
    }
}

impl McpTool {
    /// Whether an answer is what the server itself says that this tool answers.
    fn check(&self, result: &Value) -> Result<(), String> {
        let Some(schema) = &self.described.output_schema else { return Ok(()) };
        let name = self.server.name();
        let wrong = |what: String| {
            format!(
                "The MCP server {name} answered, but not as the output schema of its tool says: {what}. \
                 What it was asked for may have been done."
            )
        };
        let Some(structured) = result.get("structuredContent") else {
            return Err(wrong("it has no structuredContent".to_owned()));
        };
        let schema = Schema::of_tool(schema).map_err(|refused| wrong(refused.0))?;
        schema.check(structured, MAX_FAULTS).map_err(|rejected| {
            let told = |Fault { pointer, message, .. }: Fault| match pointer.as_str() {
                "" => message,
                _ => format!("{pointer}: {message}"),
            };
            wrong(rejected.faults().into_iter().map(told).collect::<Vec<_>>().join("; "))
        })
    }
}

#[async_trait]
impl Tool for Missing {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    fn does(&self) -> String {
        self.server.does()
    }

    fn sandbox_level(&self) -> Option<SandboxLevel> {
        self.server.sandbox_level()
    }

    fn may_lead_out(&self) -> bool {
        self.server.leads_out()
    }

    fn unavailable(&self) -> Option<String> {
        Some(self.why())
    }

    /// What it would do, as far as that is declared; nothing, where it is known that it is not there.
    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let ToolInfo { name, effect, destructive, .. } = &self.info;
        if self.server.is_started() {
            let nothing = ActionKind::Call { tool: name.clone() };
            return Ok(vec![Action::new(nothing, Effect::Read)]);
        }
        Ok(actions_of(&self.info, *effect, *destructive, self.server.url()))
    }

    async fn execute(&self, _: Permit, _: Value, _: &ToolContext) -> Result<String, ToolError> {
        Err(ToolError::ForModel(self.why()))
    }
}

impl Missing {
    fn why(&self) -> String {
        let name = self.server.name();
        self.server.fault().unwrap_or_else(|| {
            let this = &self.info.name;
            if self.server.listed(this).is_some() {
                return format!("The MCP server {name} was not there when this run began; {this} can be used by later runs.");
            }
            format!("The MCP server {name} has no tool {this}.")
        })
    }
}
