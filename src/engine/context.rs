//! Compaction: makes a conversation fit a context window.
//!
//! First, the oldest tool results are replaced by a note of their size. If that is not enough, the oldest
//! turns are replaced by a summary, which a model writes from a plain-text record of them, without tools.
//! The system prompt, the run's first message and the last turns stay. A turn is only removed as a whole,
//! with its calls, its results and its opaque blocks. Large results of the last turns are replaced only if
//! a provider refused the call and almost nothing else can be removed. This file has no I/O: `state`
//! decides when a compaction is due, the shell calls the model.

use std::collections::HashSet;
use std::fmt::Write as _;

use uuid::Uuid;

use super::phrases;
use crate::event::{CompactionCause, ContextCompacted, Summary, SummaryCall};
use crate::message::{Conversation, ToolResult, Turn};
use crate::providers::estimate;

/// Smaller results are not cleared, in bytes: little would be gained, and a note would be cleared again.
const WORTH_CLEARING: usize = 64;

/// Results of the last turns that are smaller are not cleared, in bytes.
const LARGE: usize = 1024;

/// A summary with fewer bytes of text says nothing.
const SHORTEST_SUMMARY: usize = 64;

/// A summary is worth a model call if it replaces at least 1/32 of the bytes that the next model call reads.
const LEAST_SUMMARISED: usize = 32;
/// Large results of the last turns are cleared only if less than 1/8 of the bytes is removed without them.
const LEAST_REMOVED: usize = 8;

/// The least and the greatest limit of a summary, in tokens.
const SHORTEST_CAP: u64 = 256;
const LONGEST_CAP: u64 = 4096;

/// A record shows at least so many bytes of each message and result.
const LEAST_EXCERPT: usize = 200;

/// The tokens above which a window counts as nearly full: 80 %.
pub fn nearly_full(window: u64) -> u64 {
    window - window / 5
}

/// What a model call reads: conversation and offered tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Tokens, estimated.
    pub tokens: u64,
    /// Bytes.
    pub bytes: usize,
}

impl Load {
    /// The tokens that remain if these bytes are removed, assuming equal tokens per byte.
    fn without(self, bytes: usize) -> u64 {
        let (left, all) = (self.bytes.saturating_sub(bytes) as u128, self.bytes.max(1) as u128);
        u64::try_from(u128::from(self.tokens) * left / all).unwrap_or(u64::MAX)
    }

    /// The bytes of this number of tokens.
    pub fn bytes_of(self, tokens: u64) -> usize {
        let bytes = u128::from(tokens) * self.bytes as u128 / u128::from(self.tokens.max(1));
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }
}

/// What to remove from a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compaction {
    /// Why.
    pub cause: CompactionCause,
    /// Calls whose results are cleared: the oldest first, those of the last turns at the end.
    pub cleared: Vec<Uuid>,
    /// How many of the replaceable turns are summarised, the oldest; 0 where no model is needed.
    pub summarised: usize,
    /// Failed tries of the call that did not fit.
    pub failed_tries: u32,
    window: Option<u64>,
    /// The models that read it, each as `provider/model`.
    readers: Vec<String>,
    load: Load,
    /// The goal, in tokens.
    goal: u64,
}

/// The summary of the oldest turns, as the model wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenSummary {
    /// Its text.
    pub text: String,
    /// The model call that wrote it.
    pub call: SummaryCall,
}

