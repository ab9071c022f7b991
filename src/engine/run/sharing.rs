//! What a run takes of the budget that it shares: reserved before each model call and tool call,
//! settled afterwards.
//!
//! A model call reserves what its input is estimated to be, and the output that it may write. Where
//! that is not left, it makes do with a shorter answer, as long as that is worth a call. The answer
//! that a limit leaves is not refused.

use super::{Run, Stopped};
use crate::clock;
use crate::engine::budget::SharedBudget;
use crate::engine::state::limits::LEAST_TOKENS;
use crate::event::RunEvent;
use crate::run::{Amounts, Consumption, Delegation, Descendants, Refusal, Reserved};

/// Tokens of output that are reserved where the definition says nothing.
const USUAL_OUTPUT: u32 = 4096;

/// What came of asking for a model call.
pub(super) enum ModelCall {
    /// It may be made, with an answer of so many tokens at most.
    Granted(Option<u32>),
    /// It may not, and this is what that means.
    Refused(Vec<RunEvent>),
}

impl Run {
    /// The shared budget, once it is shared.
    fn open_budget(&self) -> Option<&SharedBudget> {
        self.shared.as_ref().filter(|shared| shared.is_open())
    }

    /// Reserves a model call whose answer would have `cap` tokens at most. One that writes a
    /// summary is no iteration.
    pub(super) async fn reserve_model_call(
        &mut self,
        cap: Option<u32>,
        is_summary: bool,
    ) -> Result<ModelCall, Stopped> {
        let Some(shared) = self.open_budget().filter(|_| !self.state.is_last_answer()) else {
            return Ok(ModelCall::Granted(cap));
        };
        let input = self.state.input_tokens();
        let output = cap.map_or(USUAL_OUTPUT, |cap| {
            cap.min(self.asked().1.max_output_tokens.unwrap_or(USUAL_OUTPUT))
        });
        let price = self.plan.rules.price;
        let wanted = |output: u32| Amounts {
            tokens: input + u64::from(output),
            micro_usd: price.map_or(0, |price| price.at_most(input, output.into())),
            iterations: u64::from(!is_summary),
            ..Amounts::default()
        };
        let granted = |output| ModelCall::Granted(cap.map(|_| output));
        let refusal = match shared.reserve(wanted(output)).await? {
            Reserved::Granted => return Ok(granted(output)),
            Reserved::Refused(refusal) => refusal,
        };
        let shorter = self.affordable(&refusal, input).filter(|shorter| *shorter < output);
        if let Some(shorter) = shorter
            && shared.reserve(wanted(shorter)).await? == Reserved::Granted
        {
            return Ok(granted(shorter));
        }
        let least = wanted(u32::try_from(LEAST_TOKENS).unwrap_or(u32::MAX).min(output));
        Ok(ModelCall::Refused(self.state.shared_budget_spent(&refusal, least, clock::now())))
    }

    /// The tokens of output that what is left pays for, where that is worth a call.
    fn affordable(&self, refusal: &Refusal, input: u64) -> Option<u32> {
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

    /// Reserves a tool call and what it takes. Where that is refused: what it means.
    pub(super) async fn reserve_tool_call(
        &mut self,
        consumes: &Consumption,
    ) -> Result<Option<Vec<RunEvent>>, Stopped> {
        let Some(shared) = self.open_budget() else { return Ok(None) };
        let wanted = Amounts {
            tool_calls: 1,
            files: self.state.new_files(consumes),
            lines: consumes.lines_changed,
            requests: consumes.network_requests,
            ..Amounts::default()
        };
        Ok(match shared.reserve(wanted).await? {
            Reserved::Granted => None,
            Reserved::Refused(refusal) => {
                Some(self.state.shared_budget_spent(&refusal, wanted, clock::now()))
            }
        })
    }

    /// What the runs have taken that this one started, and those that they started.
    pub(super) async fn descendants(&mut self) -> Result<Descendants, Stopped> {
        let mut tools = self.state.totals().tools_used.iter();
        match &self.shared {
            Some(shared) if tools.any(|tool| Delegation::of_tool(tool).is_some()) => {
                Ok(shared.descendants().await?)
            }
            _ => Ok(Descendants::default()),
        }
    }

    /// States what was spent, and gives back what was reserved.
    pub async fn settle(&mut self) -> Result<(), Stopped> {
        let Some(shared) = self.open_budget() else { return Ok(()) };
        Ok(shared.settle(Amounts::of(self.state.totals()), self.state.ending().is_some()).await?)
    }
}
