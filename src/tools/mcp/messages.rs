//! JSON-RPC messages of the Model Context Protocol, as far as a client of tools needs them,
//! and how a request can fail.
//!
//! Pure: what is written, and what is read within bounds. The protocol is spoken here and not by a
//! library, because all that is read must be bounded before it is parsed.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::bounds::json;
use crate::bounds::secrets::without_known_secrets;
use crate::bounds::text::shortened;
use crate::event::InputAnswer;

/// The timeout of requests that belong to no call.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(10);
/// Versions of the old era that are spoken, the preferred one first.
pub(super) const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// The version of the new era, which has no handshake.
pub(super) const NEW_VERSION: &str = "2026-07-28";
/// The method that begins a session.
pub(super) const INITIALIZE: &str = "initialize";
/// Bytes of one message that is read.
pub(super) const MAX_MESSAGE: usize = 4 * 1024 * 1024;
/// Bytes of a refusal over HTTP that is read as a message.
const MAX_REFUSAL: usize = 64 * 1024;
/// Bytes of the id of a request of the server's.
const MAX_ID: usize = 256;
/// The key of `_meta` by which a server recognises a call that is repeated.
pub(super) const EFFECT_KEY: &str = "toolloop/effect-key";
/// The method that calls a tool.
pub(super) const CALL: &str = "tools/call";
/// What JSON-RPC calls a method that is not offered.
pub(super) const NOT_OFFERED: i64 = -32601;

/// A message from a server.
#[derive(Debug)]
pub(super) enum ServerMessage {
    /// The answer to the request of that number.
    Answer(u64, Result<Value, Fault>),
    /// A ping, with the reply.
    Ping(String),
    /// A request for something that this client does not offer, with the refusal.
    Refused(String),
    /// Its list of tools has changed.
    ListChanged,
    /// Nothing that matters here.
    Other,
}

/// A JSON-RPC error.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Fault {
    #[serde(default)]
    pub(super) code: i64,
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) data: Value,
}

impl Fault {
    /// Its message, shortened; known secrets are removed first, so that none is cut in two.
    fn shown(&self) -> String {
        shortened(&without_known_secrets(&self.message))
    }
}

/// Why a request has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// It certainly never reached the server.
    #[error("{0}")]
    NotSent(String),
    /// Whether it took effect is unknown.
    #[error("{0}")]
    Lost(String),
    /// The server refuses it.
    #[error("the server refuses it: {} (code {})", .0.shown(), .0.code)]
    Refused(Fault),
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    method: Option<String>,
    result: Option<Value>,
    error: Option<Fault>,
}

#[derive(Serialize)]
struct Reply<'a> {
    jsonrpc: &'a str,
    id: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
}

/// A request, on one line.
pub(super) fn request(id: u64, method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string()
}

/// A message that is not answered, on one line.
pub(super) fn notification(method: &str, params: &Value) -> String {
    if params.is_null() {
        return json!({"jsonrpc": "2.0", "method": method}).to_string();
    }
    json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()
}

/// The notification that follows the answer to `initialize`.
pub(super) fn initialized() -> String {
    notification("notifications/initialized", &Value::Null)
}

/// The answer to a request is not needed any more.
pub(super) fn cancellation(id: u64) -> String {
    let params = json!({"requestId": id, "reason": "the caller no longer waits for it"});
    notification("notifications/cancelled", &params)
}

/// The parameters of `initialize`.
pub(super) fn initialize_params() -> Value {
    json!({
        "protocolVersion": VERSIONS[0],
        "capabilities": {},
        "clientInfo": client_info(),
    })
}

/// Adds the metadata that a request of the new era must have.
pub(super) fn in_new_era(mut params: Value) -> Value {
    let meta = &mut params["_meta"];
    meta["io.modelcontextprotocol/protocolVersion"] = NEW_VERSION.into();
    meta["io.modelcontextprotocol/clientInfo"] = client_info();
    meta["io.modelcontextprotocol/clientCapabilities"] = json!({"elicitation": {"form": {}}});
    params
}

fn client_info() -> Value {
    json!({"name": "toolloop", "version": env!("CARGO_PKG_VERSION")})
}

/// The version that the server speaks.
///
/// # Errors
/// Why client and server have no common version: a phrase.
pub(super) fn version_in(introduced: &Value) -> Result<&'static str, String> {
    let theirs = introduced["protocolVersion"].as_str().unwrap_or_default();
    VERSIONS.into_iter().find(|version| *version == theirs).ok_or_else(|| {
        format!("it speaks the protocol version {:?}, which is not supported", shortened(theirs))
    })
}

/// The request that a call is, made again where something was given to it.
pub(super) fn call(
    tool: &str,
    arguments: &Value,
    effect_key: &str,
    traceparent: Option<&str>,
    given: Option<&InputAnswer>,
) -> Value {
    let mut meta = json!({EFFECT_KEY: effect_key});
    if let Some(traceparent) = traceparent {
        meta["traceparent"] = traceparent.into();
    }
    let mut call = json!({"name": tool, "arguments": arguments, "_meta": meta});
    if let Some(InputAnswer { request_state, responses, .. }) = given {
        if !responses.is_empty() {
            call["inputResponses"] = json!(responses);
        }
        if let Some(state) = request_state {
            call["requestState"] = state.as_str().into();
        }
    }
    call
}

/// The refusal that the body of an answer over HTTP is.
pub(super) fn fault_in(body: &[u8]) -> Option<Fault> {
    let body = Some(body).filter(|body| body.len() <= MAX_REFUSAL)?;
    json::read::<Message<'_>>(body).ok()?.error.filter(|fault| fault.code != 0)
}

