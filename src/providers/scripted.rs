//! A deterministic model for demos, tests and examples: it answers from `scenarios/<name>.yaml`.
//!
//! The model's name is the scenario's. Call number *n* of a run gets step *n*; the last step
//! repeats. Files are read when used and again when they change. Like a real model it calls nothing
//! when it has no tools or may not use them; unlike one it answers 400, with the reason, when the
//! step does not fit a forced tool choice.

mod render;
mod scenario;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use parking_lot::Mutex;

use self::render::Renderer;
use self::scenario::{ErrorStep, Scenario, Step};
use super::{
    Completion, Delta, Deltas, FailureKind, ModelRequest, Provider, ProviderError, RawToolCall,
    ToolChoice, estimate, failure,
};
use crate::bounds::mistakes;
use crate::bounds::nearest::meant;
use crate::message::{Conversation, FinishReason, Usage};

/// Largest scenario file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Plays the scenarios of one directory.
#[derive(Debug)]
pub struct Scripted {
    dir: PathBuf,
    loaded: Mutex<HashMap<String, Loaded>>,
}

#[derive(Debug)]
struct Loaded {
    modified: Option<SystemTime>,
    size: u64,
    scenario: Arc<Scenario>,
}

impl Scripted {
    /// Scenarios are the files `<name>.yaml` of this directory, which is not read yet.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, loaded: Mutex::default() }
    }

    /// Checks that a scenario of that name exists and can be played.
    ///
    /// # Errors
    /// What is wrong: the name, the file, or a line in it.
    pub fn check(&self, name: &str) -> Result<(), String> {
        self.scenario(name).map(|_| ()).map_err(|error| match error.kind {
            FailureKind::NotFound => self.not_there(name),
            _ => self.beneath_dir(&error.message),
        })
    }

    /// All that is wrong with a scenario; nothing where it can be played.
    pub fn mistakes(&self, name: &str) -> Vec<String> {
        let Err(first) = self.check(name) else { return Vec::new() };
        let file = format!("{name}.yaml");
        let Ok(text) = std::fs::read_to_string(self.dir.join(&file)) else { return vec![first] };
        let mistakes = mistakes::all(&text, |_| None, |text| Scenario::parse(text).map(drop));
        let with_file = |mistake| self.beneath_dir(&format!("{file}: {mistake}"));
        let others = mistakes.iter().map(with_file);
        let others = others.filter(|other| *other != first).collect::<Vec<_>>();
        std::iter::once(first).chain(others).collect()
    }

    /// The names of all scenarios, sorted.
    pub fn names(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let name_of = |file: std::fs::DirEntry| {
            Some(file.file_name().to_str()?.strip_suffix(".yaml")?.to_owned())
        };
        let mut names: Vec<String> = files.filter_map(name_of).collect();
        names.sort_unstable();
        names
    }

    /// Puts the name of the directory before a text that begins with a file name.
    fn beneath_dir(&self, file: &str) -> String {
        format!("{}/{file}", self.dir.file_name().unwrap_or_default().display())
    }

    fn not_there(&self, name: &str) -> String {
        let names = self.names();
        let meant = meant(name, names.iter().map(String::as_str));
        format!("there is no scenario named {name:?}{meant}; there are: {}", names.join(", "))
    }

    /// Parses a file only when it has changed.
    fn scenario(&self, name: &str) -> Result<Arc<Scenario>, ProviderError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.starts_with('.') || !name.chars().all(plain) {
            return Err(not_found(&format!("{name:?} is not the name of a scenario")));
        }
        let file = format!("{name}.yaml");
        let path = self.dir.join(&file);
        let metadata =
            std::fs::metadata(&path).map_err(|error| not_found(&format!("{file}: {error}")))?;
        let (modified, size) = (metadata.modified().ok(), metadata.len());
        if size > MAX_FILE {
            return Err(bad(&format!("{file}: larger than 1 MiB")));
        }
        let mut loaded = self.loaded.lock();
        if let Some(known) = loaded.get(name)
            && (known.modified, known.size) == (modified, size)
        {
            return Ok(known.scenario.clone());
        }
        let text =
            std::fs::read_to_string(&path).map_err(|error| bad(&format!("{file}: {error}")))?;
        let scenario =
            Scenario::parse(&text).map_err(|problem| bad(&format!("{file}: {problem}")))?;
        let scenario = Arc::new(scenario);
        loaded.insert(name.to_owned(), Loaded { modified, size, scenario: scenario.clone() });
        Ok(scenario)
    }
}

/// Characters of a tool call's arguments per delta.
const PIECE: usize = 16;