/// Chooses what to remove; `None` if nothing can be removed. A window that is nearly full is emptied to a
/// half. A refused call is halved, because its real size is unknown and it is repeated only once. If no
/// summary may be requested, only results are removed.
pub fn plan(
    conversation: &Conversation,
    load: Load,
    readers: &[String],
    cause: CompactionCause,
    window: Option<u64>,
    may_summarise: bool,
) -> Option<Compaction> {
    let most = window.unwrap_or(load.tokens);
    let (enough, goal) = match cause {
        CompactionCause::WindowNearlyFull => (nearly_full(most), most / 2),
        CompactionCause::ProviderRefused => (most.min(load.tokens) / 2, most.min(load.tokens) / 2),
    };
    let mut cleared = oldest_results(conversation, load, goal);
    let mut smaller = conversation.clone();
    smaller.clear_results(&cleared);
    let bytes = |conversation: &Conversation| estimate::bytes(conversation, readers);
    let freed = bytes(conversation) - bytes(&smaller);
    let mut summarised = if may_summarise && load.without(freed) > enough {
        oldest_turns(&smaller, load.bytes_of(goal / 2), readers)
    } else {
        0
    };
    if !is_worth_a_summary(oldest_bytes(conversation, summarised, readers), load) {
        summarised = 0;
    }
    if cause == CompactionCause::ProviderRefused {
        let freed = freed + oldest_bytes(&smaller, summarised, readers);
        if load.without(freed) > enough && freed.saturating_mul(LEAST_REMOVED) < load.bytes {
            cleared.extend(largest_results(conversation, load, freed, goal));
        }
    }
    let (failed_tries, readers) = (0, readers.to_vec());
    let compaction =
        Compaction { cause, cleared, summarised, failed_tries, window, readers, load, goal };
    (!compaction.cleared.is_empty() || summarised > 0).then_some(compaction)
}

/// The calls whose results are cleared, from the oldest, until the goal is reached.
fn oldest_results(conversation: &Conversation, load: Load, goal: u64) -> Vec<Uuid> {
    let mut freed = 0;
    let results = conversation.replaceable().flat_map(results_of);
    let worth = results.filter(|result| result.content.len() > WORTH_CLEARING);
    let needed = worth.take_while(|result| {
        let is_needed = load.without(freed) > goal;
        freed += result.content.len() - WORTH_CLEARING;
        is_needed
    });
    needed.map(|result| result.call_id).collect()
}

/// The large results of the last turns, from the largest, until the goal is reached; `freed` bytes are
/// removed already.
fn largest_results(
    conversation: &Conversation,
    load: Load,
    mut freed: usize,
    goal: u64,
) -> Vec<Uuid> {
    let results = conversation.last_turns().flat_map(results_of);
    let mut large: Vec<_> = results.filter(|result| result.content.len() > LARGE).collect();
    large.sort_by_key(|result| std::cmp::Reverse(result.content.len()));
    let needed = large.into_iter().take_while(|result| {
        let is_needed = load.without(freed) > goal;
        freed += result.content.len() - WORTH_CLEARING;
        is_needed
    });
    needed.map(|result| result.call_id).collect()
}

/// Whether a summary of turns of this size can be noticeably shorter than they are.
fn is_worth_a_summary(replaced: usize, load: Load) -> bool {
    replaced > phrases::summary("").len() + SHORTEST_SUMMARY
        && replaced.saturating_mul(LEAST_SUMMARISED) >= load.bytes
}

fn oldest_bytes(conversation: &Conversation, turns: usize, readers: &[String]) -> usize {
    let oldest = conversation.replaceable().take(turns);
    oldest.map(|turn| estimate::turn_bytes(turn, readers)).sum()
}

/// How many of the replaceable turns are summarised: all except the last ones, of which as many stay as fit.
/// An answer and the reply to it are kept or summarised together.
fn oldest_turns(conversation: &Conversation, room: usize, readers: &[String]) -> usize {
    let bytes = |turn: &Turn| estimate::turn_bytes(turn, readers);
    let (middle, mut last) =
        (conversation.replaceable().collect::<Vec<_>>(), conversation.last_turns());
    let mut end = middle.len();
    let mut kept: usize = last.clone().map(bytes).sum();
    while end > 1 {
        kept += bytes(middle[end - 1]);
        if kept > room {
            break;
        }
        end -= 1;
    }
    while matches!(middle.get(end), Some(Turn::User(_))) {
        end += 1;
    }
    if end == middle.len() && matches!(last.next(), Some(Turn::User(_))) {
        end = end.saturating_sub(1);
    }
    let oldest = &middle[..end];
    if oldest.iter().any(|turn| matches!(turn, Turn::Assistant(_))) { oldest.len() } else { 0 }
}