/// Reads one message.
///
/// # Errors
/// Why it cannot be read: a phrase.
pub(super) fn parse(text: &[u8]) -> Result<ServerMessage, String> {
    let Message { id, method, result, error } =
        json::read(text).map_err(|error| shortened(&error.to_string()))?;
    match (id, method) {
        (None, Some(method)) if method == "notifications/tools/list_changed" => {
            Ok(ServerMessage::ListChanged)
        }
        (None, _) => Ok(ServerMessage::Other),
        (Some(id), Some(method)) => {
            if id.get().len() > MAX_ID {
                return Ok(ServerMessage::Other);
            }
            let is_ping = method == "ping";
            let refusal = json!({"code": NOT_OFFERED, "message": "toolloop does not offer this"});
            let reply = Reply {
                jsonrpc: "2.0",
                id,
                result: is_ping.then(|| json!({})),
                error: (!is_ping).then_some(refusal),
            };
            let reply = serde_json::to_string(&reply).map_err(|error| error.to_string())?;
            Ok(if is_ping { ServerMessage::Ping(reply) } else { ServerMessage::Refused(reply) })
        }
        (Some(id), None) => {
            let Ok(id) = id.get().parse() else { return Ok(ServerMessage::Other) };
            let answer = match (result, error) {
                (_, Some(error)) => Err(error),
                (Some(result), None) => Ok(result),
                (None, None) => Ok(Value::Null),
            };
            Ok(ServerMessage::Answer(id, answer))
        }
    }
}

/// The number of the request that an unreadable message answers, found in the beginning of the message.
pub(super) fn id_in(beginning: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(beginning);
    let (_, rest) = text.split_once("\"id\"")?;
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart() {
        let kind = |text: &str| match parse(text.as_bytes()) {
            Ok(ServerMessage::Answer(id, Ok(value))) => format!("{id} {value}"),
            Ok(ServerMessage::Answer(id, Err(fault))) => format!("{id} fault {}", fault.code),
            Ok(ServerMessage::Ping(reply)) => format!("ping {reply}"),
            Ok(ServerMessage::Refused(reply)) => format!("refused {}", reply.contains("-32601")),
            Ok(ServerMessage::ListChanged) => "changed".to_owned(),
            Ok(ServerMessage::Other) => "other".to_owned(),
            Err(_) => "unreadable".to_owned(),
        };
        for (text, expected) in [
            (r#"{"jsonrpc":"2.0","id":7,"result":{"a":1}}"#, r#"7 {"a":1}"#),
            (r#"{"jsonrpc":"2.0","id":7,"error":{"code":-3,"message":"no"}}"#, "7 fault -3"),
            (r#"{"id":"x","method":"ping"}"#, r#"ping {"jsonrpc":"2.0","id":"x","result":{}}"#),
            (r#"{"id":1,"method":"elicitation/create","params":{}}"#, "refused true"),
            (r#"{"method":"notifications/tools/list_changed"}"#, "changed"),
            (r#"{"method":"notifications/message","params":{"data":[1]}}"#, "other"),
            (r#"{"id":-1,"result":{}}"#, "other"),
            (r#"{"id":"7","result":{}}"#, "other"),
            (r#"{"id":7}"#, "7 null"),
            ("[]", "unreadable"),
            ("log line", "unreadable"),
        ] {
            assert_eq!(kind(text), expected, "{text}");
        }
        let refused = br#"{"jsonrpc":"2.0","error":{"code":-32022,"message":"m","data":{"supported":["a"]}}}"#;
        assert_eq!(fault_in(refused).unwrap().data["supported"], json!(["a"]));
        for body in ["", "not found", r#"{"error": "no"}"#, r#"{"id":1,"result":{}}"#] {
            assert_eq!(fault_in(body.as_bytes()), None, "{body}");
        }
        let deep = format!("{{\"id\":1,\"result\":{}{}}}", "[".repeat(200), "]".repeat(200));
        assert!(parse(deep.as_bytes()).unwrap_err().contains("levels deep"));
    }

    #[test]
    fn requests_of_the_new_era_say_what_they_are() {
        let given = InputAnswer {
            round: 1,
            request_state: Some("s".to_owned()),
            responses: serde_json::from_value(json!({"who": {"action": "decline"}})).unwrap(),
        };
        let call = in_new_era(call("t", &json!({"a": 1}), "k", None, Some(&given)));
        let meta = |key: &str| &call["_meta"][format!("io.modelcontextprotocol/{key}")];
        assert_eq!(meta("protocolVersion"), "2026-07-28");
        assert_eq!(meta("clientInfo")["name"], "toolloop");
        assert_eq!(meta("clientCapabilities"), &json!({"elicitation": {"form": {}}}));
        assert_eq!(call["_meta"][EFFECT_KEY], "k");
        assert_eq!(call["inputResponses"], json!({"who": {"action": "decline"}}));
        assert_eq!((&call["requestState"], &call["name"]), (&json!("s"), &json!("t")));
        assert!(in_new_era(json!({}))["_meta"].is_object());
    }

    #[test]
    fn a_refusal_is_shortened_to_a_text_without_known_secrets() {
        crate::bounds::secrets::remember(["the-key-of-a-server".to_owned()]);
        let message = format!("{}the-key-of-a-server is unknown", "x".repeat(190));
        let fault = Fault { code: 401, message, data: Value::Null };
        let said = Failure::Refused(fault).to_string();
        assert!(said.contains("x[redacted") && !said.contains("the-key"), "{said}");
    }

    #[test]
    fn who_waits_for_a_long_message_is_found() {
        assert_eq!(id_in(br#"{"jsonrpc":"2.0","id": 42,"result":{"content"#), Some(42));
        assert_eq!(id_in(br#"{"jsonrpc":"2.0","id":"a"#), None);
        assert_eq!(id_in(b"\xff\xfe"), None);
    }
}
