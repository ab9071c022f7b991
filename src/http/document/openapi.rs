//! Completes the OpenAPI document of the route table.
//!
//! Routes define their paths, parameters and bodies. The rest is added here for all of them: error
//! responses, which follow from an operation's parameters and body; an example for every body,
//! composed from the examples of its fields; the server and the security scheme. Names and `required`
//! of schemas are adjusted in [`super::schemas`].

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse as _;
use serde_json::{Map, Value, json};
use utoipa::openapi::header::Header;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn, PathItem};
use utoipa::openapi::schema::{AdditionalProperties, AllOf, ArrayBuilder, Object, Schema, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{
    ContactBuilder, Content, InfoBuilder, License, OpenApi, Ref, RefOr, Response, ResponseBuilder,
    Server,
};
use utoipa::{PartialSchema, ToSchema};

use super::vocabulary::OpenApiDocument;
use super::{event_schemas, schemas, scopes};
use crate::http::edge::problem::{Code, ProblemBody};
use crate::http::edge::rate_limit::{POLICY, REMAINING};
use crate::http::edge::responses::StaticText;
use crate::http::resources::run_views::Run;

/// The property that becomes `contentSchema`.
pub(super) const CONTENT_SCHEMA: &str = "x-content-schema";

const TAGS: [(&str, &str); 12] = [
    ("agents", "List, describe and invoke agents."),
    ("runs", "List runs; get a run, its parts and its events; cancel a run."),
    ("approvals", "Approvals, client tool results and reviews that parked runs wait for."),
    ("webhooks", "Webhook deliveries."),
    ("sessions", "Runs that share a conversation."),
    ("memory", "What agents keep of their runs for later ones."),
    ("stats", "Token usage, cost, and latencies of tool calls."),
    ("tools", "The tools that agents can use."),
    ("keys", "Create, list and revoke API keys."),
    ("tokens", "Short-lived tokens for one run or session."),
    ("audit", "Decisions on tool calls, and acts of administration."),
    ("health", "Liveness, readiness, metrics and the API document."),
];

/// Get this document
///
/// The OpenAPI description of this API.
#[utoipa::path(
    get, path = "/openapi.json", operation_id = "get_openapi_document", tag = "health",
    responses((status = 200, description = "An OpenAPI 3.1 document.", body = OpenApiDocument)),
)]
pub(crate) async fn openapi_json(asked: HeaderMap) -> axum::response::Response {
    static JSON: LazyLock<StaticText> =
        LazyLock::new(|| StaticText::new(crate::http::openapi_json().into()));
    ([(CONTENT_TYPE, "application/json")], JSON.answer(&asked)).into_response()
}