#[async_trait]
impl Provider for Scripted {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let broken = |problem: String| bad(&format!("{}.yaml: {problem}", request.model));
        let scenario = self.scenario(request.model)?;
        let (key, step) = scenario.step(request).map_err(broken)?;
        let answer = match &step.error {
            Some(error) => Renderer::new(request)
                .text(&error.message)
                .map(|message| Err(simulated(error, &message))),
            None => completion(step, request).map(Ok),
        };
        let answer = answer.map_err(|problem| broken(format!("{key}: {problem}")))?;
        let delay = Duration::from_millis(step.delay_ms);
        match &answer {
            Ok(completion) if request.deltas.are_wanted() => {
                write_out(completion, request.deltas, delay).await;
            }
            _ if delay.is_zero() => {}
            _ => tokio::time::sleep(delay).await,
        }
        answer
    }
}

/// Sends an answer as deltas, spread over `delay`.
async fn write_out(completion: &Completion, deltas: Deltas<'_>, delay: Duration) {
    let words = completion.text.split_inclusive(' ').map(|word| Delta::Text(word.to_owned()));
    let calls = completion.tool_calls.iter().enumerate().flat_map(|(index, call)| {
        let piece = move |wire_name, arguments| Delta::ToolCall { index, wire_name, arguments };
        let name = std::iter::once(piece(Some(call.wire_name.clone()), String::new()));
        let characters: Vec<char> = call.arguments.chars().collect();
        let pieces: Vec<Delta> =
            characters.chunks(PIECE).map(|chunk| piece(None, chunk.iter().collect())).collect();
        name.chain(pieces)
    });
    let pieces: Vec<Delta> = words.chain(calls).collect();
    let pause = delay / u32::try_from(pieces.len()).unwrap_or(u32::MAX).max(1);
    for piece in pieces {
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        deltas.send(piece);
    }
}

/// The answer of a step; a message if the step cannot be rendered or the request forbids it.
fn completion(step: &Step, request: &ModelRequest<'_>) -> Result<Completion, String> {
    let may_call = !request.tools.is_empty() && request.tool_choice != ToolChoice::None;
    let calls = if may_call { step.tool_calls.as_slice() } else { &[] };
    match &request.tool_choice {
        ToolChoice::Required if may_call && calls.is_empty() => {
            return Err("it has no tool call, but tool_choice demands one".into());
        }
        ToolChoice::Tool(name) if may_call && !calls.iter().any(|call| call.tool == *name) => {
            return Err(format!("it does not call {name}, but tool_choice demands that"));
        }
        _ => {}
    }
    let renderer = Renderer::new(request);
    let text =
        step.text.as_deref().map(|text| renderer.text(text)).transpose()?.unwrap_or_default();
    let mut tool_calls = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        tool_calls.push(RawToolCall {
            id: format!("call_{}_{index}", request.step),
            wire_name: request.names.to_wire(&call.tool).into_owned(),
            arguments: renderer.arguments(&call.arguments)?,
        });
    }
    let by_itself =
        if tool_calls.is_empty() { FinishReason::Stop } else { FinishReason::ToolCalls };
    let usage =
        step.usage.map_or_else(|| estimated(request.conversation, &text, &tool_calls), Usage::from);
    Ok(Completion {
        text: text.replace('\0', ""),
        thinking: None,
        tool_calls,
        opaque: None,
        finish_reason: step.finish_reason.unwrap_or(by_itself),
        usage: Some(usage),
    })
}

/// An estimate, so that budgets and totals have something to count; offered tools do not count.
fn estimated(conversation: &Conversation, text: &str, calls: &[RawToolCall]) -> Usage {
    let (input_tokens, output_tokens) =
        (estimate::of_conversation(conversation, &[]), estimate::of_answer(text, calls));
    Usage { input_tokens, output_tokens, estimated: true, ..Usage::default() }
}

/// The error that a real server's answer would become.
fn simulated(error: &ErrorStep, message: &str) -> ProviderError {
    ProviderError {
        code: error.code.clone(),
        retry_after: error.retry_after,
        ..refusal(
            failure::classify(error.status, error.code.as_deref(), message),
            error.status,
            message,
        )
    }
}

fn not_found(message: &str) -> ProviderError {
    refusal(FailureKind::NotFound, 404, message)
}

fn bad(message: &str) -> ProviderError {
    refusal(FailureKind::BadRequest, 400, message)
}

fn refusal(kind: FailureKind, status: u16, message: &str) -> ProviderError {
    ProviderError {
        provider: "scripted".into(),
        kind,
        status: Some(status),
        code: None,
        message: failure::sanitised(message, &[]),
        retry_after: None,
        should_retry: None,
        usage: None,
    }
}

#[cfg(test)]
#[path = "scripted_tests.rs"]
mod tests;
