//! Calls the model: one try at a time, so that each failed try is in the journal before the next one.
//!
//! The router decides whether a failed try is repeated, and by which model. The driver and the state machine
//! interpret the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::budget_reservations::ModelCallReservation;
use super::large_answers::{self, MemoryPermit, WaitGivenUp};
use super::outbox::Outbox;
use super::{MAY_LAG, Run, RunControl, Stopped, instant_of, until, until_cancelled_or_due};
use crate::clock;
use crate::drivers::{Ask, Place};
use crate::engine::context::Compaction;
use crate::engine::plan::Plan;
use crate::engine::state::{ModelFault, State};
use crate::event::{ModelDelta, ModelInterrupted, ModelResponded, ModelRetried, Piece, RunEvent};
use crate::message::{Conversation, Usage};
use crate::providers::router::{Again, Answer, ModelCall, ModelFailure, Router, Tried};

use crate::providers::{
    Capabilities, Delta, Deltas, FailureKind, ModelRequest, Options, ToolChoice, WireNames,
};
use crate::run::{Sampling, SpanPlace, TerminationReason, named_option};

impl Run {
    /// Calls the model, if the shared budget allows it.
    pub(super) async fn call_model(&mut self, choice: ToolChoice) -> Result<(), Stopped> {
        match self.reserve_model_call(self.output_left(), false).await? {
            ModelCallReservation::Granted(left) => self.ask_model(choice, left).await?,
            ModelCallReservation::Refused(events) => return Ok(self.record_all(events)?),
            ModelCallReservation::GivenUp => return Ok(()),
        }
        self.settle().await
    }

    async fn ask_model(
        &mut self,
        choice: ToolChoice,
        mut output_left: Option<u32>,
    ) -> Result<(), Stopped> {
        let deadline = self.state.deadline().map(instant_of);
        let plan = Arc::clone(&self.plan);
        let models = plan.models_and_sampling(self.state.writes_answer()).0;
        let has_own = plan.answer.as_ref().is_some_and(|answer| answer.has_own_model);
        let first =
            if has_own && self.state.writes_answer() { 0 } else { self.state.model_index(models) };
        let mut call = ModelCall::beginning(first).insisting(!self.is_child);
        let (happened, is_followed) = loop {
            let (tried, is_followed) =
                self.try_model(&plan, &mut call, choice.clone(), output_left, deadline).await;
            match tried {
                TryOutcome::GivenUp(interrupted) => {
                    break (Vec::from_iter(interrupted), is_followed);
                }
                TryOutcome::Answered(happened, permit) => {
                    self.large_answer = permit;
                    break (happened, is_followed);
                }
                TryOutcome::Again(again, usage) => {
                    let took_something = usage.is_some() || again.error.usage.is_some();
                    if !self.wait_to_ask_again(again, usage, deadline).await? {
                        break (Vec::new(), is_followed);
                    }
                    if took_something {
                        let cap = self.output_left();
                        match self.reserve_next_try(cap, false).await? {
                            ModelCallReservation::Granted(left) => output_left = left,
                            ModelCallReservation::Refused(events) => break (events, is_followed),
                            ModelCallReservation::GivenUp => break (Vec::new(), is_followed),
                        }
                    }
                }
                TryOutcome::Failed(failure, interrupted) => {
                    self.record_all(Vec::from_iter(interrupted))?;
                    let recovery = recovery(&self.state, &failure);
                    let fault = fault(failure, &plan, self.models_and_sampling().1);
                    match recovery {
                        Some(compaction) => {
                            self.hand_over();
                            return self.compact(compaction, Some(&fault)).await;
                        }
                        None => {
                            break (self.state.model_failed(&fault, clock::now()), is_followed);
                        }
                    }
                }
            }
        };
        self.hand_over();
        // Followers receive the pieces after all earlier events.
        self.journal.settle_older_than(if is_followed { Duration::ZERO } else { MAY_LAG }).await?;
        Ok(self.record_all(happened)?)
    }

    /// Reserves the next try of a model call after an earlier try has consumed tokens.
    pub(super) async fn reserve_next_try(
        &mut self,
        cap: Option<u32>,
        is_summary: bool,
    ) -> Result<ModelCallReservation, Stopped> {
        self.settle().await?;
        match self.state.spent_by_tries(clock::now()) {
            Some(end) => Ok(ModelCallReservation::Refused(vec![end])),
            None => self.reserve_model_call(cap, is_summary).await,
        }
    }