pub(crate) fn document(mut api: OpenApi) -> Value {
    let mut license = License::new(env!("CARGO_PKG_LICENSE"));
    license.identifier = Some(env!("CARGO_PKG_LICENSE").to_owned());
    api.info = InfoBuilder::new()
        .title("toolloop")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(env!("CARGO_PKG_DESCRIPTION")))
        .contact(Some(ContactBuilder::new().name(Some("The toolloop authors")).build()))
        .license(Some(license))
        .build();
    api.servers = Some(vec![Server::new("/v1")]);
    api.tags = Some(
        TAGS.map(|(name, about)| TagBuilder::new().name(name).description(Some(about)).build())
            .into(),
    );
    let components = api.components.get_or_insert_default();
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "An API key, `tl_<id>_<secret>`, a short-lived token of `POST /tokens`, or, where the service is \
         configured for it, a JWT of the identity provider.",
    ));
    components.add_security_scheme("bearer", SecurityScheme::Http(bearer.build()));
    let mut schemas = vec![("Problem".to_owned(), ProblemBody::schema())];
    ProblemBody::schemas(&mut schemas);
    schemas.push((Run::name().into_owned(), Run::schema()));
    Run::schemas(&mut schemas);
    components.schemas.extend(schemas);
    name_items(&mut components.schemas);
    let schemas = serde_json::to_value(&components.schemas).unwrap_or_default();
    for (name, schema) in &mut components.schemas {
        if let RefOr::T(
            Schema::Object(Object { example: Some(given), .. })
            | Schema::AllOf(AllOf { example: Some(given), .. }),
        ) = schema
        {
            *given = example(&schemas[name], &schemas);
        }
    }
    let paths = std::mem::take(&mut api.paths.paths);
    // The router marks a parameter that is the rest of the path.
    let named = |(path, item): (String, PathItem)| (path.replace("{*", "{"), item);
    api.paths.paths = paths.into_iter().map(named).collect();
    for item in api.paths.paths.values_mut() {
        item.head = item.get.as_ref().and_then(head_of_file);
        let methods =
            [&mut item.get, &mut item.head, &mut item.put, &mut item.post, &mut item.delete];
        for operation in methods.into_iter().flatten() {
            // An operation without authentication says so: else a generator takes it for an omission.
            operation.security.get_or_insert_default();
            operation.description = operation.description.take().or(operation.summary.clone());
            add_problems(operation);
            add_headers(operation);
            add_examples(operation, &schemas);
            components.responses.extend(share_problems(operation));
        }
    }
    let mut api = serde_json::to_value(api).unwrap_or_default();
    if let Some(Value::Object(schemas)) = api.pointer_mut("/components/schemas") {
        event_schemas::add(schemas);
    }
    name_contents(&mut api);
    scopes::describe(&mut api);
    schemas::adjust(&mut api);
    drop_event_example(&mut api);
    api
}

/// `HEAD` of a file, which is answered as `GET` is, without a content and so without a range of it.
fn head_of_file(get: &Operation) -> Option<Operation> {
    let of_what = get.operation_id.as_ref()?.strip_prefix("get_")?;
    if !of_what.ends_with("_file") {
        return None;
    }
    let mut head = get.clone();
    head.operation_id = Some(format!("head_{of_what}"));
    head.summary = head.summary.map(|summary| summary.replacen("Get", "Look at", 1));
    head.description = Some("What `GET` answers, without the content.".to_owned());
    let is_range = |parameter: &RefOr<Parameter>| matches!(parameter, RefOr::T(Parameter { name, .. }) if name == "Range");
    head.parameters.iter_mut().for_each(|all| all.retain(|parameter| !is_range(parameter)));
    head.responses.responses.remove("206");
    if let Some(RefOr::T(response)) = head.responses.responses.get_mut("200") {
        "The file is there.".clone_into(&mut response.description);
        response.content.clear();
    }
    Some(head)
}

/// A page of events has no example: a linter judges examples by discriminators, and has none for a
/// type of event that no schema names. The stream of events has one.
fn drop_event_example(api: &mut Value) {
    let content = "/paths/~1runs~1{id}~1events/get/responses/200/content/application~1json";
    if let Some(Value::Object(content)) = api.pointer_mut(content) {
        content.shift_remove("example");
    }
}

/// Says what the text of a stream holds: a keyword of JSON Schema that the derived types lack.
fn name_contents(api: &mut Value) {
    match api {
        Value::Object(fields) => {
            if let Some(each) = fields.shift_remove(CONTENT_SCHEMA) {
                fields.insert("contentSchema".to_owned(), each);
            }
            fields.values_mut().for_each(name_contents);
        }
        Value::Array(items) => items.iter_mut().for_each(name_contents),
        _ => {}
    }
}

/// Makes the items of a page refer to their schema. The derived schema inlines it, which leaves
/// generated clients without a name for it.
fn name_items(schemas: &mut BTreeMap<String, RefOr<Schema>>) {
    for (name, schema) in schemas {
        if let (Some(row), RefOr::T(Schema::Object(page))) = (name.strip_prefix("Page_"), schema) {
            let rows = ArrayBuilder::new()
                .items(Ref::from_schema_name(row))
                .description(Some("The items of this page."));
            page.properties.insert("data".into(), rows.into());
        }
    }
}

