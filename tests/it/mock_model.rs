//! A model server that speaks Chat Completions and Responses, and refuses what OpenAI would refuse.
//!
//! Tests say what it answers, and look at what it was asked. Every request is checked against the
//! rules of the real API before an answer is taken from the script: a conversation that a provider
//! would reject fails the test that sent it. It streams where it is asked to, and misbehaves where
//! a test says so. It knows nothing of the code under test.

#![allow(dead_code, reason = "a kit: not every test uses every part")]

mod chunks;
pub(crate) mod responses;

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_mins(5);

/// What the server does with one valid request.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// A text answer.
    Text(String),
    /// Tool calls: wire name and arguments text; ids are made up.
    ToolCalls(Vec<(String, String)>),
    /// An error answer: status, headers, body.
    Status { status: u16, headers: Vec<(&'static str, String)>, body: Value },
    /// Never answers.
    Hang,
    /// Sends half an answer, then closes the connection.
    Reset,
    /// 200 with something that is not JSON.
    Garbage,
    /// 200 with an empty list of choices.
    NoChoices,
    /// 200 with this body.
    Raw(String),
    /// Fails so many requests of a hundred, which ones the seed decides, with 500, 502, 503 or 529.
    Unsteady { seed: u64, percent: u64, otherwise: Box<Reply> },
    /// 200 with these bytes, sent piece by piece.
    Pieces(Vec<Bytes>, After),
    /// Waits first.
    Delayed(Duration, Box<Reply>),
    /// Waits until that is true.
    Held(watch::Receiver<bool>, Box<Reply>),
    /// This message, streamed: so many words of its text as are allowed, and all else when it is one more.
    Words(watch::Receiver<usize>, Value),
}

/// What happens to the connection after all pieces were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// The answer ends as it should.
    End,
    /// The connection breaks.
    Reset,
    /// Nothing more comes, for ever.
    Silence,
}

impl Reply {
    /// These bytes at once.
    pub(crate) fn bytes(bytes: &[u8], after: After) -> Self {
        Self::Pieces(vec![Bytes::copy_from_slice(bytes)], after)
    }

    /// These bytes, one by one.
    pub(crate) fn byte_by_byte(bytes: &[u8]) -> Self {
        Self::Pieces(
            bytes.iter().map(|byte| Bytes::copy_from_slice(&[*byte])).collect(),
            After::End,
        )
    }

    pub(crate) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub(crate) fn call(tool: &str, arguments: &Value) -> Self {
        Self::ToolCalls(vec![(tool.to_owned(), arguments.to_string())])
    }

    /// An error in OpenAI's shape; the wait it asks for is in milliseconds.
    pub(crate) fn error(status: u16, code: &str, retry_after_ms: Option<u64>) -> Self {
        let headers = retry_after_ms.map(|ms| ("retry-after-ms", ms.to_string()));
        let message = format!("{code} happened");
        let body =
            json!({"error": {"message": message, "type": code, "param": null, "code": code}});
        Self::Status { status, headers: headers.into_iter().collect(), body }
    }
}

/// A request as it was received.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedRequest {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
    /// Why it was refused, if it was.
    pub(crate) refusal: Option<String>,
}

impl ReceivedRequest {
    pub(crate) fn messages(&self) -> &[Value] {
        self.body["messages"].as_array().map_or(&[], Vec::as_slice)
    }
}

/// The numbers of requests, by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) started: usize,
    /// The caller went away before the answer.
    pub(crate) aborted: usize,
    pub(crate) open: usize,
    /// The most that were open at once.
    pub(crate) most: usize,
}

/// Chooses an answer by the request.
type Policy = Arc<dyn Fn(&Value) -> Reply + Send + Sync>;

struct Shared {
    script: Mutex<VecDeque<Reply>>,
    always: Mutex<Option<Policy>>,
    seen: Mutex<Vec<ReceivedRequest>>,
    counts: watch::Sender<Counts>,
}

