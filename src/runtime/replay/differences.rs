//! Differences between the definition of a recorded run and the judging one that affect calls, results or labels
//! in a way that the journal does not show.
//!
//! Another interceptor may rewrite or block other calls. A rate limit depends on the other calls of that minute.
//! Options of a tool decide by which paths a call is judged and which labels its result has. A decision that
//! depends on such a difference is unknown. If these sections are equal, nothing is unknown.

use std::collections::BTreeSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};

use crate::agents::definition::{AfterInterceptor, BeforeInterceptor, Interceptors};
use crate::agents::{Agent, Definition};
use crate::bounds::{glob, name};
use crate::engine::state::State;
use crate::run::{Delegation, Descendants, StopAction};
use crate::runtime::definition_compiler::call_options;
use crate::tools::Defaults;
use crate::tools::executor::CallOptions;

/// The definition of a run, and the one that judges it.
pub(super) struct Differences {
    /// `None` if it can no longer be read.
    recorded: Option<Arc<Definition>>,
    judging: Arc<Agent>,
    /// Whether both have the same interceptors and options of tools.
    same_tooling: bool,
    /// Indices of the stop conditions that the recorded definition did not have.
    new_conditions: BTreeSet<usize>,
}

/// The effect of new stop conditions on a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopping {
    /// Nothing.
    Continues,
    Ends,
    /// A person would decide, or it depends on child runs.
    Unclear,
}

impl Differences {
    pub(super) fn between(recorded: Option<Arc<Definition>>, judging: &Arc<Agent>) -> Self {
        let now = &judging.definition;
        let then = recorded.as_deref();
        let same_tooling = then.is_some_and(|then| {
            then.interceptors == now.interceptors
                && then.tool_options == now.tool_options
                && then.governance.paths.private == now.governance.paths.private
                && then.governance.paths.private_in == now.governance.paths.private_in
        });
        let before = then.map(|then| then.governance.budget.stop_conditions.as_slice());
        let conditions = now.governance.budget.stop_conditions.iter().enumerate();
        let is_new = |condition| !before.unwrap_or_default().contains(condition);
        let new_conditions =
            conditions.filter(|(_, condition)| is_new(condition)).map(|(place, _)| place).collect();
        Self { recorded, judging: Arc::clone(judging), same_tooling, new_conditions }
    }

    /// Whether the decision on a call that was allowed, escalated or blocked by a rule is unknown.
    pub(super) fn hide_call(&self, tool: &str) -> bool {
        let Some((then, now)) = self.different() else { return false };
        let (before, after) = options(then, now, tool);
        let is_less = |now| before.per_minute.is_none_or(|then| now < then);
        after.per_minute.is_some_and(is_less) || self.hide_actions(tool)
    }

    /// Whether it is unknown what a call would do, or whether an interceptor would block it.
    fn hide_actions(&self, tool: &str) -> bool {
        let Some((then, now)) = self.different() else { return false };
        let (before, after) = options(then, now, tool);
        before.paths != after.paths || !same_before(&then.interceptors, &now.interceptors, tool)
    }

    /// Whether the decision on a call is unknown that was refused by something other than a rule: an interceptor, a
    /// rate limit, or because there was no such tool.
    pub(super) fn hide_refusal(&self, tool: &str, by: &str) -> bool {
        let Some(recorded) = &self.recorded else { return true };
        let has = |definition: &Definition| definition.tools.iter().any(|it| name::means(it, tool));
        if !has(recorded) && has(&self.judging.definition) {
            return true;
        }
        let Some((then, now)) = self.different() else { return false };
        let (before, after) = options(then, now, tool);
        (by == "rate_limit" && before.per_minute != after.per_minute) || self.hide_actions(tool)
    }

