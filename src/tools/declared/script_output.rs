//! The output of a script: its answer, its progress, and the rest for the log.
//!
//! The script belongs to the operator, but its output is untrusted. Its answer is JSON or text, checked
//! against the declared schema, if any. Progress messages are bounded in rate and size. If it fails, the
//! model reads the end of its standard error.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use super::mapping::removable;
use super::outcome;
use crate::bounds::json::{self, Unreadable};
use crate::bounds::schema::{Fault, Rejected, Schema};
use crate::bounds::secrets::{self, REDACTED, redact, redacted};
use crate::event::ToolProgress;
use crate::tools::results::MAX_RESULT;
use crate::tools::sandbox::plan::Stopped;
use crate::tools::sandbox::{JobResult, Output, shortened};
use crate::tools::{CallOutcome, ToolContext};

/// Bytes of one piece of progress.
const MAX_PROGRESS: usize = 4 * 1024;
/// Pieces that are passed on at once, and later in a second.
const BURST: u32 = 10;
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of standard error that a model reads, and that are logged.
const MAX_SAID: usize = 4 * 1024;
/// Bytes of an answer whose middle is gone: few enough that it is not cut again.
const MAX_CUT: usize = MAX_RESULT - 1024;
/// Faults of an answer that are listed to a model.
const MAX_FAULTS: usize = 8;

/// The progress that one call reports.
pub(super) struct ProgressReporter<'a> {
    context: &'a ToolContext,
    tool: &'a str,
    left: u32,
    since: Instant,
}

#[derive(Deserialize)]
struct Line {
    progress: Value,
}

impl<'a> ProgressReporter<'a> {
    pub(super) fn new(context: &'a ToolContext, tool: &'a str) -> Self {
        Self { context, tool, left: BURST, since: Instant::now() }
    }

    /// Whether a line of standard error is output. A progress message is none, and is passed on.
    pub(super) fn is_output(&mut self, line: &str) -> bool {
        if !line.starts_with('{') || line.len() > MAX_PROGRESS {
            return true;
        }
        let Ok(Line { progress }) = json::read(line) else { return true };
        if self.may_tell() {
            let (call_id, tool) = (self.context.call_id, self.tool.to_owned());
            let mut progress = progress;
            redact(&mut progress);
            self.context.listener.tell(ToolProgress { call_id, tool, progress });
        }
        false
    }