/// A running server; it stops when dropped.
pub(crate) struct MockModel {
    base_url: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl MockModel {
    pub(crate) async fn start() -> Self {
        let shared = Arc::new(Shared {
            script: Mutex::default(),
            always: Mutex::default(),
            seen: Mutex::default(),
            counts: watch::Sender::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
        let app = Router::new()
            .route("/v1/chat/completions", post(completions))
            .route("/v1/responses", post(responses))
            .with_state(shared.clone());
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { base_url, shared, server }
    }

    /// What `base_url` in a configuration must be.
    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Appends to the queue of answers. A request that finds it empty is refused.
    pub(crate) fn script(&self, replies: impl IntoIterator<Item = Reply>) {
        self.shared.script.lock().unwrap().extend(replies);
    }

    /// The reply to every request when the queue is empty.
    pub(crate) fn always(&self, reply: Reply) {
        self.reply_by(move |_| reply.clone());
    }

    /// Computes the reply from the request when the queue is empty.
    pub(crate) fn reply_by(&self, policy: impl Fn(&Value) -> Reply + Send + Sync + 'static) {
        *self.shared.always.lock().unwrap() = Some(Arc::new(policy));
    }

    /// All requests so far, refused ones included.
    pub(crate) fn requests(&self) -> Vec<ReceivedRequest> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Why requests were refused.
    pub(crate) fn refusals(&self) -> Vec<String> {
        self.requests().into_iter().filter_map(|seen| seen.refusal).collect()
    }

    pub(crate) fn counts(&self) -> Counts {
        *self.shared.counts.borrow()
    }

    /// Waits until that many requests have come.
    pub(crate) async fn wait_for_requests(&self, number: usize) {
        self.wait_until(|counts| counts.started >= number).await;
    }

    /// Waits until a caller has gone away without its answer.
    pub(crate) async fn wait_for_abort(&self) {
        self.wait_until(|counts| counts.aborted > 0).await;
    }

    pub(crate) async fn wait_until(&self, condition: impl FnMut(&Counts) -> bool) {
        let mut counts = self.shared.counts.subscribe();
        let met = tokio::time::timeout(PATIENCE, counts.wait_for(condition)).await;
        assert!(met.is_ok(), "the model server waited in vain: {:?}", self.counts());
    }
}

impl Drop for MockModel {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Counts a request as aborted unless its answer was made.
struct Open {
    shared: Arc<Shared>,
    answered: bool,
}

impl Open {
    fn new(shared: Arc<Shared>) -> Self {
        shared.counts.send_modify(|counts| {
            counts.started += 1;
            counts.open += 1;
            counts.most = counts.most.max(counts.open);
        });
        Self { shared, answered: false }
    }

    /// The answer was made.
    fn close(mut self) {
        self.answered = true;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let aborted = usize::from(!self.answered);
        self.shared.counts.send_modify(|counts| {
            counts.open -= 1;
            counts.aborted += aborted;
        });
    }
}

async fn completions(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    serve(shared, headers, &body, check).await
}

async fn responses(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    serve(shared, headers, &body, responses::check).await
}

async fn serve(
    shared: Arc<Shared>,
    headers: HeaderMap,
    body: &[u8],
    check: fn(&Value) -> Result<(), String>,
) -> Response {
    let parsed: Result<Value, _> = serde_json::from_slice(body);
    let refusal = match &parsed {
        Ok(body) => check(body).err(),
        Err(error) => Some(format!("the body is not JSON: {error}")),
    };
    let body = parsed.unwrap_or_default();
    let number = {
        let mut seen = shared.seen.lock().unwrap();
        seen.push(ReceivedRequest { headers, body: body.clone(), refusal: refusal.clone() });
        seen.len()
    };
    let open = Open::new(shared.clone());
    let reply = if let Some(refusal) = refusal {
        refuse(&refusal)
    } else {
        let scripted = shared.script.lock().unwrap().pop_front();
        let policy = || shared.always.lock().unwrap().clone();
        scripted
            .or_else(|| policy().map(|policy| policy(&body)))
            .unwrap_or_else(|| refuse("the test scripted no answer for this request"))
    };
    answer(reply, number, &body, open).await
}

fn refuse(message: &str) -> Reply {
    let error =
        json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
    Reply::Status { status: 400, headers: Vec::new(), body: json!({ "error": error }) }
}

async fn answer(mut reply: Reply, number: usize, request: &Value, open: Open) -> Response {
    loop {
        reply = match reply {
            Reply::Delayed(delay, inner) => {
                tokio::time::sleep(delay).await;
                *inner
            }
            Reply::Held(mut told, inner) => {
                told.wait_for(|told| *told).await.unwrap();
                *inner
            }
            Reply::Unsteady { seed, percent, otherwise } => {
                match pseudo_random(seed << 32 | number as u64) {
                    draw if draw % 100 >= percent => *otherwise,
                    draw => Reply::error(
                        [500, 502, 503, 529][(draw / 100 % 4) as usize],
                        "overloaded",
                        None,
                    ),
                }
            }
            _ => break,
        };
    }
    let response = match reply {
        Reply::Text(text) => {
            let message = json!({"role": "assistant", "content": text, "refusal": null});
            completion(number, request, &message, "stop")
        }
        Reply::ToolCalls(calls) => {
            let calls: Vec<Value> = (calls.into_iter().enumerate())
                .map(|(index, (name, arguments))| {
                    let id = format!("call_mock_{number}_{index}");
                    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
                })
                .collect();
            let message =
                json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": calls});
            completion(number, request, &message, "tool_calls")
        }
        Reply::Pieces(pieces, after) => return in_pieces(pieces, after, open),
        Reply::Words(allowed, message) => {
            return in_words(allowed, number, request, &message, open);
        }
        Reply::Status { status, headers, body } => {
            let mut response =
                (StatusCode::from_u16(status).unwrap(), body.to_string()).into_response();
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Reply::Hang => pending::<Infallible>().await.into_response(),
        Reply::Reset => {
            let half = Ok(Bytes::from_static(b"{\"choices\": [{\"message\": {\"content\": \"hal"));
            let cut = Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
            Body::from_stream(stream::iter([half, cut])).into_response()
        }
        Reply::Garbage => "<html>It works!</html>".into_response(),
        Reply::NoChoices => json!({"id": "x", "object": "chat.completion", "choices": []})
            .to_string()
            .into_response(),
        Reply::Raw(body) => body.into_response(),
        Reply::Delayed(..) | Reply::Held(..) | Reply::Unsteady { .. } => {
            unreachable!("unwrapped above")
        }
    };
    open.close();
    response
}

fn in_pieces(pieces: Vec<Bytes>, after: After, open: Open) -> Response {
    let pieces =
        stream::unfold((VecDeque::from(pieces), open), move |(mut pieces, open)| async move {
            let piece = match (pieces.pop_front(), after) {
                (Some(piece), _) => Ok(piece),
                (None, After::End) => {
                    open.close();
                    return None;
                }
                (None, After::Reset) => {
                    Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset))
                }
                (None, After::Silence) => pending().await,
            };
            Some((piece, (pieces, open)))
        });
    ([("content-type", "text/event-stream")], Body::from_stream(pieces)).into_response()
}

fn in_words(
    allowed: watch::Receiver<usize>,
    number: usize,
    request: &Value,
    message: &Value,
    open: Open,
) -> Response {
    let reason = if message["tool_calls"].is_null() { "stop" } else { "tool_calls" };
    let words = message["content"].as_str().unwrap().split_inclusive(' ').count();
    let usage = json!({"prompt_tokens": 1, "completion_tokens": words, "total_tokens": 1 + words});
    let events = chunks::of(&format!("chatcmpl-{number}"), request, message, reason, &usage);
    // The first event opens the message and has no word.
    let sent = (VecDeque::from(events), 0, allowed, open);
    let events = stream::unfold(sent, move |(mut events, number, mut allowed, open)| async move {
        let Some(event) = events.pop_front() else {
            open.close();
            return None;
        };
        let needed = number.min(words + 1);
        allowed.wait_for(|allowed| *allowed >= needed).await.ok()?;
        Some((Ok::<_, Infallible>(event), (events, number + 1, allowed, open)))
    });
    ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
}

/// A pseudo-random number that depends only on this number (the mixing of splitmix64).
pub(crate) fn pseudo_random(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn completion(number: usize, request: &Value, message: &Value, finish_reason: &str) -> Response {
    if request.get("input").is_some() {
        let answer = responses::answer(number, request, message);
        if request["stream"] == json!(true) {
            return events(responses::events(&answer));
        }
        return answer.to_string().into_response();
    }
    let prompt = request.to_string().len() / 4;
    let written = message.to_string().len() / 4;
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written});
    let id = format!("chatcmpl-{number}");
    if request["stream"] == json!(true) {
        return events(chunks::of(&id, request, message, finish_reason, &usage));
    }
    let choice =
        json!({"index": 0, "message": message, "logprobs": null, "finish_reason": finish_reason});
    let body = json!({"id": id, "object": "chat.completion", "created": 0, "model": request["model"],
        "choices": [choice], "usage": usage});
    body.to_string().into_response()
}

fn events(events: Vec<Bytes>) -> Response {
    let body = Body::from_stream(stream::iter(events.into_iter().map(Ok::<_, Infallible>)));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// The rules of the real API; the message is what it would complain about.
pub(crate) fn check(body: &Value) -> Result<(), String> {
    const FIELDS: [&str; 19] = [
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "temperature",
        "max_completion_tokens",
        "response_format",
        "stream",
        "stream_options",
        "reasoning_effort",
        "top_p",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "user",
        "service_tier",
        "logit_bias",
    ];
    let fields = body.as_object().ok_or("the body must be an object")?;
    if let Some(unknown) = fields.keys().find(|field| !FIELDS.contains(&field.as_str())) {
        return Err(format!("Unrecognized request argument supplied: {unknown}"));
    }
    if body["model"].as_str().is_none_or(str::is_empty) {
        return Err("you must provide a model parameter".into());
    }
    if body.get("stream_options").is_some() && body["stream"] != json!(true) {
        return Err("'stream_options' is only allowed when 'stream' is enabled".into());
    }
    if let Some(effort) = body.get("reasoning_effort") {
        if !["none", "minimal", "low", "medium", "high", "xhigh", "max"]
            .iter()
            .any(|known| effort == known)
        {
            return Err(format!("'reasoning_effort' does not support {effort}"));
        }
        if body.get("temperature").is_some() {
            return Err("'temperature' is not supported with reasoning".into());
        }
    }
    check_options(body)?;
    if let Some(format) =
        body.pointer("/response_format/json_schema").filter(|format| format["strict"] == true)
    {
        check_strict(&format["schema"])?;
    }
    let offered = check_tools(body.get("tools"))?;
    match body.get("tool_choice") {
        Some(_) if offered.is_empty() => {
            return Err("'tool_choice' is only allowed when 'tools' are specified".into());
        }
        Some(Value::String(mode)) if matches!(mode.as_str(), "none" | "auto" | "required") => {}
        Some(choice) => {
            let name = choice.pointer("/function/name").and_then(Value::as_str);
            if choice["type"] != "function" || !name.is_some_and(|name| offered.contains(&name)) {
                return Err(format!("'tool_choice' names no offered tool: {choice}"));
            }
        }
        None => {}
    }
    if offered.is_empty() && body.get("parallel_tool_calls").is_some() {
        return Err("'parallel_tool_calls' is only allowed when 'tools' are specified".into());
    }
    match body["messages"].as_array() {
        Some(messages) if !messages.is_empty() => check_messages(messages),
        _ => Err("'messages' must be a list of at least one message".into()),
    }
}

/// Options with their bounds; JSON mode needs the word in the conversation.
fn check_options(body: &Value) -> Result<(), String> {
    let within = |name: &str, least: f64, most: f64| match &body[name] {
        Value::Null => true,
        value => value.as_f64().is_some_and(|value| (least..=most).contains(&value)),
    };
    for (name, least, most) in
        [("top_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0)]
    {
        if !within(name, least, most) {
            return Err(format!("'{name}' must be between {least} and {most}"));
        }
    }
    if body.get("seed").is_some_and(|seed| !seed.is_i64()) {
        return Err("'seed' must be an integer".into());
    }
    if body
        .get("stop")
        .is_some_and(|stop| !stop.as_array().is_some_and(|texts| (1..=4).contains(&texts.len())))
    {
        return Err("'stop' must be a list of up to 4 texts".into());
    }
    let reasons = body["model"].as_str().is_some_and(|model| model.starts_with("gpt-5"));
    let unsupported = ["top_p", "stop", "presence_penalty", "frequency_penalty"];
    if let Some(name) = unsupported.iter().find(|name| reasons && body.get(**name).is_some()) {
        return Err(format!("Unsupported parameter: '{name}' is not supported with this model."));
    }
    check_json_mode(&body["response_format"], &body["messages"])
}

/// What JSON mode demands of the conversation.
pub(crate) fn check_json_mode(format: &Value, conversation: &Value) -> Result<(), String> {
    if format["type"] != "json_object" {
        return Ok(());
    }
    if format.as_object().is_some_and(|fields| fields.len() > 1) {
        return Err("'json_object' takes no schema".into());
    }
    if conversation.to_string().to_lowercase().contains("json") {
        return Ok(());
    }
    Err("'messages' must contain the word 'json' in some form".into())
}

/// The names of the offered tools.
fn check_tools(tools: Option<&Value>) -> Result<Vec<&str>, String> {
    let Some(tools) = tools else { return Ok(Vec::new()) };
    let tools = tools
        .as_array()
        .filter(|tools| !tools.is_empty())
        .ok_or("'tools' must be a list, and not empty")?;
    check_count(tools)?;
    let mut names = Vec::new();
    for (number, tool) in tools.iter().enumerate() {
        let name = check_name(tool)?;
        let function = &tool["function"];
        check_description(&format!("tools[{number}].function"), function)?;
        function.get("parameters").map_or(Ok(()), |schema| check_parameters(name, schema))?;
        if tool["function"]["strict"] == json!(true) {
            check_strict(&tool["function"]["parameters"])?;
        }
        if names.contains(&name) {
            return Err(format!("the tool {name} is offered twice"));
        }
        names.push(name);
    }
    Ok(names)
}

pub(crate) fn check_count(tools: &[Value]) -> Result<(), String> {
    const MAX: usize = 128;
    let count = tools.len();
    if count <= MAX {
        return Ok(());
    }
    Err(format!(
        "Invalid 'tools': array too long. Expected an array with maximum length {MAX}, but got an \
         array with length {count} instead."
    ))
}

pub(crate) fn check_description(at: &str, tool: &Value) -> Result<(), String> {
    const MAX: usize = 1024;
    let count = tool["description"].as_str().map_or(0, |said| said.chars().count());
    if count <= MAX {
        return Ok(());
    }
    Err(format!(
        "Invalid '{at}.description': string too long. Expected a string with maximum length {MAX}, \
         but got a string with length {count} instead."
    ))
}

/// What the API demands of the schema of a tool.
pub(crate) fn check_parameters(name: &str, schema: &Value) -> Result<(), String> {
    check_root(name, schema)?;
    check_lists(name, schema)
}

fn check_lists(name: &str, schema: &Value) -> Result<(), String> {
    let kinds = &schema["type"];
    let is_list = kinds == "array"
        || kinds.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "array"));
    if is_list && schema.get("items").is_none() {
        return Err(format!(
            "Invalid schema for function '{name}': array schema missing items: {schema}"
        ));
    }
    let is_schema = |keyword: &str| !["enum", "const", "default", "examples"].contains(&keyword);
    let inner = schema.as_object().into_iter().flatten();
    for (_, inner) in inner.filter(|(keyword, _)| is_schema(keyword)) {
        match inner {
            Value::Array(each) => each.iter().try_for_each(|inner| check_lists(name, inner))?,
            inner => check_lists(name, inner)?,
        }
    }
    Ok(())
}

/// What the API demands of the root of a schema.
fn check_root(name: &str, schema: &Value) -> Result<(), String> {
    const FORBIDDEN: [&str; 6] = ["oneOf", "anyOf", "allOf", "enum", "not", "$ref"];
    let invalid = format!("Invalid schema for function '{name}':");
    if schema["type"] != "object" || FORBIDDEN.iter().any(|keyword| schema.get(*keyword).is_some())
    {
        return Err(format!(
            "{invalid} schema must have type 'object' and not have \
             'oneOf'/'anyOf'/'allOf'/'enum'/'not' at the top level."
        ));
    }
    if schema["properties"].is_object() {
        return Ok(());
    }
    Err(format!("{invalid} In context=(), object schema missing properties."))
}

/// What `strict` demands of every object in a schema.
pub(crate) fn check_strict(schema: &Value) -> Result<(), String> {
    for inner in schema.as_object().into_iter().flat_map(|keywords| keywords.values()) {
        match inner {
            Value::Array(each) => each.iter().try_for_each(check_strict)?,
            inner => check_strict(inner)?,
        }
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return Ok(());
    };
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let all_required = properties.keys().all(|key| required.iter().any(|name| name == key));
    if schema["additionalProperties"] == json!(false)
        && all_required
        && required.len() == properties.len()
    {
        return Ok(());
    }
    Err(format!(
        "Invalid schema: 'additionalProperties' must be false and all properties required: {schema}"
    ))
}

/// The name in `{"type": "function", "function": {"name": …}}`.
fn check_name(function: &Value) -> Result<&str, String> {
    let name = function.pointer("/function/name").and_then(Value::as_str);
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match name {
        Some(name)
            if function["type"] == "function"
                && (1..=64).contains(&name.len())
                && name.chars().all(allowed) =>
        {
            Ok(name)
        }
        _ => Err(format!("not a function with a name like ^[a-zA-Z0-9_-]{{1,64}}$: {function}")),
    }
}

/// Every call is answered by exactly one tool message before anything else is said.
fn check_messages(messages: &[Value]) -> Result<(), String> {
    let mut unanswered: Vec<&str> = Vec::new();
    let mut ids = HashSet::new();
    for (index, message) in messages.iter().enumerate() {
        let at = format!("messages[{index}]");
        let role = message["role"].as_str().unwrap_or_default();
        if role != "tool" && !unanswered.is_empty() {
            return Err(format!(
                "{at}: tool_call_ids did not have response messages: {unanswered:?}"
            ));
        }
        let has_text = message["content"].is_string() || message["content"].is_array();
        match role {
            "system" | "developer" | "user" if has_text => {}
            "assistant" => unanswered = check_assistant(message, &mut ids, &at, has_text)?,
            "tool" if has_text => {
                let id = message["tool_call_id"]
                    .as_str()
                    .ok_or(format!("{at}: missing 'tool_call_id'"))?;
                let open = unanswered.iter().position(|waiting| *waiting == id);
                let open = open.ok_or(format!(
                    "{at}: role 'tool' must be a response to a preceding tool call"
                ))?;
                unanswered.remove(open);
            }
            "system" | "developer" | "user" | "tool" => {
                return Err(format!("{at}: content must be text"));
            }
            other => return Err(format!("{at}: '{other}' is not a role")),
        }
    }
    if unanswered.is_empty() {
        Ok(())
    } else {
        Err(format!("tool calls without a response: {unanswered:?}"))
    }
}

/// The ids of the calls, which no earlier one has.
fn check_assistant<'a>(
    message: &'a Value,
    known: &mut HashSet<&'a str>,
    at: &str,
    has_text: bool,
) -> Result<Vec<&'a str>, String> {
    let Some(calls) = message.get("tool_calls") else {
        return if has_text && message["content"] != "" {
            Ok(Vec::new())
        } else {
            Err(format!("{at}: content is null without tool calls"))
        };
    };
    let calls = calls.as_array().filter(|calls| !calls.is_empty());
    let mut ids = Vec::new();
    for call in calls.ok_or(format!("{at}: tool_calls must be a list, and not empty"))? {
        check_name(call).map_err(|problem| format!("{at}: {problem}"))?;
        if !call.pointer("/function/arguments").is_some_and(Value::is_string) {
            return Err(format!("{at}: arguments must be a string"));
        }
        // As compatible servers do, whose templates read them.
        let arguments = call.pointer("/function/arguments").and_then(Value::as_str);
        let is_object =
            |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|it| it.is_object());
        if !arguments.is_some_and(is_object) {
            return Err(format!("{at}: arguments are not an object: {arguments:?}"));
        }
        let id = call["id"].as_str().filter(|id| (1..=40).contains(&id.len()));
        let id = id.ok_or(format!("{at}: a call without an id of at most 40 characters"))?;
        if !known.insert(id) {
            return Err(format!("{at}: duplicate tool call id {id}"));
        }
        ids.push(id);
    }
    Ok(ids)
}

