//! What a run executes: a definition narrowed by a request.
//!
//! A plan is a function of stored data only, without I/O, so that recovery makes the same plan. A request
//! can only lower numbers and remove tools. [`Rules`] is the part that the state machine needs.

mod contract;
mod given_call;
mod models;
mod narrowing;
mod rules;
mod tools;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

pub use self::contract::Contract;
use self::contract::{contract, tool_choice};
use self::given_call::only_given_call;
use self::models::check_selected_model;
use self::narrowing::{
    CapsOfTree, delegation_seconds, narrowed_budget, narrowed_limits, not_widened,
};
pub use self::rules::{Rules, Window};
use self::tools::{about_tools, check_tool_names, client_tools, degraded, tools_of_run};
use super::answer_call::AnswerCall;
use super::client_tools::ClientTools;
use super::requirements::{self, Requirements};
use crate::agents::Agent;
use crate::agents::definition::DriverKind;
use crate::agents::prompt::{self, ActiveSkill, Background, Opening, PromptError, Terms};
use crate::event::{SkillActivated, ValidationError};
use crate::providers::router::Router;
use crate::providers::{ToolOffer, WireNames, estimate};
use crate::run::{Delegation, OnLimit, Overrides, RunKind, Sampling, Thinking, ToolChoicePolicy};
use crate::tools::executor::Executor;
use crate::tools::mcp::Unlisted;
use crate::tools::use_skill;

/// Everything about a run that does not change while it runs.
#[derive(Debug)]
pub struct Plan {
    /// The definition, compiled.
    pub agent: Arc<Agent>,
    /// The model, as `provider/model`, then its fallback models.
    pub models: Vec<String>,
    /// Sampling parameters of the models.
    pub sampling: Sampling,
    /// The call that only writes the final answer, if it has models or options of its own.
    pub answer: Option<AnswerCall>,
    /// Whether and how much the model thinks.
    pub thinking: Option<Thinking>,
    /// Sent to the provider as it is.
    pub parallel_tool_calls: Option<bool>,
    /// What the model is offered at the start: the agent's tools, then the output tool.
    pub offers: Vec<ToolOffer>,
    /// The run's other tools, which the skills that are active from the start remove. They are not offered,
    /// and the gate blocks their calls.
    withheld: BTreeSet<String>,
    /// The names of all tools in requests to the provider.
    pub names: WireNames,
    /// The rules of the loop.
    pub rules: Rules,
    /// The skills that are active from the start. A resumed run knows only their restrictions.
    pub active: Vec<ActiveSkill>,
    /// Seconds that any tool call may take, if the request limits them.
    pub longest_call_seconds: Option<u64>,
    /// Whether later runs may recall what happens in this one.
    pub is_observed: bool,
    /// The tools that the caller executes.
    pub client_tools: ClientTools,
    /// Warnings for the caller.
    pub warnings: Vec<String>,
}

/// A setting of the request that is invalid or cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.message)]
pub struct PlanError(pub ValidationError);

