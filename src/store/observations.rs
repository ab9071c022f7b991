//! Observations of a run that later runs may recall: short texts of its events.
//!
//! Text that the model or a tool marked as private is omitted, apparent secrets are removed, and the rest is
//! shortened. Words of a query are extracted one by one, so that a text is never parsed as query syntax. Whether
//! a run is observed is decided when it is started.

use std::collections::HashSet;

use super::RunWrite;
use super::tables::Observation;
use crate::bounds::secrets::redacted;
use crate::event::{Event, RunEvent, ToolCallCompleted};
use crate::message::{CallTarget, Turn};
use crate::run::{Outcome, text_of};

/// The kinds of observations.
pub const KINDS: &[&str] = &[INPUT, MODEL_RESPONSE, TOOL_CALL, DECISION, ERROR];

const INPUT: &str = "input";
const MODEL_RESPONSE: &str = "model_response";
const TOOL_CALL: &str = "tool_call";
const DECISION: &str = "decision";
const ERROR: &str = "error";

/// Bytes of an observation.
const MAX_CONTENT: usize = 2048;
/// Bytes of a call's arguments in one, so that there is room for its result.
const MAX_ARGUMENTS: usize = 512;
/// Different words of a query that are looked for, the first ones.
const MAX_WORDS: usize = 32;
/// Bytes of a word; longer ones are skipped.
const MAX_WORD: usize = 64;
/// Bytes of a query that are looked at.
const MAX_QUERY: usize = 16 * 1024;

/// Words that are too common to search for: those that PostgreSQL leaves out, so that both databases find the same.
const STOP_WORDS: &str = "\
    about above after again against all am an and any are as at be because been before being \
    below between both but by can did do does doing don down during each few for from further \
    had has have having he her here hers herself him himself his how if in into is it its \
    itself just me more most my myself no nor not now of off on once only or other our ours \
    ourselves out over own same she should so some such than that the their theirs them \
    themselves then there these they this those through to too under until up very was we were \
    what when where which while who whom why will with you your yours yourself yourselves";

/// The name of the tags around private text.
const PRIVATE: &str = "private";

/// The observation of an event; `None` if there is none, or if the run is not observed.
pub(super) fn observation(write: &RunWrite, event: &Event) -> Option<Observation> {
    let origin = write.origin.as_ref();
    if !origin.is_observed {
        return None;
    }
    let (kind, text) = match &event.what {
        RunEvent::RunStarted { turns, .. } => (INPUT, input_text(turns)),
        // An answer without calls is kept once, when it is the run's output.
        RunEvent::ModelResponded(response) if response.message.tool_calls.is_empty() => {
            return None;
        }
        RunEvent::ModelResponded(response) => (MODEL_RESPONSE, response.message.text.clone()),
        RunEvent::RunCompleted(ending) => (MODEL_RESPONSE, output_text(&ending.outcome)),
        // Recalled memories and skills are stored already.
        RunEvent::ToolCallCompleted(call)
            if ["recall", "use_skill"].contains(&call.tool.as_str()) =>
        {
            return None;
        }
        RunEvent::ToolCallCompleted(call) if call.target == CallTarget::Tool => {
            (TOOL_CALL, call_text(write, call))
        }
        RunEvent::ToolCallBlocked(call) => {
            (DECISION, format!("{} was refused: {}", call.tool, call.reason))
        }
        RunEvent::ValidationFailed { errors, .. } => {
            let errors: Vec<String> =
                errors.iter().map(|e| format!("{} {}", e.pointer, e.message)).collect();
            (DECISION, format!("The output was not accepted: {}", errors.join("; ")))
        }
        RunEvent::RunFailed(ending) => {
            (ERROR, ending.outcome.error().map(|e| e.message.clone()).unwrap_or_default())
        }
        RunEvent::RunQueued {}
        | RunEvent::SessionLoaded { .. }
        | RunEvent::SkillActivated(_)
        | RunEvent::RunResumed { .. }
        | RunEvent::AttemptStarted { .. }
        | RunEvent::IterationStarted { .. }
        | RunEvent::ToolCallStarted(_)
        | RunEvent::ToolCallCompleted(_)
        | RunEvent::ToolCallAwaitingClient(_)
        | RunEvent::ToolCallAwaitingChild(_)
        | RunEvent::ApprovalRequested(_)
        | RunEvent::ApprovalResolved(_)
        | RunEvent::HandoffStarted { .. }
        | RunEvent::ScanWarned(_)
        | RunEvent::LabelsChanged(_)
        | RunEvent::BudgetWarned { .. }
        | RunEvent::OutputProposed { .. }
        | RunEvent::OutputReflected { .. }
        | RunEvent::ConfirmationRequested { .. }
        | RunEvent::DecisionExtractionFailed(_)
        | RunEvent::DecisionValidationFailed(_)
        | RunEvent::ToolChoiceUnmet { .. }
        | RunEvent::AnswerBlank { .. }
        | RunEvent::ModelRetried(_)
        | RunEvent::ModelInterrupted(_)
        | RunEvent::ContextCompacted(_)
        | RunEvent::CallGiven(_)
        | RunEvent::RunCancelRequested { .. }
        | RunEvent::RunCancelled(_) => return None,
    };
    let content = presentable(&text);
    (!content.is_empty()).then(|| Observation {
        run_id: write.run_id,
        seq: event.seq,
        tenant: write.caller.tenant.clone(),
        agent: origin.agent.clone(),
        session_id: origin.session_id.clone(),
        at: event.at,
        kind: kind.to_owned(),
        content,
        labels: write.totals.labels.names(),
    })
}