#[test]
fn the_server_refuses_what_the_real_one_refuses() {
    let user = json!({"role": "user", "content": "hi"});
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "t", "arguments": "{}"}});
    let asks = |calls: Value| json!({"role": "assistant", "content": null, "tool_calls": calls});
    let tool = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "ok"});
    let offer = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}});
    let said = |messages: Value| json!({"model": "m", "messages": messages});
    let offering = |more: Value| {
        let mut body = said(json!([user]));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let good = [
        said(json!([user, asks(json!([call("a"), call("b")])), tool("b"), tool("a"), user])),
        offering(
            json!({"tools": [offer("t")], "tool_choice": {"type": "function", "function": {"name": "t"}}}),
        ),
    ];
    for body in good {
        assert_eq!(check(&body), Ok(()), "{body}");
    }
    let mut bad_arguments = call("a");
    bad_arguments["function"]["arguments"] = json!({});
    let again = json!([user, asks(json!([call("a")])), tool("a"), asks(json!([call("a")]))]);
    let mut bad_name = call("a");
    bad_name["function"]["name"] = json!("mcp:time/now");
    let mut strict_offer = offer("t");
    strict_offer["function"]["strict"] = json!(true);
    strict_offer["function"]["parameters"] =
        json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let bad = [
        (json!([]), "must be an object"),
        (said(json!([])), "at least one message"),
        (json!({"model": "m"}), "at least one message"),
        (json!({"messages": [user]}), "model"),
        (offering(json!({"max_tokens": 3})), "max_tokens"),
        (said(json!([{"role": "robot", "content": "x"}])), "not a role"),
        (said(json!([{"role": "user", "content": null}])), "must be text"),
        (said(json!([{"role": "assistant", "content": null}])), "without tool calls"),
        (said(json!([user, asks(json!([]))])), "not empty"),
        (said(json!([user, asks(json!([call("a")]))])), "without a response"),
        (said(json!([user, asks(json!([call("a")])), user, tool("a")])), "did not have response"),
        (
            said(json!([user, asks(json!([call("a"), call("b")])), tool("a"), user])),
            "did not have response",
        ),
        (
            said(json!([user, asks(json!([call("a")])), tool("a"), tool("a")])),
            "preceding tool call",
        ),
        (said(json!([user, tool("a")])), "preceding tool call"),
        (said(json!([user, asks(json!([call("a"), call("a")]))])), "duplicate"),
        (said(again), "duplicate"),
        (said(json!([user, asks(json!([bad_arguments]))])), "must be a string"),
        (said(json!([user, asks(json!([bad_name]))])), "a name like"),
        (offering(json!({"tools": []})), "not empty"),
        (offering(json!({"tools": ["t"]})), "a name like"),
        (offering(json!({"tools": [offer(&"x".repeat(65))]})), "a name like"),
        (offering(json!({"tools": [offer("t"), offer("t")]})), "twice"),
        (offering(json!({"tool_choice": "auto"})), "only allowed"),
        (offering(json!({"stream_options": {"include_usage": true}})), "only allowed"),
        (offering(json!({"reasoning_effort": "a lot"})), "does not support"),
        (offering(json!({"reasoning_effort": "low", "temperature": 0.1})), "not supported"),
        (offering(json!({"stop_sequences": ["x"]})), "stop_sequences"),
        (offering(json!({"stop": "x"})), "'stop'"),
        (offering(json!({"top_p": 2})), "top_p"),
        (offering(json!({"options": {"seed": 1}})), "options"),
        (offering(json!({"response_format": {"type": "json_object"}})), "the word 'json'"),
        (offering(json!({"tools": [strict_offer]})), "must be false"),
        (offering(json!({"tools": [offer("t")], "tool_choice": "any"})), "no offered tool"),
        (
            offering(
                json!({"tools": [offer("t")], "tool_choice": {"type": "function", "function": {"name": "u"}}}),
            ),
            "no offered tool",
        ),
    ];
    for (body, complaint) in bad {
        let refusal = check(&body).unwrap_err();
        assert!(refusal.contains(complaint), "{body}\n{refusal}");
    }
}

