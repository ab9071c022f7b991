//! Input that tools ask for during a call: checks who may give it, and that it matches the request.

use serde_json::Value;

use super::Runtime;
use super::answers::{AnswerError, CallRef, check_answerer};
use crate::bounds::json::escaped_key;
use crate::bounds::pattern::Author;
use crate::bounds::schema::{Fault, Rejected, Schema};
use crate::bounds::text::quoted;
use crate::event::{
    InputAction, InputRequest, InputRequired, InputResponse, InputResponses, Resolution,
    ValidationError, WaitKind,
};
use crate::run::Caller;
use crate::store::{Answer, RunRecord};
use crate::tools::approval::decision_record;

/// Bytes of all answers of one request.
const MAX_RESPONSES: usize = 64 * 1024;
/// Faults of one answer that are reported.
const MAX_FAULTS: usize = 10;
/// Names of requests that the audit log repeats.
const MAX_NAMES: usize = 8;

impl Runtime {
    /// Stores the input that the tool of a call asks for in this round; returns the updated run.
    ///
    /// # Errors
    /// [`AnswerError`]; nothing was taken then.
    pub async fn give_input(
        &self,
        caller: &Caller,
        call_ref: CallRef,
        round: u32,
        responses: InputResponses,
    ) -> Result<RunRecord, AnswerError> {
        let (run, asked) =
            self.pending_request(&caller.tenant, call_ref, WaitKind::RESULTS).await?;
        check_answerer(caller, &run)?;
        let Some(input) = asked.input else {
            let message = "must be absent: this call waits for its result, which is `content`";
            return Err(AnswerError::InvalidArguments(vec![wrong("/responses", message)]));
        };
        if input.round != round {
            let why = format!("This call waits for answers to round {}.", input.round);
            return Err(AnswerError::NotPending(why));
        }
        let given = responses.clone();
        let checked = tokio::task::spawn_blocking(move || errors(&input, &given)).await;
        let errors = checked.map_err(|_| AnswerError::Unchecked)?;
        if !errors.is_empty() {
            return Err(AnswerError::InvalidArguments(errors));
        }
        let why = format!("{} answered: {}.", caller.subject, in_words(&responses));
        let audit =
            decision_record(call_ref.call, &asked.tool, &asked.arguments, "client", true, why);
        let resolution = Resolution::Input { responses };
        self.store_answer(&run, call_ref.call, Answer::to(asked.seq, resolution, caller, audit))
            .await
    }
}

fn wrong(pointer: impl Into<String>, message: impl Into<String>) -> ValidationError {
    ValidationError { pointer: pointer.into(), message: message.into() }
}

fn in_words(responses: &InputResponses) -> String {
    let listed = responses.iter().take(MAX_NAMES);
    let listed = listed.map(|(name, given)| format!("{} {}", quoted(name), given.action.as_str()));
    listed.collect::<Vec<_>>().join(", ")
}

/// The errors in answers, with pointers into the body of the request.
fn errors(input: &InputRequired, responses: &InputResponses) -> Vec<ValidationError> {
    let text = serde_json::to_string(responses).unwrap_or_default();
    if text.len() > MAX_RESPONSES {
        let message = format!("must have at most {} KiB", MAX_RESPONSES / 1024);
        return vec![wrong("/responses", message)];
    }
    if text.contains("\\u0000") {
        return vec![wrong("/responses", "must not contain NUL characters")];
    }
    let unknown = responses.keys().filter(|name| !input.requests.contains_key(*name));
    let unknown = unknown.map(|name| wrong(pointer(name), "was not asked for"));
    let of_asked = input.requests.iter().flat_map(|(name, request)| match responses.get(name) {
        Some(response) => errors_of(name, request, response),
        None => vec![wrong(pointer(name), "is missing")],
    });
    unknown.take(MAX_FAULTS).chain(of_asked).collect()
}

fn pointer(name: &str) -> String {
    format!("/responses/{}", escaped_key(name))
}

fn errors_of(name: &str, request: &InputRequest, given: &InputResponse) -> Vec<ValidationError> {
    let at = format!("{}/content", pointer(name));
    let content = match (given.action, &given.content) {
        (InputAction::Accept, Some(content @ Value::Object(_))) => content,
        (InputAction::Accept, Some(_)) => return vec![wrong(at, "must be an object")],
        (InputAction::Accept, None) => return vec![wrong(at, "is required with accept")],
        (InputAction::Decline | InputAction::Cancel, None) => return Vec::new(),
        (InputAction::Decline | InputAction::Cancel, Some(_)) => {
            return vec![wrong(at, "must be absent unless the action is accept")];
        }
    };
    let checked = match Schema::compile(&request.requested_schema, Author::Caller) {
        Ok(schema) => schema.check(content, MAX_FAULTS),
        Err(refused) => return vec![wrong(at, format!("cannot be checked: {refused}"))],
    };
    let faults = checked.err().map(Rejected::faults).unwrap_or_default();
    let fault = |fault: Fault| wrong(format!("{at}{}", fault.pointer), fault.message);
    faults.into_iter().map(fault).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_are_what_was_asked_for() {
        let schema = json!({"type": "object", "required": ["n"],
            "properties": {"n": {"type": "integer", "minimum": 1}}});
        let request = InputRequest { message: "m".into(), requested_schema: schema };
        let input = InputRequired {
            server: "s".into(),
            round: 1,
            requests: [("a/b".to_owned(), request)].into(),
            request_state: None,
            requests_uncounted: 0,
        };
        for (responses, expected) in [
            (json!({"a/b": {"action": "accept", "content": {"n": 2}}}), vec![]),
            (json!({"a/b": {"action": "decline"}}), vec![]),
            (json!({"a/b": {"action": "cancel"}}), vec![]),
            (json!({}), vec!["/responses/a~1b"]),
            (json!({"a/b": {"action": "cancel"}, "c": {"action": "cancel"}}), vec!["/responses/c"]),
            (json!({"a/b": {"action": "accept"}}), vec!["/responses/a~1b/content"]),
            (json!({"a/b": {"action": "accept", "content": 1}}), vec!["/responses/a~1b/content"]),
            (json!({"a/b": {"action": "decline", "content": {}}}), vec!["/responses/a~1b/content"]),
            (
                json!({"a/b": {"action": "accept", "content": {"n": 0}}}),
                vec!["/responses/a~1b/content/n"],
            ),
            (
                json!({"a/b": {"action": "accept", "content": {"n": 1, "x": "\u{0}"}}}),
                vec!["/responses"],
            ),
            (
                json!({"a/b": {"action": "accept", "content": {"n": 1, "x": "x".repeat(70_000)}}}),
                vec!["/responses"],
            ),
        ] {
            let given: InputResponses = serde_json::from_value(responses.clone()).unwrap();
            let found: Vec<String> =
                errors(&input, &given).into_iter().map(|e| e.pointer).collect();
            assert_eq!(found, expected, "{responses:.200}");
        }
    }
}