/// The input of the run.
fn input_text(turns: &[Turn]) -> String {
    match turns.last() {
        Some(Turn::User(text)) => text.clone(),
        _ => String::new(),
    }
}

/// An output as text: the string itself if it is one, otherwise its JSON.
fn output_text(outcome: &Outcome) -> String {
    let Outcome::Completed { output, .. } = outcome else { return String::new() };
    text_of(output).map_or_else(|| output.to_string(), str::to_owned)
}

/// A call as a short text; its arguments are those of its audit record, which contains no secrets.
fn call_text(write: &RunWrite, call: &ToolCallCompleted) -> String {
    let audited = write.audit.iter().find(|record| record.call_id == call.call_id);
    let arguments = audited.map(|record| without_private(&record.arguments)).unwrap_or_default();
    let outcome = if call.failure.is_some() { "failed" } else { "returned" };
    format!("{} {} {outcome}: {}", call.tool, cut(&arguments, MAX_ARGUMENTS), call.content)
}

/// A text as it is stored.
fn presentable(text: &str) -> String {
    let text = without_private(text).replace('\0', "");
    cut(redacted(&text).trim(), MAX_CONTENT)
}

/// Removes the text between private tags, which may be nested. An unclosed tag extends to the end of the text.
fn without_private(mut text: &str) -> String {
    let mut public = String::with_capacity(text.len());
    let mut depth = 0_usize;
    while let Some(begin) = text.find('<') {
        let tag = Tag::at(&text[begin..]).filter(|(tag, _)| *tag == Tag::Opening || depth > 0);
        let (kept, rest) = match tag {
            Some((_, length)) => (begin, begin + length),
            None => (begin + 1, begin + 1),
        };
        if depth == 0 {
            public.push_str(&text[..kept]);
        }
        match tag {
            Some((Tag::Opening, _)) => depth += 1,
            Some((Tag::Closing, _)) => depth -= 1,
            None => {}
        }
        text = &text[rest..];
    }
    if depth == 0 { public + text } else { public }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tag {
    Opening,
    Closing,
}

impl Tag {
    /// The tag at the beginning of a text, and its length. In doubt, a tag opens: an opening tag may have any text
    /// after its name, a closing tag only white space.
    fn at(text: &str) -> Option<(Self, usize)> {
        let rest = text.strip_prefix('<')?.trim_start();
        let (tag, rest) = match rest.strip_prefix('/') {
            Some(rest) => (Self::Closing, rest.trim_start()),
            None => (Self::Opening, rest),
        };
        rest.get(..PRIVATE.len()).filter(|name| name.eq_ignore_ascii_case(PRIVATE))?;
        let rest = &rest[PRIVATE.len()..];
        let rest = match tag {
            Self::Closing => rest.trim_start().strip_prefix('>')?,
            Self::Opening if rest.starts_with(is_name_char) => return None,
            Self::Opening => match rest.find(['<', '>']) {
                Some(end) => rest[end..].strip_prefix('>').unwrap_or(&rest[end..]),
                None => "",
            },
        };
        Some((tag, text.len() - rest.len()))
    }
}

/// Whether the character can be part of the name of a tag.
fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':')
}

fn cut(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(bytes - '…'.len_utf8())])
}

/// The words of a text that can be looked for, each once: letters and digits only.
pub(super) fn words(text: &str) -> Vec<String> {
    let text = &text[..text.floor_char_boundary(MAX_QUERY)];
    let mut seen = HashSet::new();
    let words =
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| word.chars().nth(1).is_some());
    let words = words.filter(|word| word.len() <= MAX_WORD).map(str::to_lowercase);
    let words = words.filter(|word| !STOP_WORDS.split(' ').any(|common| common == word));
    words.filter(|word| seen.insert(word.clone())).take(MAX_WORDS).collect()
}

#[cfg(test)]
#[path = "observations_tests.rs"]
mod tests;