    /// One try, and whether the run has followers.
    async fn try_model(
        &mut self,
        plan: &Plan,
        call: &mut ModelCall,
        choice: ToolChoice,
        output_left: Option<u32>,
        deadline: Option<Instant>,
    ) -> (TryOutcome, bool) {
        let inputs = Arc::clone(&self.inputs);
        let (models, sampling) = plan.models_and_sampling(self.state.writes_answer());
        let (attempt, iteration) = (self.state.attempt(), self.state.iteration());
        // The length of the answer so far, in bytes.
        let received = AtomicUsize::new(0);
        let follower = self.audience.pieces(self.state.last_seq()).map(|pieces| {
            if self.state.repeats_model_call() {
                let piece = Piece::Restarted(true); // those of the answer that was lost
                pieces(ModelDelta { attempt, iteration, piece });
            }
            let (names, received) = (&plan.names, &received);
            move |delta: Delta| {
                received.fetch_add(delta.bytes(), Ordering::Relaxed);
                pieces(ModelDelta { attempt, iteration, piece: piece(delta, names) });
            }
        });
        let chat = SpanPlace::Chat { attempt, iteration };
        let offers = plan.offered(self.state.skills());
        let base = ModelRequest {
            model: "",
            capabilities: &Capabilities::OPENAI, // the router knows better
            conversation: self.state.conversation(),
            tools: &offers,
            names: &plan.names,
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: plan.parallel_tool_calls,
            temperature: sampling.temperature,
            options: Options::new(sampling, &plan.agent.definition.provider_options),
            max_output_tokens: sampling.max_output_tokens.into_iter().chain(output_left).min(),
            output_left,
            thinking: plan.thinking,
            prompt_caching: plan.agent.definition.prompt_caching,
            deltas: Deltas(follower.as_ref().map(|follower| follower as _)),
            output_schema: plan.single_shot_schema(),
            json_mode: false,
            inputs: &inputs,
            step: self.state.model_step(),
            trace: Some(self.trace.span(chat)),
        };
        let ask = Ask {
            place: Place { run_id: self.scope.run_id, attempt, iteration },
            choice,
            output_tool: plan.output_tool(),
            submit_tool: plan.submit_tool(),
            answer_only: self.state.is_answer_only(),
            unfinished: self.state.unfinished(),
        };
        let (model_name, mut rewritten) = (call.model(models), Conversation::default());
        let request = self.driver.request(base.clone(), &ask, &mut rewritten);
        let (sent, stop) = (call.sent(), until_cancelled_or_due(&self.control, deadline));
        let trying = try_once(&self.router, models, call, &request, deadline, &self.control);
        let outbox = Outbox::of(&mut self.journal, &mut self.outbox, &mut self.audit);
        let tried = outbox.during(self.state.totals(), &sent, stop, trying).await;
        let usage = || match received.load(Ordering::Relaxed) {
            0 => None,
            received => Some(self.router.usage_so_far(model_name, &request, received)),
        };
        let (provider, model) = model_name.split_once('/').unwrap_or(("", model_name));
        let interrupted = |usage| interrupted((attempt, iteration), provider, model, usage);
        let outcome = match tried {
            None => TryOutcome::GivenUp(usage().map(interrupted)),
            Some((Ok(Tried::Answered(answer)), Ok(permit))) => {
                TryOutcome::Answered(self.responded(*answer, &base, &ask), permit)
            }
            Some((Ok(Tried::Answered(answer)), Err(WaitGivenUp))) => {
                TryOutcome::GivenUp(Some(interrupted(self.state.charged(answer.usage))))
            }
            Some((Ok(Tried::Again(again)), _)) => TryOutcome::Again(again, usage()),
            Some((Err(failure), _)) => {
                if let Some(again) = self.asks_another(models, call, &failure) {
                    TryOutcome::Again(again, usage())
                } else {
                    let taken = failure.error.usage.as_deref().copied().or_else(usage);
                    TryOutcome::Failed(failure, taken.map(interrupted))
                }
            }
        };
        (outcome, follower.is_some())
    }

    /// Whether the next model is asked because the conversation does not fit this one, even after compaction.
    fn asks_another(
        &self,
        models: &[String],
        call: &mut ModelCall,
        failure: &ModelFailure,
    ) -> Option<Again> {
        let next = models.get(failure.place + 1);
        let does_not_fit = failure.error.kind == FailureKind::ContextLength;
        let fallback = next.filter(|_| does_not_fit && recovery(&self.state, failure).is_none())?;
        call.moves_to(failure.place + 1);
        Some(Again {
            provider: failure.provider.clone(),
            model: failure.model.clone(),
            error: failure.error.clone(),
            wait: Duration::ZERO,
            fallback: Some(fallback.clone()),
        })
    }

    /// Records a failed try and waits until the next one. False if the run was cancelled or out of time first.
    pub(super) async fn wait_to_ask_again(
        &mut self,
        again: Again,
        usage: Option<Usage>,
        deadline: Option<Instant>,
    ) -> Result<bool, Stopped> {
        let wait = again.wait;
        self.record(RunEvent::ModelRetried(ModelRetried {
            attempt: self.state.attempt(),
            iteration: self.state.iteration(),
            provider: again.provider,
            model: again.model,
            reason: again.error.kind.as_str().to_owned(),
            status: again.error.status,
            message: again.error.message,
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            fallback: again.fallback,
            usage: again.error.usage.map(|reported| *reported).or(usage),
        }))?;
        self.hand_over();
        Ok(tokio::select! {
            biased;
            () = self.control.token.cancelled() => false,
            () = until(deadline) => false,
            () = tokio::time::sleep(wait) => true,
        })
    }

