//! The part of a plan that the state machine knows and decides by.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::contract::Contract;
use super::narrowing::CapsOfTree;
use crate::agents::definition::ReactSection;
use crate::event::SkillActivated;
use crate::providers::prices::Price;
use crate::run::{Budget, GivenCall, Limits, OnLimit, ToolChoicePolicy};
use crate::tools::use_skill;

/// The settings of a run that the state machine decides by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub struct Rules {
    /// Exactly one model call, no tools: `/invoke`, or a loop that has nothing to loop with.
    pub single_shot: bool,
    /// What an acceptable output is.
    pub contract: Contract,
    /// When the model must call a tool.
    pub tool_choice: ToolChoicePolicy,
    /// Whether an answer that violates the tool choice fails the attempt.
    pub strict_tool_choice: bool,
    /// How decisions are requested, for the driver `react`.
    pub react: Option<ReactSection>,
    /// Limits of the loop.
    pub limits: Limits,
    /// Consumption caps.
    pub budget: Budget,
    /// Which caps come from the parent run.
    #[serde(default, skip_serializing_if = "CapsOfTree::are_none")]
    pub caps_of_tree: CapsOfTree,
    /// Requests to the network (`governance.network.max_requests`).
    pub max_network_requests: Option<u64>,
    /// What happens to the run at a limit.
    pub on_limit: OnLimit,
    /// The number of crashes that ends the run; a setting of this service.
    pub max_crashes: u32,
    /// Whether the first failing call ends the run.
    pub throw_on_tool_failure: bool,
    /// Whether the calls after a blocked one are not executed.
    pub stop_on_tool_block: bool,
    /// Tools whose neighbouring calls may be executed at the same time.
    pub concurrent: BTreeSet<String>,
    /// Tools whose results are used again within an attempt.
    pub cached: BTreeSet<String>,
    /// Tools that the caller executes.
    pub client_tools: BTreeSet<String>,
    /// Whether there are tools other than those that hand the conversation to another agent.
    pub has_tools_of_its_own: bool,
    /// The price of the most expensive model, for a budget in dollars. It is a setting of this service; a
    /// run that continues on another replica is judged by the prices there.
    pub price: Option<Price>,
    /// Tokens of the offered tools, estimated, where there is a budget in dollars or a known
    /// window.
    pub offered_tokens: u64,
    /// Tokens that the models read and write at most, in the order of the plan, and then that of a model that
    /// only writes the final answer; known to this service only, like the price.
    pub windows: Vec<Window>,
    /// The call that the caller made, for a run of the kind `call`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<GivenCall>,
}

/// How much one model can read and write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// As `provider/model`.
    pub model: String,
    /// Tokens; absent where nothing is known.
    pub tokens: Option<u64>,
}

impl Default for Rules {
    /// Enough to fold a journal; no decision may depend on them.
    fn default() -> Self {
        Self {
            single_shot: false,
            contract: Contract::Text { confirm: false },
            tool_choice: ToolChoicePolicy::Auto,
            strict_tool_choice: false,
            react: None,
            limits: Limits::default(),
            budget: Budget::default(),
            caps_of_tree: CapsOfTree::default(),
            max_network_requests: None,
            on_limit: OnLimit::Fail,
            max_crashes: u32::MAX,
            throw_on_tool_failure: false,
            stop_on_tool_block: false,
            concurrent: BTreeSet::new(),
            cached: BTreeSet::new(),
            client_tools: BTreeSet::new(),
            has_tools_of_its_own: true,
            price: None,
            offered_tokens: 0,
            windows: Vec::new(),
            given: None,
        }
    }
}

impl Rules {
    /// Whether a tool of the run is offered while these skills are active: none of them takes it
    /// away, or it is one that ends an attempt.
    pub fn offer(&self, tool: &str, skills: &[SkillActivated]) -> bool {
        self.contract.is_met_by(tool) || use_skill::leaves(skills, tool)
    }
}