impl Plan {
    /// Narrows a definition. `executor` has the tools that the definition names, in its order;
    /// `active` are the skills that are active from the start.
    ///
    /// # Errors
    /// [`PlanError`] with a pointer into the request for a value out of range or a combination that
    /// could never end.
    pub fn new(
        agent: Arc<Agent>,
        executor: &Executor,
        overrides: &Overrides,
        kind: RunKind,
        active: Vec<ActiveSkill>,
    ) -> Result<Self, PlanError> {
        let definition = &agent.definition;
        let single = kind == RunKind::Single;
        let wanted = overrides.tools.as_deref();
        check_tool_names(overrides)?;
        check_selected_model(overrides, definition)?;
        let parallel_tool_calls = overrides.parallel_tool_calls.or(definition.parallel_tool_calls);
        let infos = || executor.infos();
        let concurrent = infos().filter(|tool| {
            let narrows_others = tool.name == use_skill::NAME;
            parallel_tool_calls == Some(true) && tool.may_be_concurrent() && !narrows_others
        });
        let bounds: Vec<SkillActivated> = active.iter().map(|skill| skill.bounds.clone()).collect();
        let mut warnings = about_tools(wanted.unwrap_or_default(), executor);
        let client_tools = client_tools(overrides, executor, definition)?;
        let tools = tools_of_run(executor, overrides, definition, kind, &bounds);
        let (mut offers, withheld): (Vec<_>, Vec<_>) =
            tools.into_iter().partition(|tool| use_skill::leaves(&bounds, &tool.name));
        let given = only_given_call(kind, overrides, &mut offers)?;
        let contract = contract(definition, overrides, kind, &mut offers);
        let single_shot = single || offers.is_empty();
        if single_shot && !single {
            warnings.push(degraded(executor));
        }
        let tool_choice =
            tool_choice(overrides, &definition.tool_choice, &contract, &offers, kind, single_shot)?;
        warnings.extend(not_widened(definition, infos(), overrides));
        let budget = narrowed_budget(definition.governance.budget.clone(), overrides)?;
        let first = overrides.model.as_ref().unwrap_or(&definition.model);
        let models = definition.models_from(first);
        let sampling = sampling(&definition.sampling, overrides)?;
        let is_react = definition.driver == DriverKind::React && !single_shot && given.is_none();
        Ok(Self {
            answer: AnswerCall::of(&definition.react, &models, &sampling).filter(|_| is_react),
            models,
            sampling,
            thinking: definition.thinking,
            parallel_tool_calls,
            longest_call_seconds: overrides.tool_call_timeout_seconds,
            names: WireNames::new(offers.iter().chain(&withheld).map(|tool| tool.name.as_str()))
                .beginning(executor.unlisted().iter().map(Unlisted::beginning)),
            rules: Rules {
                single_shot,
                contract,
                tool_choice,
                strict_tool_choice: definition.strict_tool_choice
                    || overrides.strict_tool_choice == Some(true),
                react: is_react.then(|| definition.react.clone()),
                limits: narrowed_limits(definition.limits, overrides)?,
                budget,
                caps_of_tree: CapsOfTree::default(),
                max_network_requests: definition.governance.network.max_requests,
                on_limit: match given {
                    Some(_) => OnLimit::Fail,
                    None => overrides.on_limit.unwrap_or(definition.on_limit),
                },
                max_crashes: u32::MAX,
                throw_on_tool_failure: definition.throw_on_tool_failure
                    || overrides.throw_on_tool_failure == Some(true),
                stop_on_tool_block: definition.stop_on_tool_block
                    || overrides.stop_on_tool_block == Some(true),
                concurrent: concurrent.map(|tool| tool.name.clone()).collect(),
                cached: executor.cached().map(str::to_owned).collect(),
                has_tools_of_its_own: offers.iter().any(|offer| {
                    !matches!(Delegation::of_tool(&offer.name), Some(Delegation::Handoff(_)))
                }),
                client_tools: client_tools.names().map(str::to_owned).collect(),
                price: None,
                offered_tokens: 0,
                windows: Vec::new(),
                given,
            },
            is_observed: definition.memory.is_some() && overrides.private != Some(true),
            client_tools,
            warnings,
            offers,
            withheld: withheld.into_iter().map(|tool| tool.name).collect(),
            active,
            agent,
        })
    }

    /// Adds the prices and context windows of the models.
    #[must_use]
    pub fn informed(mut self, router: &Router) -> Self {
        let has_cost = self.rules.budget.max_cost_usd.is_some();
        let of_answer = self.answer.iter().flat_map(|answer| &answer.models);
        let others = of_answer.filter(|model| !self.models.contains(model));
        let models: Vec<&String> = self.models.iter().chain(others).collect();
        if has_cost {
            let prices = models.iter().map(|model| router.resolve(model).ok()?.price);
            self.rules.price = prices.reduce(|a, b| Some(a?.dearest(b?))).flatten();
        }
        let tokens = |model: &str| router.resolve(model).ok()?.capabilities.context_window;
        let windows =
            models.into_iter().map(|model| Window { model: model.clone(), tokens: tokens(model) });
        self.rules.windows = windows.collect();
        if has_cost
            || self.rules.budget.max_total_tokens.is_some()
            || self.rules.windows.iter().any(|window| window.tokens.is_some())
        {
            self.rules.offered_tokens = estimate::of_tools(&self.offers);
        }
        self
    }

    /// The models of a call and their sampling parameters. `writes_answer`: the call only writes the final
    /// answer.
    pub fn models_and_sampling(&self, writes_answer: bool) -> (&[String], &Sampling) {
        match self.answer.as_ref().filter(|_| writes_answer) {
            Some(answer) => (&answer.models, &answer.sampling),
            None => (&self.models, &self.sampling),
        }
    }

