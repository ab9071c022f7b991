//! The request body of an invocation.
//!
//! Checks the shape of the fields. Whether inputs match the agent's schema and whether an override is
//! allowed is decided by the runtime.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use super::uploads::MAX_FILES;
use crate::bounds::json::escaped_key;
use crate::event::ValidationError;
use crate::http::document::openapi::{one_object, properties};
use crate::http::document::vocabulary::{RunInputs, RunMetadata};
use crate::http::edge::extract::{as_whole, fields, in_range, optional_time};
use crate::http::edge::problem::{Code, Problem};
use crate::run::{BudgetOverrides, GivenCall, Overrides, RunKind};
use crate::runtime::{FileCopy, FileOwner};
use crate::store::QueuePlace;

/// The overrides that a single-shot invocation accepts.
const SINGLE: [&str; 5] = ["model", "temperature", "active_skills", "on_session_busy", "private"];

/// The overrides that a tool call accepts.
const CALL: [&str; 5] =
    ["active_skills", "budget", "on_session_busy", "private", "tool_call_timeout_seconds"];
/// The override that is built from the fields of [`CallEnvelope`].
const CALL_OVERRIDE: &str = "call";

#[derive(Debug, PartialEq)]
pub(crate) struct Invocation {
    pub(crate) inputs: Value,
    pub(crate) run_id: Option<Uuid>,
    pub(crate) session_id: Option<String>,
    pub(crate) dry_run: bool,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) overrides: Overrides,
    pub(crate) webhook: Option<String>,
    pub(crate) queue: QueuePlace,
    pub(crate) files: Vec<FileCopy>,
}

/// The fields that are not overrides.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
struct Envelope {
    /// The agent's inputs, which must match its input schema; an empty object by default.
    #[schema(value_type = RunInputs)]
    inputs: Option<Map<String, Value>>,
    /// The id of the new run, if the client wants to choose it; it must not be in use.
    run_id: Option<Uuid>,
    /// The session to continue or create. Runs of a session share one conversation; 1 to 256
    /// characters.
    #[schema(min_length = 1, max_length = 256)]
    session_id: Option<String>,
    /// Labels by which `GET /runs` can filter.
    #[schema(value_type = Option<RunMetadata>)]
    metadata: Option<BTreeMap<String, String>>,
    /// Where events of the run are sent.
    webhook: Option<WebhookRequest>,
    /// Among the queued runs of the tenant, those with a higher priority are taken first; 0 by default.
    #[schema(minimum = -100, maximum = 100)]
    priority: Option<i64>,
    /// The queued run is not taken before this time, at most 30 days ahead. Only with `Prefer:
    /// respond-async`.
    #[serde(deserialize_with = "optional_time")]
    available_at: Option<DateTime<Utc>>,
    /// Files of other workspaces that are copied into the run's before it begins; needs the scopes
    /// `files:read` and `files:write`.
    #[schema(max_items = 64)]
    files: Option<Vec<FileReference>>,
    /// Answers with the prompt, tools and limits that the run would have, without starting it.
    dry_run: Option<bool>,
}

/// A file of another workspace, and where its copy is put.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct FileReference {
    /// The path of the copy in the run's workspace.
    #[schema(example = "in/a.csv")]
    path: String,
    from: FileSource,
}

/// A file, by its path in the workspace of exactly one of a run, a session and an agent.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct FileSource {
    /// The run whose workspace it is in.
    run_id: Option<Uuid>,
    /// The session whose workspace it is in.
    session_id: Option<String>,
    /// The agent in whose shared workspace it is.
    agent: Option<String>,
    /// Its path there.
    #[schema(example = "out/a.csv")]
    path: String,
}

impl FileReference {
    fn read(self, number: usize) -> Result<FileCopy, Problem> {
        let FileSource { run_id, session_id, agent, path: source } = self.from;
        let owner = match (run_id, session_id, agent) {
            (Some(id), None, None) => FileOwner::Run(id),
            (None, Some(id), None) => FileOwner::Session(id),
            (None, None, Some(name)) => FileOwner::Agent(name),
            _ => {
                let why = "must name one of run_id, session_id and agent";
                return Err(Problem::at(Code::InvalidInputs, format!("/files/{number}/from"), why));
            }
        };
        Ok(FileCopy { path: self.path, owner, source })
    }
}