/// Whether an operation takes from the key's rate limit.
fn is_invocation(id: &str) -> bool {
    matches!(
        id,
        "invoke_agent" | "invoke_agent_iterative" | "stream_agent" | "call_tool" | "dry_run_agent"
    )
}

/// Why an invocation is refused beside what every request may be refused for.
fn of_invocation(id: &str) -> Vec<Code> {
    let mut codes = vec![
        Code::RunIdTaken,
        Code::InvalidOverride,
        Code::PromptInjection,
        Code::SessionBusy,
        Code::SessionOfOtherAgent,
        Code::FileConflict,
        Code::WorkspaceUnavailable,
    ];
    if id != "dry_run_agent" {
        codes.extend([Code::IdempotencyMismatch, Code::TooManyRuns, Code::Draining]);
    }
    if id != "invoke_agent" {
        codes.push(Code::WebhooksDisabled);
    }
    if id.starts_with("invoke") || id == "call_tool" {
        codes.push(Code::NotAcceptable);
    }
    codes
}

/// Operations that read a journal, if only its end, beside those of a run's files.
const OF_JOURNALS: [&str; 18] = [
    "invoke_agent",
    "invoke_agent_iterative",
    "call_tool",
    "get_run",
    "wait_for_run",
    "cancel_run",
    "list_iterations",
    "list_tool_calls",
    "list_messages",
    "list_changes",
    "list_events",
    "get_session",
    "list_session_messages",
    "approve_tool_call",
    "deny_tool_call",
    "resolve_tool_call",
    "give_tool_result",
    "create_token",
];

/// The errors that an operation can respond with, derived from its parameters and body.
fn problems(operation: &Operation) -> BTreeMap<u16, Vec<Code>> {
    let mut codes = vec![
        Code::Internal,
        Code::InvalidParameter,
        Code::UriTooLong,
        Code::HeadersTooLarge,
        Code::Timeout,
    ];
    let id = operation.operation_id.as_deref().unwrap_or_default();
    if OF_JOURNALS.contains(&id) || id.contains("_run_file") {
        codes.push(Code::JournalUnreadable);
    }
    let takes = |place: ParameterIn| {
        let mut parameters = operation.parameters.iter().flatten();
        parameters.any(|p: &RefOr<Parameter>| matches!(p, RefOr::T(p) if p.parameter_in == place))
    };
    if operation.security.as_ref().is_some_and(|needed| !needed.is_empty()) {
        codes.extend([
            Code::Unauthenticated,
            Code::Forbidden,
            Code::RateLimited,
            Code::StoreUnavailable,
            Code::IdentityProviderUnavailable,
        ]);
    }
    if !matches!(id, "check_health" | "check_readiness") {
        codes.push(Code::Overloaded);
    }
    codes.push(Code::ForeignOrigin);
    if takes(ParameterIn::Path) {
        codes.push(Code::NotFound);
    }
    if operation.request_body.is_some() {
        codes.extend([
            Code::MalformedJson,
            Code::RequestTimeout,
            Code::PayloadTooLarge,
            Code::UnsupportedMediaType,
        ]);
        codes.push(Code::InvalidInputs);
    }
    match id {
        _ if is_invocation(id) => codes.extend(of_invocation(id)),
        "approve_tool_call" => codes.extend([
            Code::NotAwaitingApproval,
            Code::WorkspaceUnavailable, // with edited arguments
        ]),
        "deny_tool_call" | "resolve_tool_call" | "give_tool_result" => {
            codes.push(Code::NotAwaitingApproval);
        }
        _ if id.ends_with("_file") || id.ends_with("_files") => {
            codes.push(Code::WorkspaceUnavailable);
            if id.starts_with("get") {
                codes.push(Code::RangeNotSatisfiable);
            }
            if !id.starts_with("list") {
                codes.push(Code::PreconditionFailed);
            }
            if id.starts_with("put") {
                // Any bytes are valid.
                codes.retain(|code| *code != Code::InvalidInputs);
            }
            if id.starts_with("put") || id.starts_with("delete") {
                codes.push(Code::FileConflict);
            }
        }
        "redeliver_webhook" => codes.push(Code::WebhooksDisabled),
        "delete_session" => codes.extend([Code::SessionBusy, Code::WorkspaceUnavailable]),
        "revoke_key" => codes.push(Code::ProtectedKey),
        "list_events" => codes.push(Code::NotAcceptable),
        "create_token" | "get_metrics" => codes.push(Code::NotFound),
        _ => {}
    }
    let mut by_status: BTreeMap<u16, Vec<Code>> = BTreeMap::new();
    for code in codes {
        by_status.entry(code.status().as_u16()).or_default().push(code);
    }
    by_status
}

