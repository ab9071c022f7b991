//! A dry run: every check of a real start, and what the model would be sent.
//!
//! Nothing is stored, and no model is asked.

use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use super::start::{Checked, StartError, StartRequest, opening};
use super::worker::driver;
use super::{Runtime, conversation};
use crate::agents::Agent;
use crate::clock;
use crate::drivers::{Ask, Place};
use crate::engine::{Plan, Rules, State};
use crate::event::{Event, RunEvent, ScanWarned};
use crate::message::{Conversation, Turn};
use crate::providers::{Capabilities, Deltas, ModelRequest, Options, ToolChoice, ToolOffer};

/// What a run would send to the model, offer and enforce.
#[derive(Debug)]
pub struct DryRunOutcome {
    /// The agent.
    pub agent: Arc<Agent>,
    /// The models, in the order in which they are asked.
    pub models: Vec<String>,
    /// What the first model call would say.
    pub conversation: Conversation,
    /// What the model would be offered.
    pub tools: Vec<ToolOffer>,
    /// The skills that are active from the start.
    pub active_skills: Vec<String>,
    /// The rules of the loop.
    pub policy: Rules,
    /// Warnings for the caller.
    pub warnings: Vec<String>,
}

impl DryRunOutcome {
    /// About how many bytes its tools and messages have as JSON.
    pub fn bytes(&self) -> usize {
        self.conversation.bytes() + self.tools.iter().map(ToolOffer::bytes).sum::<usize>()
    }
}

impl Runtime {
    /// Checks everything that can be refused, as for a run, and says what the run would be.
    ///
    /// # Errors
    /// [`StartError`], as of a start.
    pub async fn dry_run(&self, request: StartRequest) -> Result<DryRunOutcome, StartError> {
        let (busy, run_id) = (request.overrides.on_session_busy, request.run_id);
        let checked = self.check(self.agent(&request.agent)?, request, Vec::new())?;
        if let Some(id) = run_id
            && self.inner.store.has_run(id).await?
        {
            return Err(StartError::RunIdTaken(id));
        }
        if let Some(uploads) = &checked.uploads {
            let (tenant, directory) = (&checked.caller.tenant, checked.directory());
            let judged = self.judge_uploads(tenant, &checked.loaded, &directory, uploads).await;
            judged.map_err(StartError::Upload)?;
        }
        let Checked { new, caller, plan, .. } = checked;
        let busy = busy.unwrap_or(plan.agent.definition.on_session_busy);
        let earlier =
            self.runs_before(&caller.tenant, &new, plan.agent.definition.history, busy).await?;
        let background = self.background(&plan, &caller, &new, &earlier).await?;
        let opening = opening(&plan, &new.inputs, &background)?;
        let suspicious: Vec<String> =
            background.warnings.iter().map(ScanWarned::in_words).collect();
        let history = background.turns.len();
        let turns = background.turns.into_iter().chain([Turn::User(opening.user)]).collect();
        let warnings: Vec<String> =
            plan.warnings.iter().cloned().chain(background.left_out).collect();
        let what = RunEvent::RunStarted {
            system: opening.system,
            turns,
            history,
            single_shot: plan.rules.single_shot,
            warnings: warnings.clone(),
        };
        let opened = Event { seq: 1, at: clock::now(), run_id: new.id, what };
        let conversation =
            conversation(&[opened]).map_err(|e| StartError::broken(&new.agent, &e))?;
        let conversation = if plan.rules.react.is_some() {
            as_text(&plan, new.id, &new.inputs, &conversation)
        } else {
            conversation
        };
        let limits = plan.rules.limits.shown(plan.longest_call_seconds);
        Ok(DryRunOutcome {
            models: plan.models.clone(),
            conversation,
            tools: plan.offers.clone(),
            active_skills: plan.active.iter().map(|skill| skill.bounds.skill.clone()).collect(),
            policy: Rules { limits, ..plan.rules.clone() },
            warnings: warnings.into_iter().chain(suspicious).collect(),
            agent: Arc::clone(&plan.agent),
        })
    }
}

/// The first model call of a run whose model acts by decisions, which are described in it.
fn as_text(plan: &Plan, run_id: Uuid, inputs: &Value, conversation: &Conversation) -> Conversation {
    let ask = Ask {
        place: Place { run_id, attempt: 1, iteration: 1 },
        choice: State::new(plan.rules.clone()).choice(),
        output_tool: plan.output_tool(),
        submit_tool: plan.submit_tool(),
        answer_only: false,
        unfinished: None,
    };
    let base = ModelRequest {
        model: "",
        capabilities: &Capabilities::OPENAI, // no model is asked
        conversation,
        tools: &plan.offers,
        names: &plan.names,
        tool_choice: ToolChoice::Auto,
        parallel_tool_calls: None,
        temperature: None,
        options: Options::default(),
        max_output_tokens: None,
        output_left: None,
        thinking: None,
        prompt_caching: false,
        deltas: Deltas::default(),
        output_schema: None,
        json_mode: false,
        inputs,
        step: 1,
        trace: None,
    };
    let mut rewritten = Conversation::default();
    let request = driver(plan).request(base, &ask, &mut rewritten);
    request.conversation.clone()
}
