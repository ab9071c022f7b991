//! Performs a compaction: asks a model for the summary if one is needed, and records the result.
//!
//! `engine::context` decides what is removed. If the summary's own call does not fit or is refused for its
//! content, the compaction goes on without a summary. Any other failure of the call ends the run, because the
//! next model call would have failed, too.

use std::sync::Arc;

use super::budget_reservations::ModelCallReservation;
use super::model_calls::{fault, interrupted, try_once};
use super::outbox::Outbox;
use super::{MAY_LAG, Run, Stopped, instant_of, until_cancelled_or_due};
use crate::clock;
use crate::engine::context::{Compaction, WrittenSummary};
use crate::engine::state::ModelFault;
use crate::event::{RunEvent, SummaryCall};
use crate::message::FinishReason;
use crate::providers::router::{Answer, ModelCall as Call, ModelFailure, Tried};
use crate::providers::{Capabilities, Deltas, FailureKind, ModelRequest, Options, ToolChoice};
use crate::run::SpanPlace;

impl Run {
    /// Compacts the conversation, before a model call or after its refusal (`refused`). If nothing is gained,
    /// the refusal stands.
    pub(super) async fn compact(
        &mut self,
        compaction: Compaction,
        refused: Option<&ModelFault>,
    ) -> Result<(), Stopped> {
        let mut cap = compaction.summary_cap();
        if compaction.summarised > 0 {
            self.hand_over();
            match self.reserve_model_call(Some(cap), true).await? {
                ModelCallReservation::Granted(granted) => cap = granted.unwrap_or(cap),
                ModelCallReservation::Refused(events) => return Ok(self.record_all(events)?),
                ModelCallReservation::GivenUp => return Ok(()),
            }
        }
        let compacted = self.compacted(compaction, cap, refused).await;
        self.settle().await?;
        compacted
    }

    async fn compacted(
        &mut self,
        mut compaction: Compaction,
        cap: u32,
        refused: Option<&ModelFault>,
    ) -> Result<(), Stopped> {
        let written = match self.summary(&compaction, cap).await? {
            None => return Ok(self.journal.settle_older_than(MAY_LAG).await?),
            Some(Ok(answer)) => answer.map(|answer| {
                compaction.failed_tries += answer.retries;
                let Answer { provider, model, usage, latency_ms, completion, .. } = answer;
                let is_refusal = completion.finish_reason == FinishReason::Refusal;
                WrittenSummary {
                    text: if is_refusal { String::new() } else { completion.text },
                    call: SummaryCall { provider, model, usage, latency_ms },
                }
            }),
            Some(Err(failure)) => {
                if let Some(usage) = failure.error.usage.as_deref().copied() {
                    let place = (self.state.attempt(), self.state.iteration());
                    self.record(interrupted(place, &failure.provider, &failure.model, usage))?;
                }
                if !matches!(
                    failure.error.kind,
                    FailureKind::ContextLength | FailureKind::ContentFilter
                ) {
                    let end = self.state.model_failed(
                        &fault(failure, &self.plan, &self.plan.sampling),
                        clock::now(),
                    );
                    return Ok(self.record_all(end)?);
                }
                compaction.failed_tries += failure.attempts;
                None
            }
        };
        self.journal.settle_older_than(MAY_LAG).await?;
        let place = (self.state.attempt(), self.state.iteration());
        let compacted = compaction.into_event(self.state.conversation(), place, written);
        let refused = refused.filter(|_| !compacted.shrank());
        self.record(RunEvent::ContextCompacted(compacted))?;
        let end = refused.map(|fault| self.state.model_failed(fault, clock::now()));
        Ok(self.record_all(end.unwrap_or_default())?)
    }

    /// Tokens that a summary may have: at most `cap`, and what the run's own budget leaves.
    fn summary_tokens(&self, cap: u32) -> u32 {
        let left = self.state.answer_tokens();
        left.map_or(cap, |left| cap.min(u32::try_from(left).unwrap_or(u32::MAX)))
    }

    /// The summary, if one is needed; `None` if the run was cancelled, out of time or at the end of its budget
    /// first.
    async fn summary(
        &mut self,
        compaction: &Compaction,
        cap: u32,
    ) -> Result<Option<Result<Option<Answer>, ModelFailure>>, Stopped> {
        if compaction.summarised == 0 {
            return Ok(Some(Ok(None)));
        }
        let (plan, inputs) = (Arc::clone(&self.plan), Arc::clone(&self.inputs));
        let deadline = self.state.deadline().map(instant_of);
        let conversation = compaction.request(self.state.conversation());
        let (attempt, iteration) = (self.state.attempt(), self.state.iteration());
        let mut request = ModelRequest {
            model: "",
            capabilities: &Capabilities::OPENAI, // the router knows better
            conversation: &conversation,
            tools: &[],
            names: &plan.names,
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: None,
            temperature: plan.sampling.temperature,
            options: Options {
                stop: &[],
                ..Options::new(&plan.sampling, &plan.agent.definition.provider_options)
            },
            max_output_tokens: Some(self.summary_tokens(cap)),
            output_left: None,
            thinking: None,
            prompt_caching: false,
            deltas: Deltas::default(),
            output_schema: None,
            json_mode: false,
            inputs: &inputs,
            step: self.state.model_step() + compaction.failed_tries,
            trace: Some(self.trace.span(SpanPlace::Summary { attempt, iteration })),
        };
        let mut call = Call::beginning(self.state.model_index(&plan.models));
        loop {
            let (sent, stop) = (call.sent(), until_cancelled_or_due(&self.control, deadline));
            let (router, models) = (&self.router, &plan.models);
            let trying = try_once(router, models, &mut call, &request, deadline, &self.control);
            let outbox = Outbox::of(&mut self.journal, &mut self.outbox, &mut self.audit);
            let tried = outbox.during(self.state.totals(), &sent, stop, trying).await;
            let Some((tried, permit)) = tried else { return Ok(None) };
            match tried {
                Ok(Tried::Answered(answer)) => {
                    if let Ok(permit) = permit {
                        self.large_answer = permit;
                        return Ok(Some(Ok(Some(*answer))));
                    }
                    let Answer { provider, model, usage, .. } = *answer;
                    self.record(interrupted((attempt, iteration), &provider, &model, usage))?;
                    return Ok(None);
                }
                Err(failure) => return Ok(Some(Err(failure))),
                Ok(Tried::Again(again)) => {
                    let took_something = again.error.usage.is_some();
                    if !self.wait_to_ask_again(again, None, deadline).await? {
                        return Ok(None);
                    }
                    if took_something {
                        match self.reserve_next_try(Some(cap), true).await? {
                            ModelCallReservation::Granted(left) => {
                                let cap = self.summary_tokens(left.unwrap_or(cap));
                                request.max_output_tokens = Some(cap);
                            }
                            ModelCallReservation::Refused(events) => {
                                self.record_all(events)?;
                                return Ok(None);
                            }
                            ModelCallReservation::GivenUp => return Ok(None),
                        }
                    }
                }
            }
        }
    }
}