fn add_problems(operation: &mut Operation) {
    for (status, codes) in problems(operation) {
        let named: Vec<String> =
            codes.iter().map(|code| format!("{} (`{}`)", code.title(), code.name())).collect();
        let mut content = Content::new(Some(Ref::from_schema_name("Problem")));
        content.example = codes.first().map(|code| example_problem(*code));
        let response = ResponseBuilder::new().description(format!("{}.", named.join("; ")));
        let response = response.content("application/problem+json", content).build();
        operation.responses.responses.entry(status.to_string()).or_insert(RefOr::T(response));
    }
}

/// Moves the error responses of an operation to the shared components, named after their codes.
fn share_problems(operation: &mut Operation) -> Vec<(String, RefOr<Response>)> {
    let mut shared = Vec::new();
    for (status, codes) in problems(operation) {
        let Some(response) = operation.responses.responses.get_mut(&status.to_string()) else {
            continue;
        };
        let is_own = |response: &Response| {
            response.content.keys().any(|kind| kind != "application/problem+json")
        };
        if matches!(response, RefOr::T(response) if !is_own(response)) {
            let named: Vec<String> = codes.iter().map(|code| format!("{code:?}")).collect();
            let name = named.join("Or");
            let reference = RefOr::Ref(Ref::from_response_name(&name));
            shared.push((name, std::mem::replace(response, reference)));
        }
    }
    shared
}

/// Documents the headers of refusals, `RateLimit` and `RateLimit-Policy`.
fn add_headers(operation: &mut Operation) {
    let is_limited = operation.operation_id.as_deref().is_some_and(is_invocation);
    let header = |schema: Object, description: &str| {
        let mut header = Header::new(schema);
        header.description = Some(description.to_owned());
        RefOr::T(header)
    };
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        let is_problem = response.content.contains_key("application/problem+json");
        if matches!(status.as_str(), "429" | "503") && is_problem {
            let seconds =
                header(Object::with_type(Type::Integer), "Seconds until a retry may succeed.");
            response.headers.insert("retry-after".to_owned(), seconds);
        }
        let of_refusal = match status.as_str() {
            "401" => Some(("www-authenticate", "`Bearer`: how a request is authenticated.")),
            "416" => Some(("content-range", "How many bytes the file has: `bytes */<size>`.")),
            _ => None,
        };
        if let Some((name, description)) = of_refusal {
            let text = header(Object::with_type(Type::String), description);
            response.headers.insert(name.to_owned(), text);
        }
        // What is the same for several operations is written once, whether they have a rate limit or not.
        if status == "429" || (is_limited && status.starts_with('2')) {
            for (name, description) in [
                (
                    POLICY,
                    "The rate limit of the key: `\"default\";q=<burst>;w=<seconds to refill it>`.",
                ),
                (
                    REMAINING,
                    "The state of the rate limit: `\"default\";r=<remaining>;t=<seconds until it is full>`.",
                ),
            ] {
                response
                    .headers
                    .insert(name.to_string(), header(Object::with_type(Type::String), description));
            }
        }
    }
}

fn example_problem(code: Code) -> Value {
    json!({
        "type": format!("urn:toolloop:problem:{}", code.name()),
        "title": code.title(),
        "status": code.status().as_u16(),
        "detail": "What is wrong with this request.",
        "instance": "/v1/…",
        "code": code.name(),
        "request_id": "0197000000007000800000000000000a",
    })
}