impl Compaction {
    /// The instructions of the model that writes the summary.
    pub fn request(&self, conversation: &Conversation) -> Conversation {
        let task = match conversation.first_message() {
            Some(Turn::User(text)) => text.as_str(),
            _ => "",
        };
        let room = self.load.bytes_of(self.goal);
        let oldest = conversation.replaceable().take(self.summarised);
        let mut request = Conversation::new(phrases::SUMMARISER);
        request.push_user(phrases::summarise(&excerpt(task, room / 4), &record(oldest, room)));
        request
    }

    /// The limit of the summary, in tokens.
    pub fn summary_cap(&self) -> u32 {
        u32::try_from((self.goal / 4).clamp(SHORTEST_CAP, LONGEST_CAP)).unwrap_or(u32::MAX)
    }

    /// The event of the finished compaction. A summary that is empty, or not smaller than what it replaces,
    /// is not used.
    pub fn into_event(
        self,
        conversation: &Conversation,
        (attempt, iteration): (u32, u32),
        written: Option<WrittenSummary>,
    ) -> ContextCompacted {
        let (text, call) =
            written.map_or((String::new(), None), |written| (written.text, Some(written.call)));
        let summary = self.summary(conversation, text.trim());
        let mut smaller = conversation.clone();
        smaller.clear_results(&self.cleared);
        let summary = summary
            .filter(|summary| smaller.summarise(summary.turns, summary.text.as_str()).is_ok());
        let gone =
            conversation.replaceable().take(summary.as_ref().map_or(0, |summary| summary.turns));
        let gone: HashSet<Uuid> = gone.flat_map(calls_of).collect();
        let bytes = |conversation: &Conversation| estimate::bytes(conversation, &self.readers);
        let (before, after) = (bytes(conversation), bytes(&smaller));
        ContextCompacted {
            attempt,
            iteration,
            cause: self.cause,
            cleared: self.cleared.into_iter().filter(|call| !gone.contains(call)).collect(),
            summary,
            call,
            failed_tries: self.failed_tries,
            window: self.window,
            tokens_before: self.load.tokens,
            tokens_after: self.load.without(before.saturating_sub(after)),
            bytes_before: before as u64,
            bytes_after: after as u64,
        }
    }

    fn summary(&self, conversation: &Conversation, text: &str) -> Option<Summary> {
        let replaced = oldest_bytes(conversation, self.summarised, &self.readers);
        let summary = Summary { turns: self.summarised, text: phrases::summary(text) };
        (!text.is_empty() && summary.text.len() < replaced).then_some(summary)
    }
}

fn results_of(turn: &Turn) -> &[ToolResult] {
    match turn {
        Turn::Assistant(turn) => turn.results(),
        Turn::User(_) => &[],
    }
}

fn calls_of(turn: &Turn) -> impl Iterator<Item = Uuid> {
    results_of(turn).iter().map(|result| result.call_id)
}

/// Turns as plain text of about so many bytes.
fn record<'t>(turns: impl Iterator<Item = &'t Turn> + Clone, room: usize) -> String {
    let pieces = turns.clone().map(|turn| match turn {
        Turn::User(_) => 1,
        Turn::Assistant(turn) => 1 + 2 * turn.results().len(),
    });
    let share = (room / pieces.sum::<usize>().max(1)).max(LEAST_EXCERPT);
    let mut text = String::new();
    for turn in turns {
        match turn {
            Turn::User(said) => {
                let _ = writeln!(text, "To the agent: {}\n", excerpt(said, share));
            }
            Turn::Assistant(turn) => {
                if !turn.message().text.is_empty() {
                    let _ = writeln!(text, "Agent: {}\n", excerpt(&turn.message().text, share));
                }
                for (call, result) in turn.message().tool_calls.iter().zip(turn.results()) {
                    let outcome = if result.is_error { "Failed" } else { "Result" };
                    let (arguments, content) =
                        (excerpt(&call.arguments, share), excerpt(&result.content, share));
                    let _ = writeln!(
                        text,
                        "Call of {}: {arguments}\n{outcome}: {content}\n",
                        call.name
                    );
                }
            }
        }
    }
    text
}

/// The beginning of a text, with a note of how much is missing.
fn excerpt(text: &str, bytes: usize) -> String {
    let head = &text[..text.floor_char_boundary(bytes)];
    match text.len() - head.len() {
        0 => head.to_owned(),
        missing => format!("{head} [{missing} bytes left out]"),
    }
}
