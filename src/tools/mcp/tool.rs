//! A tool of a server, as agents have it.
//!
//! The effect of a call is as the operator declared it, or as the server states now if that is worse.
//! Whatever happens to the server, a call gets an answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use url::Url;

use super::answer::{self, Kind};
use super::elicitation::{self, Elicitation};
use super::era::{self, Era};
use super::link::Link;
use super::listing::Described;
use super::messages::{self, Failure};
use super::server::Server;
use crate::bounds::schema::{Fault, Schema};
use crate::event::{InputAnswer, InputRequired};
use crate::governance::{Action, ActionKind, Permit};
use crate::run::{Effect, SandboxLevel, Target};
use crate::tools::{Tool, ToolContext, ToolError, ToolInfo};

/// Faults of an answer that are reported.
const MAX_FAULTS: usize = 5;
/// How often a server may ask for input during one call.
const MAX_ROUNDS: u32 = 8;
/// How often it may ask for a repetition of the call without asking for input; the pauses double.
const MAX_REPEATS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A tool that its server has listed.
pub(super) struct McpTool {
    pub(super) described: Described,
    pub(super) server: Arc<Server>,
}

/// A placeholder for a tool that its server has not listed so far.
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

    fn is_undeclared(&self) -> bool {
        !self.server.effects().contains_key(&self.described.own_name)
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
        let (effect, destructive) = self.effect_now();
        Ok(actions_of(&self.described.info, effect, destructive, self.server.url()))
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let for_model = |why: String| ToolError::ForModel(why);
        let link = self.server.link().map_err(for_model)?;
        if context.input.is_some() && link.era() == Era::Old {
            let why = "it no longer speaks the protocol version in which it asked for input";
            return Err(self.incomplete(why));
        }
        let mut given = context.input.as_deref().cloned();
        let mut pause = FIRST_PAUSE;
        for repeats in 0.. {
            let result = self.send_call(&link, &arguments, given.as_ref(), context).await;
            let result = result.map_err(for_model)?;
            match answer::kind(&result) {
                Ok(Kind::Complete) => {
                    let text = answer::of(&result).map_err(for_model)?;
                    self.check(&result).map_err(for_model)?;
                    return Ok(text);
                }
                Ok(Kind::InputRequired) => {}
                Err(kind) => {
                    let why = format!(
                        "it answers with a result of the type {kind}, which is not supported"
                    );
                    return Err(self.incomplete(&why));
                }
            }
            let round = given.as_ref().map_or(0, |given| given.round);
            let asked =
                self.input_required(&link, &result, round).map_err(|why| self.incomplete(&why))?;
            if !asked.requests.is_empty() {
                return Err(ToolError::AwaitsInput(Box::new(asked)));
            }
            if repeats >= MAX_REPEATS {
                break;
            }
            // It asks for a repetition of the call.
            tokio::time::sleep(pause).await;
            if self.effect_now().0 != Effect::Read {
                context.standing.until_valid().await;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            given = Some(InputAnswer { round, ..asked.answered(BTreeMap::new()) });
        }
        Err(self.incomplete("it wants to be asked again and again"))
    }
}

impl McpTool {
    /// The effect of a call, and whether it is destructive: what was known first, or what the server states now
    /// if that is worse.
    fn effect_now(&self) -> (Effect, bool) {
        let own = &self.described.info;
        match self.server.listed(&own.name) {
            Some(now) => (own.effect.max(now.effect), own.destructive || now.destructive),
            None => (own.effect, own.destructive),
        }
    }

    /// The result of a call, or the error, for the model.
    async fn send_call(
        &self,
        link: &Link,
        arguments: &Value,
        given: Option<&InputAnswer>,
        context: &ToolContext,
    ) -> Result<Value, String> {
        let (key, trace) = (&context.effect_key, context.traceparent.as_deref());
        let params = messages::call(&self.described.own_name, arguments, key, trace, given);
        let name = self.server.name();
        match link.call(&self.described, params, &context.requests).await {
            Ok(result) => Ok(result),
            // It is unknown what it did before it asked for input.
            Err(failure) if given.is_none() && era::was_not_begun(&failure) => {
                Err(format!("The MCP server {name} did not execute the call: {failure}."))
            }
            Err(failure @ Failure::Refused(_)) => Err(format!(
                "The MCP server {name} did not complete the call: {failure}.{}",
                self.unknown()
            )),
            Err(failure) => {
                Err(format!("The MCP server {name} did not answer: {failure}.{}", self.unknown()))
            }
        }
    }

    /// What the server asks for, with the next round.
    fn input_required(
        &self,
        link: &Link,
        result: &Value,
        round: u32,
    ) -> Result<InputRequired, String> {
        if link.era() == Era::Old {
            return Err("it asks for input, which its protocol version does not support".into());
        }
        let Elicitation { forms: requests, state: request_state } =
            elicitation::read(result).map_err(|why| format!("it asks for input, and {why}"))?;
        if round >= MAX_ROUNDS {
            return Err(format!("it asks for input for more than {MAX_ROUNDS} times"));
        }
        let (server, round) = (self.server.name().to_owned(), round + 1);
        Ok(InputRequired { server, round, requests, request_state, requests_uncounted: 0 })
    }

    /// The failure of a call that the server has begun and does not complete.
    fn incomplete(&self, why: &str) -> ToolError {
        let name = self.server.name();
        ToolError::ForModel(format!(
            "The MCP server {name} did not complete the call: {why}.{}",
            self.unknown()
        ))
    }

    /// The note on a call whose effect is unknown.
    fn unknown(&self) -> &'static str {
        match self.effect_now().0 {
            Effect::Read => "",
            Effect::Idempotent | Effect::Once => " It is unknown whether the call took effect.",
        }
    }

    /// Checks an answer against the output schema that the server declares for this tool.
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
            let in_words = |Fault { pointer, message, .. }: Fault| match pointer.as_str() {
                "" => message,
                _ => format!("{pointer}: {message}"),
            };
            wrong(rejected.faults().into_iter().map(in_words).collect::<Vec<_>>().join("; "))
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

    /// The declared actions. If the server is up and does not list the tool, only a call that reads.
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