/// What is to be called.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
struct CallEnvelope {
    /// The tool, one of the agent's.
    #[schema(required = true, example = "file_ops")]
    tool: String,
    /// Its arguments; an empty object by default.
    #[schema(value_type = Option<Object>)]
    arguments: Map<String, Value>,
}

/// Where `run.*` events and `approval.requested` are sent (Standard Webhooks).
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Webhook)]
struct WebhookRequest {
    /// An http or https URL of at most 2048 bytes; its host must be public, unless the operator lists
    /// it.
    #[schema(max_length = 2048, example = "https://example.com/hooks/toolloop")]
    url: String,
}

impl Invocation {
    pub(crate) fn read(kind: RunKind, mut body: Map<String, Value>) -> Result<Self, Problem> {
        let inputs = match body.remove("inputs") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(inputs @ Value::Object(_)) => inputs,
            Some(_) => {
                return Err(Problem::at(
                    Code::InvalidInputs,
                    "/inputs",
                    "The inputs must be a JSON object.",
                ));
            }
        };
        let invalid = |error: ValidationError| {
            let is_of_files = error.pointer.starts_with("/files");
            let code = if is_of_files { Code::InvalidInputs } else { Code::InvalidOverride };
            Problem::invalid(code, vec![error])
        };
        if let Some(pointer) = misplaced_list(&body) {
            return Err(invalid(ValidationError { pointer, message: "must be an object".into() }));
        }
        let mut envelope = Map::new();
        for name in
            ["run_id", "session_id", "metadata", "priority", "available_at", "files", "dry_run"]
        {
            envelope.extend(body.remove_entry(name));
        }
        if kind != RunKind::Single {
            envelope.extend(body.remove_entry("webhook"));
        }
        let Envelope {
            run_id,
            session_id,
            metadata,
            dry_run,
            webhook,
            priority,
            available_at,
            files,
            ..
        } = fields(envelope).map_err(invalid)?;
        let metadata = metadata.unwrap_or_default();
        check(session_id.as_deref(), &metadata)?;
        let files = files.unwrap_or_default();
        if files.len() > MAX_FILES {
            let why = format!("must have at most {MAX_FILES} entries");
            return Err(Problem::at(Code::InvalidInputs, "/files", why));
        }
        let files = files.into_iter().enumerate().map(|(number, file)| file.read(number));
        let files = files.collect::<Result<_, _>>()?;
        let call = (kind == RunKind::Call).then(|| take_call(&mut body)).transpose()?;
        let overrides = if body.is_empty() { Overrides::default() } else { overrides(kind, body)? };
        let overrides = Overrides { call, ..overrides };
        Ok(Self {
            inputs,
            run_id,
            session_id,
            dry_run: dry_run == Some(true),
            metadata,
            overrides,
            webhook: webhook.map(|webhook| webhook.url),
            queue: QueuePlace { priority: priority.unwrap_or_default(), available_at },
            files,
        })
    }
}

/// The first list in the place of an object: serde would read it as the object's fields in order.
fn misplaced_list(body: &Map<String, Value>) -> Option<String> {
    let objects = ["budget", "webhook"].map(|name| (format!("/{name}"), body.get(name)));
    let items = ["client_tools", "files"].into_iter().flat_map(move |name| {
        let items = body.get(name).and_then(Value::as_array).into_iter().flatten().enumerate();
        items.flat_map(move |(at, item)| {
            let pointer = format!("/{name}/{at}");
            [(format!("{pointer}/from"), item.get("from")), (pointer, Some(item))]
        })
    });
    let mut places = objects.into_iter().chain(items);
    places.find(|(_, value)| value.is_some_and(Value::is_array)).map(|(pointer, _)| pointer)
}

/// Takes the requested call out of the body.
fn take_call(body: &mut Map<String, Value>) -> Result<GivenCall, Problem> {
    let mut envelope = Map::new();
    for name in ["tool", "arguments"] {
        envelope.extend(body.remove_entry(name).filter(|(_, value)| !value.is_null()));
    }
    let call = fields::<CallEnvelope>(envelope)
        .map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))?;
    let CallEnvelope { tool, arguments } = call;
    if tool.is_empty() {
        return Err(Problem::at(Code::InvalidInputs, "/tool", "must be the name of a tool"));
    }
    Ok(GivenCall { tool, arguments })
}