fn add_examples(operation: &mut Operation, schemas: &Value) {
    let contents = |content: &mut RefOr<Content>| {
        if let RefOr::T(content) = content
            && content.example.is_none()
            && let Some(schema) = &content.schema
        {
            content.example =
                Some(example(&serde_json::to_value(schema).unwrap_or_default(), schemas));
        }
    };
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        body.content.values_mut().for_each(|content| {
            // An optional body can be absent but not null.
            if let RefOr::T(Content { schema: Some(schema), .. }) = content
                && let RefOr::T(Schema::OneOf(choice)) = schema
            {
                *schema = choice.items.swap_remove(0);
            }
            contents(content);
            if let RefOr::T(Content { example: Some(example), .. }) = content {
                drop_nulls(example);
            }
        });
    }
    for response in operation.responses.responses.values_mut() {
        if let RefOr::T(response) = response {
            response.content.values_mut().for_each(contents);
        }
    }
}

/// Removes nulls and empty objects, which a client would not send.
fn drop_nulls(body: &mut Value) {
    if let Value::Object(fields) = body {
        fields.values_mut().for_each(drop_nulls);
        fields.retain(|_, value| !value.is_null() && *value != json!({}));
    }
}

/// An example of a JSON schema, composed from the examples of its properties. An object's own example
/// overrides those.
fn example(schema: &Value, schemas: &Value) -> Value {
    let of = |part: &Value| example(part, schemas);
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return of(&schemas[name]);
    }
    let mut fields: Map<String, Value> = Map::new();
    for part in schema["allOf"].as_array().into_iter().flatten() {
        fields.extend(of(part).as_object().cloned().unwrap_or_default());
    }
    for (name, part) in schema["properties"].as_object().into_iter().flatten() {
        fields.insert(name.clone(), of(part));
    }
    match (schema.get("example").or_else(|| schema["examples"].get(0)), fields.is_empty()) {
        (Some(Value::Object(own)), false) => fields.extend(own.clone()),
        (Some(own), _) => return own.clone(),
        (None, true) => return example_of_value(schema, schemas),
        (None, false) => {}
    }
    Value::Object(fields)
}

/// An example of a schema without properties.
fn example_of_value(schema: &Value, schemas: &Value) -> Value {
    if let Some(first) = schema["oneOf"].get(0) {
        return example(first, schemas);
    }
    if let Some(first) = schema["enum"].get(0).or_else(|| schema.get("default")) {
        return first.clone();
    }
    let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str()).unwrap_or_default();
    match (kind, schema["format"].as_str()) {
        ("object", _) => json!({}),
        ("array", _) if schema["items"].get("$ref").is_some() => {
            json!([example(&schema["items"], schemas)])
        }
        ("array", _) => json!([]),
        ("string", Some("uuid")) => json!("01970000-0000-7000-8000-000000000000"),
        ("string", Some("date-time")) => json!("2026-01-31T12:00:00Z"),
        ("string", _) => json!("…"),
        ("integer" | "number", _) => schema.get("minimum").cloned().unwrap_or(json!(0)),
        ("boolean", _) => json!(false),
        _ => Value::Null,
    }
}

pub(crate) fn properties<T: PartialSchema>() -> impl Iterator<Item = (String, RefOr<Schema>)> {
    let object = match T::schema() {
        RefOr::T(Schema::Object(object)) => object,
        _ => Object::new(),
    };
    object.properties.into_iter()
}

/// An object of the properties of several types, as `serde(flatten)` writes them.
pub(crate) fn one_object(
    about: &str,
    properties: impl Iterator<Item = (String, RefOr<Schema>)>,
) -> Object {
    let mut object = Object::new();
    object.description = Some(about.to_owned());
    object.properties = properties.collect();
    object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
    object
}

#[cfg(test)]
#[path = "openapi_tests.rs"]
mod tests;
