//! The use of a shared budget: reserved before each model call and tool call, settled afterwards.
//!
//! A model call reserves its estimated input and its greatest output. If that is not left, it is limited to a
//! shorter answer, as long as that is worth a call. If the missing amount is only reserved by calls in
//! progress, which mostly take less, it waits until they have settled. There is no deadlock: only model calls
//! reserve tokens and dollars, and none of them waits while it has a reservation. The last answer at a limit is
//! reserved even where it is not left, so that no other run takes what it needs.

use std::time::Duration;

use super::{Run, Stopped, instant_of, until};
use crate::clock;
use crate::engine::budget::SharedBudget;
use crate::engine::state::PendingCall;
use crate::engine::state::limits::LEAST_TOKENS;
use crate::event::RunEvent;
use crate::run::{Amounts, CapExceeded, Consumption, Delegation, Descendants, Reserved};

/// Tokens of output that are reserved if the definition sets no limit.
const USUAL_OUTPUT: u32 = 4096;

/// The first and the longest pause between two checks whether other calls have settled.
const FIRST_LOOK: Duration = Duration::from_millis(25);
const LONGEST_LOOK: Duration = Duration::from_millis(500);

/// The outcome of a reservation of a model call.
pub(super) enum ModelCallReservation {
    /// It may be made, with at most this number of output tokens, thinking included.
    Granted(Option<u32>),
    /// It may not; with the events to record.
    Refused(Vec<RunEvent>),
    /// The run was cancelled or out of time while it waited.
    GivenUp,
}

impl Run {
    /// The shared budget, once it is shared.
    fn open_budget(&self) -> Option<&SharedBudget> {
        self.shared.as_ref().filter(|shared| shared.is_open())
    }

    /// Reserves a model call whose output, thinking included, would have `cap` tokens at most. One
    /// that writes a summary is no iteration.
    pub(super) async fn reserve_model_call(
        &mut self,
        cap: Option<u32>,
        is_summary: bool,
    ) -> Result<ModelCallReservation, Stopped> {
        if self.open_budget().is_none() {
            return Ok(ModelCallReservation::Granted(cap));
        }
        self.hand_over_earlier();
        let input = self.state.input_tokens();
        let longest = self.longest_output(is_summary);
        let most = cap.map_or(longest, |cap| cap.min(longest));
        let mut output = most;
        let price = self.plan.rules.price;
        let wanted = |output: u32| Amounts {
            tokens: input + u64::from(output),
            micro_usd: price.map_or(0, |price| price.at_most(input, output.into())),
            iterations: u64::from(!is_summary),
            ..Amounts::default()
        };
        let mut look = FIRST_LOOK;
        loop {
            let refusal = match self.reserve(wanted(output)).await? {
                Reserved::Granted => {
                    let is_bounded = cap.is_some() || output < most;
                    return Ok(ModelCallReservation::Granted(is_bounded.then_some(output)));
                }
                Reserved::Refused(refusal) => refusal,
            };
            if refusal.may_settle() {
                self.settle().await?; // otherwise runs could wait for each other's reservations
                if !self.pause(look).await {
                    return Ok(ModelCallReservation::GivenUp);
                }
                look = (look * 2).min(LONGEST_LOOK);
                continue;
            }
            let shorter = self.affordable(&refusal, input).filter(|shorter| *shorter < output);
            let Some(shorter) = shorter else {
                if self.state.is_last_answer() {
                    self.reserve_beyond(wanted(most)).await?;
                    return Ok(ModelCallReservation::Granted(cap));
                }
                let least = wanted(u32::try_from(LEAST_TOKENS).unwrap_or(u32::MAX).min(output));
                let refused = self.state.shared_budget_spent(&refusal, least, clock::now());
                return Ok(ModelCallReservation::Refused(refused));
            };
            output = shorter;
        }
    }

    /// Tokens of a model's whole output where no budget bounds it, thinking included.
    fn longest_output(&self, is_summary: bool) -> u32 {
        let (models, sampling) = self.models_and_sampling();
        let answer = sampling.max_output_tokens.unwrap_or(USUAL_OUTPUT);
        let thinking = self.plan.thinking.filter(|_| !is_summary);
        let beside = thinking.map(|wish| self.router.thinking_beside(models, wish, answer));
        answer.saturating_add(beside.unwrap_or(0))
    }