fn overrides(kind: RunKind, mut body: Map<String, Value>) -> Result<Overrides, Problem> {
    let refused = |name: &str, why: &str| {
        Problem::at(Code::InvalidOverride, format!("/{}", escaped_key(name)), why)
    };
    let is_taken = |name: &str| match kind {
        RunKind::Single => SINGLE.contains(&name),
        RunKind::Iterative => name != CALL_OVERRIDE,
        RunKind::Call => CALL.contains(&name),
    };
    if let Some(name) = body.keys().find(|name| !is_taken(name)) {
        return Err(refused(name, "is not a field of this request"));
    }
    if let Some(Value::Object(budget)) = body.get_mut("budget") {
        budget.values_mut().for_each(as_whole);
    }
    fields(body).map_err(|error| {
        let mut error = in_range::<BudgetOverrides>("/budget", error);
        if error.message.starts_with("unknown field") {
            error.message = "is not a field of this request".into();
        }
        Problem::invalid(Code::InvalidOverride, vec![error])
    })
}

fn check(session_id: Option<&str>, metadata: &BTreeMap<String, String>) -> Result<(), Problem> {
    let refused =
        |pointer: String, why: String| Err(Problem::at(Code::InvalidOverride, pointer, why));
    if session_id.is_some_and(|id| !(1..=256).contains(&id.chars().count())) {
        return refused("/session_id".into(), "must have 1 to 256 characters".into());
    }
    let (most, max_key, max_value) =
        (RunMetadata::MOST, RunMetadata::MAX_KEY, RunMetadata::MAX_VALUE);
    if metadata.len() > most {
        return refused("/metadata".into(), format!("must have at most {most} entries"));
    }
    for (key, value) in metadata {
        if !(1..=max_key).contains(&key.chars().count()) || value.chars().count() > max_value {
            let pointer = format!("/metadata/{}", escaped_key(key));
            let why = format!(
                "must have a key of 1 to {max_key} and a value of at most {max_value} characters"
            );
            return refused(pointer, why);
        }
    }
    Ok(())
}

/// The body of a single-shot invocation, for the API document.
pub(crate) struct InvokeRequest;

impl ToSchema for InvokeRequest {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Envelope::schemas(schemas);
    }
}

impl PartialSchema for InvokeRequest {
    fn schema() -> RefOr<Schema> {
        body_schema("The request body of a single-shot invocation.", |name, is_override| {
            if is_override { SINGLE.contains(&name) } else { !["webhook", DRY_RUN].contains(&name) }
        })
    }
}

/// The body of an invocation of the loop, for the API document.
pub(crate) struct InvokeIterativeRequest;

impl ToSchema for InvokeIterativeRequest {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Envelope::schemas(schemas);
        Overrides::schemas(schemas);
    }
}

impl PartialSchema for InvokeIterativeRequest {
    fn schema() -> RefOr<Schema> {
        body_schema(
            "The request body of an invocation of the loop. Overrides can only narrow what the agent's \
             definition allows.",
            |name, _| ![DRY_RUN, CALL_OVERRIDE].contains(&name),
        )
    }
}

/// The body of a tool call, for the API document.
pub(crate) struct CallToolRequest;

impl ToSchema for CallToolRequest {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Envelope::schemas(schemas);
        Overrides::schemas(schemas);
    }
}

impl PartialSchema for CallToolRequest {
    fn schema() -> RefOr<Schema> {
        let envelope = properties::<Envelope>().filter(|(name, _)| *name != DRY_RUN);
        let overrides = properties::<Overrides>().filter(|(name, _)| CALL.contains(&&**name));
        let fields = properties::<CallEnvelope>().chain(envelope).chain(overrides);
        let mut body = one_object("The request body of a tool call in an agent's name.", fields);
        body.required.push("tool".into());
        body.into()
    }
}

/// A field that changes what is answered; the document has an operation of its own for that, so that
/// an invocation answers one type.
const DRY_RUN: &str = "dry_run";

/// `takes` is asked with a field's name, and whether it is an override.
fn body_schema(about: &str, takes: impl Fn(&str, bool) -> bool) -> RefOr<Schema> {
    let envelope = properties::<Envelope>().filter(|(name, _)| takes(name, false));
    let overrides = properties::<Overrides>().filter(|(name, _)| takes(name, true));
    one_object(about, envelope.chain(overrides)).into()
}

#[cfg(test)]
#[path = "invocation_tests.rs"]
mod tests;