#[test]
fn roots_of_schemas_are_checked() {
    for (root, complaint) in [
        (json!({"type": "object"}), "missing properties"),
        (json!({"properties": {}}), "must have type 'object'"),
        (json!({"type": "object", "properties": {}, "anyOf": []}), "at the top level"),
        (
            json!({"type": "object", "properties": {"a": {"anyOf": [{"type": ["null", "array"]}]}}}),
            "array schema missing items",
        ),
    ] {
        let offer = json!({"type": "function", "function": {"name": "t", "parameters": root}});
        let refusal = check_tools(Some(&json!([offer]))).unwrap_err();
        assert!(refusal.contains(complaint), "{root}: {refusal}");
    }
}

#[test]
fn tools_are_counted_and_described_in_few_words() {
    let offer = |description: String| {
        let function = json!({"name": "t", "description": description,
            "parameters": {"type": "object", "properties": {}}});
        json!({"type": "function", "function": function})
    };
    assert!(check_tools(Some(&json!([offer("ä".repeat(1024))]))).is_ok());
    for (tools, complaint) in [
        (vec![offer("ä".repeat(1025))], "maximum length 1024, but got a string with length 1025"),
        (vec![offer(String::new()); 129], "maximum length 128, but got an array with length 129"),
    ] {
        let refusal = check_tools(Some(&json!(tools))).unwrap_err();
        assert!(refusal.contains(complaint), "{refusal}");
    }
}