    /// Reserves these amounts of the shared budget, if there is one.
    async fn reserve(&mut self, wanted: Amounts) -> Result<Reserved, Stopped> {
        match self.open_budget() {
            Some(shared) => Ok(shared.reserve(wanted).await?),
            None => Ok(Reserved::Granted),
        }
    }

    /// Reserves these amounts of the shared budget, even those that are not left.
    async fn reserve_beyond(&mut self, wanted: Amounts) -> Result<(), Stopped> {
        match self.open_budget() {
            Some(shared) => Ok(shared.reserve_beyond(wanted).await?),
            None => Ok(()),
        }
    }

    /// Pauses; false if the run was cancelled or out of time first.
    async fn pause(&mut self, pause: Duration) -> bool {
        let deadline = self.state.deadline().map(instant_of);
        tokio::select! {
            biased;
            () = self.control.cancelled() => false,
            () = until(deadline) => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    /// The output tokens that the rest of the budget allows, if that is worth a call.
    fn affordable(&self, refusal: &CapExceeded, input: u64) -> Option<u32> {
        let left = refusal.max.saturating_sub(refusal.used);
        let output = match refusal.limit {
            "max_total_tokens" => left.checked_sub(input),
            "max_cost_usd" => self.plan.rules.price?.affordable_output(
                input,
                i64::try_from(left).unwrap_or(i64::MAX).saturating_sub(1),
            ),
            _ => None,
        };
        output
            .filter(|output| *output >= LEAST_TOKENS)
            .map(|output| u32::try_from(output).unwrap_or(u32::MAX))
    }

    /// Reserves a tool call, unless it was counted before, and its consumption; or the events for a refusal.
    /// `is_first`: no other call of the response is reserved and not yet made.
    pub(super) async fn reserve_tool_call(
        &mut self,
        is_new: bool,
        consumes: &Consumption,
        is_first: bool,
    ) -> Result<Option<Vec<RunEvent>>, Stopped> {
        let wanted = Amounts {
            tool_calls: is_new.into(),
            files: self.state.new_files(consumes),
            lines: consumes.lines_changed,
            requests: consumes.network_requests,
            ..Amounts::default()
        };
        if is_first && self.state.has_answers_from_outside() {
            self.settle().await?; // calls that were answered while the run was parked
        }
        let mut reserved = self.reserve(wanted).await?;
        if is_first && matches!(reserved, Reserved::Refused(_)) {
            self.settle().await?; // calls of the same response that have ended are settled first
            reserved = self.reserve(wanted).await?;
        }
        Ok(match reserved {
            Reserved::Granted => None,
            Reserved::Refused(refusal) => {
                Some(self.state.shared_budget_spent(&refusal, wanted, clock::now()))
            }
        })
    }

    /// Reserves a call that needs an approval, or that the caller executes, before it is requested; or the
    /// events for a refusal.
    pub(super) async fn reserve_external_call(
        &mut self,
        pending: &PendingCall,
        is_first: bool,
    ) -> Result<Option<Vec<RunEvent>>, Stopped> {
        let is_new = self.state.counted(pending.call.id).is_none();
        self.reserve_tool_call(is_new, &Consumption::NOTHING, is_first).await
    }

    /// What all descendants of the run have consumed.
    pub(super) async fn descendants(&mut self) -> Result<Descendants, Stopped> {
        let mut tools = self.state.totals().tools_used.iter();
        match &self.shared {
            Some(shared) if tools.any(|tool| Delegation::of_tool(tool).is_some()) => {
                Ok(shared.descendants().await?)
            }
            _ => Ok(Descendants::default()),
        }
    }

    /// Counts what the runs below a child run have taken against the child's own budget. What a root and the runs
    /// below it take is reserved of the budget that they share.
    pub(super) async fn count_below(&mut self) -> Result<(), Stopped> {
        let budget = &self.plan.rules.budget;
        let is_bounded = budget.max_total_tokens.is_some() || budget.max_cost_usd.is_some();
        if self.is_child && is_bounded {
            let below = self.descendants().await?;
            self.state.count_below(below.usage);
        }
        Ok(())
    }

    /// States what was spent, which releases the reservations.
    pub async fn settle(&mut self) -> Result<(), Stopped> {
        let Some(shared) = self.open_budget() else { return Ok(()) };
        Ok(shared.settle(self.state.spent_of_shared(), self.state.ending().is_some()).await?)
    }
}