    /// The models of the next call, and their sampling parameters.
    pub(super) fn models_and_sampling(&self) -> (&[String], &Sampling) {
        self.plan.models_and_sampling(self.state.writes_answer())
    }

    /// Tokens that the budgets leave for the next answer, thinking included.
    fn output_left(&self) -> Option<u32> {
        self.state.answer_tokens().map(|left| u32::try_from(left).unwrap_or(u32::MAX))
    }

    /// The events for an answer: the answer itself, and the error if it holds no valid decision. They are
    /// appended together.
    fn responded(&self, answer: Answer, base: &ModelRequest<'_>, ask: &Ask<'_>) -> Vec<RunEvent> {
        let Place { attempt, iteration, .. } = ask.place;
        let check = |tool: &str, arguments: &Value| self.executor.check_arguments(tool, arguments);
        let finish_reason = answer.completion.finish_reason;
        let reading = self.driver.parse(answer.completion, base, ask, &check);
        let responded = RunEvent::ModelResponded(ModelResponded {
            attempt,
            iteration,
            message: reading.message,
            finish_reason,
            usage: self.state.charged(answer.usage),
            window: self.state.window_of(&answer.provider, &answer.model),
            provider: answer.provider,
            model: answer.model,
            latency_ms: answer.latency_ms,
            retries: answer.retries,
            fallback: answer.fallback,
            repeated: self.state.repeats_model_call(),
            warnings: answer.warnings,
        });
        std::iter::once(responded)
            .chain(reading.undecided.map(|why| self.state.decision_failed(&why)))
            .collect()
    }
}

/// The event for a model call that ended without an answer, with its usage.
pub(super) fn interrupted(
    (attempt, iteration): (u32, u32),
    provider: &str,
    model: &str,
    usage: Usage,
) -> RunEvent {
    let (provider, model) = (provider.to_owned(), model.to_owned());
    RunEvent::ModelInterrupted(ModelInterrupted { attempt, iteration, provider, model, usage })
}

/// The outcome of one try.
enum TryOutcome {
    /// The run was cancelled or out of time. With the event for the interrupted call, if a part of the answer
    /// had arrived.
    GivenUp(Option<RunEvent>),
    Answered(Vec<RunEvent>, Option<MemoryPermit>),
    /// With the usage of the part of the answer that had arrived.
    Again(Again, Option<Usage>),
    /// With the same event as [`TryOutcome::GivenUp`].
    Failed(ModelFailure, Option<RunEvent>),
}

/// One try; a large answer waits for its permit, until the run is cancelled or out of time.
pub(super) async fn try_once(
    router: &Router,
    models: &[String],
    call: &mut ModelCall,
    request: &ModelRequest<'_>,
    deadline: Option<Instant>,
    control: &RunControl,
) -> (Result<Tried, ModelFailure>, Result<Option<MemoryPermit>, WaitGivenUp>) {
    let tried = router.try_once(models, call, request, deadline).await;
    let permit = match &tried {
        Ok(Tried::Answered(answer)) => {
            let stop = until_cancelled_or_due(control, deadline);
            large_answers::permit_unless(answer.completion.bytes(), stop).await
        }
        _ => Ok(None),
    };
    (tried, permit)
}

fn recovery(state: &State, failure: &ModelFailure) -> Option<Compaction> {
    let does_not_fit = failure.error.kind == FailureKind::ContextLength;
    let refused_by = || format!("{}/{}", failure.provider, failure.model);
    does_not_fit.then(|| state.recovery(&refused_by(), failure.attempts)).flatten()
}

fn piece(delta: Delta, names: &WireNames) -> Piece {
    match delta {
        Delta::Text(text) => Piece::Text(text),
        Delta::Thinking(text) => Piece::Thinking(text),
        Delta::ToolCall { index, wire_name, arguments } => {
            Piece::ToolCall { index, name: wire_name.map(|name| names.to_ours(&name)), arguments }
        }
        Delta::Restarted => Piece::Restarted(true),
    }
}

pub(super) fn fault(failure: ModelFailure, plan: &Plan, sampling: &Sampling) -> ModelFault {
    let reason = match failure.error.kind {
        FailureKind::ContextLength => TerminationReason::ContextOverflow,
        FailureKind::ContentFilter => TerminationReason::ModelRefused,
        _ => TerminationReason::ModelError,
    };
    let error = failure.error;
    let passed = &plan.agent.definition.provider_options;
    let option = (error.kind == FailureKind::BadRequest)
        .then(|| named_option(&error.message, sampling, passed))
        .flatten();
    ModelFault {
        option,
        reason,
        provider: failure.provider,
        status: error.status,
        is_reported: error.is_reported(),
        code: error.code,
        message: error.message,
        attempts: failure.attempts,
    }
}