    /// Checks that the models meet the requirements of the run.
    ///
    /// # Errors
    /// [`PlanError`] with a pointer into the request.
    pub fn check_models(&self, router: &Router) -> Result<(), PlanError> {
        let demands = Requirements {
            models: &self.models,
            sampling: &self.sampling,
            thinking: self.thinking,
            tool_choice: &self.rules.tool_choice,
            // The driver enforces it on decisions, whatever the models support.
            strict_tool_choice: self.rules.strict_tool_choice && self.rules.react.is_none(),
            needs_price: requirements::needs_price(&self.rules.budget),
            // Decisions are asked for without any.
            tools: if self.rules.react.is_none() { self.offers.len() } else { 0 },
            writes_answer: false,
        };
        let of_answer = self.answer.as_ref().map(|answer| Requirements {
            models: &answer.models,
            sampling: &answer.sampling,
            tool_choice: &ToolChoicePolicy::Auto,
            tools: 0,
            writes_answer: true,
            ..demands
        });
        let met = requirements::check(demands, router);
        let met = met.and_then(|()| of_answer.map_or(Ok(()), |it| requirements::check(it, router)));
        met.map_err(|unsupported| match &*unsupported.setting {
            "max_cost_usd" => refused("/budget/max_cost_usd", unsupported.reason),
            "strict_tool_choice" => refused("/strict_tool_choice", unsupported.reason),
            "tools" if self.client_tools.is_empty() => refused("/tools", unsupported.reason),
            "tools" => refused("/client_tools", unsupported.reason),
            "sampling.top_p"
                if self.sampling.temperature != self.agent.definition.sampling.temperature =>
            {
                refused("/temperature", unsupported.reason)
            }
            _ => refused("/model", unsupported.reason),
        })
    }

    /// Checks that each model has a price, as a budget in dollars or a stop condition, of the run or of an ancestor,
    /// requires.
    ///
    /// # Errors
    /// [`PlanError`] for a model without one.
    pub fn check_prices(&self, router: &Router) -> Result<(), PlanError> {
        let of_answer = self.answer.iter().flat_map(|answer| &answer.models);
        let mut models = self.models.iter().chain(of_answer);
        let has_none =
            |model: &&String| !router.resolve(model).is_ok_and(|route| route.price.is_some());
        match models.find(has_none) {
            Some(model) => Err(refused("/model", requirements::without_price(model))),
            None => Ok(()),
        }
    }

    /// The opening of the conversation.
    ///
    /// # Errors
    /// [`PromptError`] where a template cannot be rendered with these inputs.
    pub fn opening(&self, inputs: &Value, background: &Background) -> Result<Opening, PromptError> {
        let Rules { single_shot, limits, budget, .. } = &self.rules;
        let terms = Terms {
            single_shot: *single_shot,
            has_tools: self.tools().next().is_some(),
            limits,
            budget,
        };
        prompt::opening(&self.agent, inputs, &terms, background)
    }

    /// Seconds that a call may take that delegates to another agent: the duration of the run, unless the
    /// agent limits its calls.
    pub fn delegation_seconds(&self) -> u64 {
        delegation_seconds(&self.rules.limits, &self.rules.budget)
    }

    /// What the model is offered while these skills are active.
    pub fn offered(&self, skills: &[SkillActivated]) -> Cow<'_, [ToolOffer]> {
        let is_offered = |tool: &&ToolOffer| self.rules.offer(&tool.name, skills);
        if self.offers.iter().all(|offer| is_offered(&offer)) {
            Cow::Borrowed(&self.offers)
        } else {
            Cow::Owned(self.offers.iter().filter(is_offered).cloned().collect())
        }
    }

    /// The names of the run's tools. Skills may remove some of them; their calls are blocked.
    pub fn callable(&self) -> BTreeSet<String> {
        self.tools().map(str::to_owned).chain(self.withheld.iter().cloned()).collect()
    }

    /// The tools that are offered at the start, without those that end an attempt.
    pub fn tools(&self) -> impl Iterator<Item = &str> {
        let names = self.offers.iter().map(|offer| offer.name.as_str());
        names.filter(|name| !self.rules.contract.is_met_by(name))
    }

    /// The schema of a single shot's answer, for providers that can enforce one.
    pub fn single_shot_schema(&self) -> Option<&Value> {
        let output = self.agent.definition.output.as_ref().filter(|_| self.rules.single_shot)?;
        Some(&output.schema)
    }

    /// Our name of the output tool, where the contract has one.
    pub fn output_tool(&self) -> Option<&str> {
        match &self.rules.contract {
            Contract::Structured { tool, .. } => Some(tool),
            Contract::Text { .. } => None,
        }
    }

    /// Our name of the submit tool, where the contract has one.
    pub fn submit_tool(&self) -> Option<&str> {
        match &self.rules.contract {
            Contract::Structured { submit, .. } => submit.as_deref(),
            Contract::Text { .. } => None,
        }
    }
}

fn refused(pointer: &str, message: impl Into<String>) -> PlanError {
    PlanError(ValidationError { pointer: pointer.to_owned(), message: message.into() })
}

fn sampling(defined: &Sampling, overrides: &Overrides) -> Result<Sampling, PlanError> {
    let temperature = overrides.temperature.or(defined.temperature);
    if temperature.is_some_and(|t| !(0.0..=2.0).contains(&t)) {
        return Err(refused("/temperature", "temperature must be between 0 and 2"));
    }
    Ok(Sampling { temperature, ..defined.clone() })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