    fn may_tell(&mut self) -> bool {
        let earned = self.since.elapsed().as_millis() / PAUSE.as_millis();
        let earned = u32::try_from(earned).unwrap_or(BURST);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(BURST);
            self.since = Instant::now();
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

/// Reads the answers of a script's calls.
pub(super) struct AnswerReader {
    schema: Option<Schema>,
    /// Values of variables that no model sees.
    secrets: Vec<String>,
}

impl AnswerReader {
    pub(super) fn new(schema: Option<Schema>, secrets: Vec<String>) -> Self {
        Self { schema, secrets: removable(secrets) }
    }

    /// The answer, or the error.
    pub(super) fn of(&self, ran: &JobResult, timeout: Duration) -> Result<String, String> {
        let JobResult { stdout, stderr, .. } = ran;
        if let Some(failed) = failure(ran, timeout) {
            let end = self.end_of(stderr);
            let said = if end.is_empty() {
                String::new()
            } else {
                format!("\nIts standard error ends with:\n{end}")
            };
            return Err(format!("The {failed}.{said}"));
        }
        let text = self.without_secrets(stdout.text.trim_end().to_owned());
        match &self.schema {
            Some(schema) => {
                let value = read(stdout, &text)?;
                checked(schema, &value).map(|()| text)
            }
            None if text.is_empty() => Ok("The program wrote nothing.".to_owned()),
            None if stdout.omitted > 0 => {
                let (head, tail) = stdout.ends();
                let [head, tail] =
                    [head, tail.trim_end()].map(|end| self.without_secrets(end.to_owned()));
                Ok(shortened((&head, &tail), stdout.omitted, MAX_CUT, char::len_utf8))
            }
            None => Ok(text),
        }
    }

    /// The result of a call that took effect, as the program that is asked about it reports.
    pub(super) fn of_query(&self, ran: &JobResult, timeout: Duration) -> CallOutcome {
        let text = self.without_secrets(ran.stdout.text.trim().to_owned());
        let unanswered = failure(ran, timeout).map(|failed| format!("the {failed}"));
        let too_long =
            (ran.stdout.omitted > 0).then(|| "the program's answer is too long".to_owned());
        if let Some(why) = unanswered.or(too_long) {
            return CallOutcome::Unknown(why);
        }
        let result = match outcome::of_program(&text) {
            Ok(result) => result,
            Err(outcome) => return outcome,
        };
        let shown = match (&self.schema, result) {
            (Some(schema), result) => {
                let result = result.unwrap_or_default();
                checked(schema, &result).map(|()| result.to_string())
            }
            (None, None) => Ok("The call took effect; its result is not known.".to_owned()),
            (None, Some(Value::String(text))) => Ok(text),
            (None, Some(result)) => Ok(result.to_string()),
        };
        CallOutcome::Happened(shown.map(|text| self.without_secrets(text)))
    }

    /// Logs what the program wrote to standard error.
    pub(super) fn log(&self, ran: &JobResult, context: &ToolContext, tool: &str) {
        let said = self.end_of(&ran.stderr);
        if !said.is_empty() {
            let (run_id, call_id, exit_code) = (context.run_id, context.call_id, ran.exit_code);
            let said = redacted(&said);
            tracing::info!(%run_id, %call_id, tool, exit_code, said = %said, "standard error of a script");
        }
    }

    fn end_of(&self, output: &Output) -> String {
        let text = self.without_secrets(output.text.trim().to_owned());
        if text.len() <= MAX_SAID {
            return text;
        }
        format!("…{}", secrets::tail(&text, MAX_SAID))
    }

    fn without_secrets(&self, mut text: String) -> String {
        for secret in &self.secrets {
            if text.contains(secret.as_str()) {
                text = text.replace(secret.as_str(), REDACTED);
            }
        }
        text
    }
}

/// How a program failed: a clause without its article.
pub(super) fn failure(ran: &JobResult, timeout: Duration) -> Option<String> {
    match (ran.stopped, ran.exit_code) {
        (Some(stopped), _) => Some(format!("program was ended: {}", why(stopped, timeout))),
        (None, Some(0)) => None,
        (None, Some(code)) => Some(format!("program failed with exit code {code}")),
        (None, None) => Some("program was ended".to_owned()),
    }
}

fn why(stopped: Stopped, timeout: Duration) -> String {
    match stopped {
        Stopped::Timeout => format!("it did not finish within {} seconds", timeout.as_secs_f64()),
        Stopped::Memory => "it took more memory than programs may".to_owned(),
        Stopped::Processes => "it started more processes than programs may".to_owned(),
        Stopped::CpuSeconds => "it took more of the processor than programs may".to_owned(),
        Stopped::FileSize => "it wrote a larger file than programs may".to_owned(),
    }
}

fn odd(why: &str) -> String {
    format!("The program ran, but its answer is not what was declared: {why}")
}

/// An answer that is JSON.
fn read(stdout: &Output, text: &str) -> Result<Value, String> {
    if stdout.omitted > 0 {
        return Err(odd("it is too long."));
    }
    json::read(text).map_err(|error| match error {
        error @ Unreadable::Malformed(_) => odd(&format!("it is not JSON: {error}.")),
        beyond => odd(&format!("{beyond}.")),
    })
}

/// Whether an answer is what was declared of it.
fn checked(schema: &Schema, value: &Value) -> Result<(), String> {
    schema.check(value, MAX_FAULTS).map_err(|rejected: Rejected| {
        let fault = |Fault { pointer, masked, .. }| {
            let place = if pointer.is_empty() { "the answer".to_owned() } else { pointer };
            format!("\n- at {place}: {masked}")
        };
        odd(&rejected.faults().into_iter().map(fault).collect::<String>())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_begins_like_another_leaves_nothing_of_it() {
        let secrets = ["abcd", "abcd-efgh"].map(str::to_owned).to_vec();
        let reader = AnswerReader::new(None, secrets);
        let text = reader.without_secrets("abcd-efgh, abcd".to_owned());
        assert_eq!(text, "[redacted], [redacted]");
    }
}