    /// Whether the text or the labels of a result of this tool may differ; `reads` says whether the call read files.
    pub(super) fn change_result(&self, tool: &str, reads: bool) -> bool {
        let Some((then, now)) = self.different() else { return false };
        let (before, after) = options(then, now, tool);
        let labels = |options: &CallOptions| (options.yields, options.sanitizes);
        let [private, private_now] = [then, now].map(|it| &it.governance.paths);
        let same_private =
            private.private == private_now.private && private.private_in == private_now.private_in;
        let is_judged_by_labels = !now.governance.flow_rules().is_empty();
        (is_judged_by_labels && (labels(&before) != labels(&after) || (reads && !same_private)))
            || !same_after(&then.interceptors, &now.interceptors, tool)
    }

    /// The same for a tool that the caller executes.
    pub(super) fn change_given_result(&self, tool: &str) -> bool {
        let Some((then, now)) = self.different() else { return false };
        let is_judged_by_labels = !now.governance.flow_rules().is_empty();
        (is_judged_by_labels && then.client_tool_yields(tool) != now.client_tool_yields(tool))
            || !same_after(&then.interceptors, &now.interceptors, tool)
    }

    /// The effect of the new stop conditions before an iteration. `met` are those that were met before; `delegates`
    /// says whether the run has started child runs.
    pub(super) fn stopping(
        &self,
        met: &mut BTreeSet<usize>,
        state: &State,
        delegates: bool,
        now: DateTime<Utc>,
    ) -> Stopping {
        if self.new_conditions.len() <= met.len() {
            return Stopping::Continues;
        }
        if delegates {
            return Stopping::Unclear;
        }
        let conditions = &self.judging.definition.governance.budget.stop_conditions;
        let facts = state.facts(&Descendants::default(), now);
        loop {
            let mut dealt_with = met.clone();
            dealt_with.extend((0..conditions.len()).filter(|it| !self.new_conditions.contains(it)));
            let Some((place, unreadable)) = self.judging.condition_met(&dealt_with, &facts) else {
                return Stopping::Continues;
            };
            met.insert(place);
            match conditions.get(place).map(|condition| condition.action) {
                Some(StopAction::Warn) if unreadable.is_none() => {}
                Some(StopAction::Stop) => return Stopping::Ends,
                _ => return Stopping::Unclear,
            }
        }
    }

    /// Both definitions, if they differ for any tool.
    fn different(&self) -> Option<(&Definition, &Definition)> {
        let recorded = self.recorded.as_deref().filter(|_| !self.same_tooling)?;
        Some((recorded, &self.judging.definition))
    }
}

/// Whether a tool starts runs.
pub(super) fn starts_runs(tool: &str) -> bool {
    Delegation::of_tool(tool).is_some()
}

/// The options of a tool in both, without what the tool itself declares.
fn options(then: &Definition, now: &Definition, tool: &str) -> (CallOptions, CallOptions) {
    let of =
        |definition: &Definition| call_options(&definition.tool_options, tool, Defaults::default());
    (of(then), of(now))
}

fn is_for(glob: &str, tool: &str) -> bool {
    glob::means(glob, tool) != Some(false)
}

/// Whether the same is done to calls of a tool, in the same order.
fn same_before(then: &Interceptors, now: &Interceptors, tool: &str) -> bool {
    let of = |all: &Interceptors| -> Vec<(Option<String>, BeforeInterceptor)> {
        let own = all.before.iter().map(|it| (None, it));
        let inherited = all
            .inherited
            .iter()
            .flat_map(|from| from.before.iter().map(|it| (Some(from.directory.clone()), it)));
        let meant = own.chain(inherited).filter(|(_, it)| is_for(&it.tool, tool));
        meant.map(|(directory, it)| (directory, it.clone())).collect()
    };
    of(then) == of(now)
}

/// Whether the same is done to results of a tool, in the same order.
fn same_after(then: &Interceptors, now: &Interceptors, tool: &str) -> bool {
    let of = |all: &Interceptors| -> Vec<AfterInterceptor> {
        let inherited = all.inherited.iter().flat_map(|from| &from.after);
        let meant = all.after.iter().chain(inherited).filter(|it| is_for(&it.tool, tool));
        meant.cloned().collect()
    };
    of(then) == of(now)
}
