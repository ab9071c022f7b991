//! Extractors for bodies, path parameters and query parameters.
//!
//! All routes read their requests through these, so that every route rejects the same input: bodies
//! that are too large, of another media type, malformed or too deeply nested; `\u0000`, which
//! PostgreSQL cannot store; unknown, repeated or undecodable parameters. The meaning of the fields
//! is left to the resources.

use std::str::FromStr;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri};
use chrono::{DateTime, Datelike as _, SubsecRound, TimeDelta, Utc};
use http_body_util::BodyExt;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use strum::VariantNames;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{Number, PartialSchema};
use uuid::Uuid;

use super::cursor::{Filters, ListId};
use super::large_bodies::{BodyPlace, SMALL};
use super::problem::{Code, Problem};
use crate::bounds::json::{self, Unreadable, escaped_key, unescaped_key};
use crate::bounds::memory;
use crate::bounds::text::{bare_type, quoted, shortened};
use crate::event::ValidationError;
use crate::http::state::App;
use crate::runtime::CallRef;

/// Describes a valid time, for errors.
const A_TIME: &str = "a time like 2026-01-31T12:00:00Z";
/// Parameters of a query: each is compared with those before it.
const MAX_PARAMETERS: usize = 64;

/// The body, which must be a JSON object; an absent body, and `null`, are an empty object.
pub(crate) struct JsonObject(pub(crate) Map<String, Value>);

impl FromRequest<App> for JsonObject {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &App) -> Result<Self, Problem> {
        Self::read(app, request).await
    }
}

impl JsonObject {
    pub(crate) async fn read(app: &App, request: Request) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let mut place = BodyPlace::of_request(&parts.extensions);
        let read = read_body(body, app.settings.body_limit, &mut place);
        let bytes = tokio::time::timeout(app.settings.body_timeout, read).await;
        let bytes = bytes.map_err(|_| Problem::body_timeout())??;
        if bytes.is_empty() {
            return Ok(Self(Map::new()));
        }
        refuse_encoding(&parts.headers)?;
        if !is_json(&parts.headers) {
            return Err(Problem::new(
                Code::UnsupportedMediaType,
                "The body must be sent as application/json.",
            ));
        }
        object(&bytes).map(Self)
    }
}

async fn read_body(mut body: Body, limit: usize, place: &mut BodyPlace) -> Result<Bytes, Problem> {
    let too_large =
        || Problem::new(Code::PayloadTooLarge, format!("The body is larger than {limit} bytes."));
    let announced = body.size_hint();
    if announced.lower() > limit as u64 {
        return Err(too_large());
    }
    let most = announced.exact().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(limit);
    let mut first = Bytes::new();
    let mut rest: Vec<u8> = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Problem::body_incomplete(&e))?;
        let Ok(data) = frame.into_data() else { continue };
        let length = first.len() + rest.len() + data.len();
        if length > limit {
            return Err(too_large());
        }
        place.hold(length, most)?;
        if first.is_empty() {
            first = data;
        } else {
            rest.extend_from_slice(&data);
        }
    }
    if rest.is_empty() {
        return Ok(first);
    }
    Ok([first.as_ref(), &rest].concat().into())
}

/// Refuses a body that is compressed.
pub(crate) fn refuse_encoding(headers: &HeaderMap) -> Result<(), Problem> {
    let Some(encoding) = content_encoding(headers) else { return Ok(()) };
    let detail = format!("The body must be sent without Content-Encoding, not as {encoding:?}.");
    Err(Problem::new(Code::UnsupportedMediaType, detail))
}

/// The first content coding other than `identity`, cut to 64 characters.
fn content_encoding(headers: &HeaderMap) -> Option<String> {
    let codings = headers.get_all(CONTENT_ENCODING).iter();
    codings
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(|coding| String::from_utf8_lossy(coding).trim().to_owned())
        .find(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"))
        .map(|coding| coding.chars().take(64).collect())
}

fn is_json(headers: &HeaderMap) -> bool {
    let named = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    bare_type(named) == "application/json"
}

/// The object in a body; one that is not small is refused while memory is scarce.
pub(crate) fn object(body: &[u8]) -> Result<Map<String, Value>, Problem> {
    if body.len() > SMALL && memory::is_scarce() {
        let detail =
            "The service is short of memory; retry requests with large bodies after Retry-After.";
        return Err(Problem::new(Code::Overloaded, detail));
    }
    if escapes_nul(body) {
        return Err(Problem::new(
            Code::MalformedJson,
            "The body contains the character \\u0000, which cannot be stored.",
        ));
    }
    let refused = match json::read_exactly(body) {
        Ok(Value::Object(object)) => return Ok(object),
        Ok(Value::Null) => return Ok(Map::new()), // what clients send whose body is optional
        Ok(_) => return Err(Problem::at(Code::InvalidInputs, "", "must be a JSON object")),
        Err(e @ Unreadable::Malformed(_)) => format!("The body is not JSON: {e}."),
        Err(e @ Unreadable::Inexact(_)) => {
            format!("The body holds a number that cannot be stored exactly: {e}.")
        }
        Err(beyond) => format!("The body is too complex: {beyond}."),
    };
    Err(Problem::new(Code::MalformedJson, refused))
}

/// Whether JSON text contains an escaped NUL. A raw NUL is not valid JSON anyway.
fn escapes_nul(json: &[u8]) -> bool {
    let mut at = 0;
    while let Some(found) = json[at..].iter().position(|b| *b == b'\\') {
        let escape = &json[at + found + 1..];
        if escape.starts_with(b"u0000") {
            return true;
        }
        at = (at + found + 2).min(json.len());
    }
    false
}

/// Deserializes an object; the error's pointer names the offending field, also if it is unknown.
pub(crate) fn fields<T: DeserializeOwned + PartialSchema>(
    mut object: Map<String, Value>,
) -> Result<T, ValidationError> {
    object.values_mut().for_each(as_whole);
    let read = serde_path_to_error::deserialize(Value::Object(object)).map_err(|error| {
        let pointer = pointer(error.path());
        let said = error.into_inner().to_string();
        match said.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
            Some(name) => ValidationError {
                pointer: format!("{pointer}/{}", escaped_key(name)),
                message: "is required".to_owned(),
            },
            None => ValidationError { pointer, message: shortened(&in_words(said)) },
        }
    });
    read.map_err(|error| in_range::<T>("", error))
}

/// Converts a float that JSON Schema accepts as an integer: `5.0` becomes 5.
pub(crate) fn as_whole(value: &mut Value) {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64().filter(|_| value.is_f64());
    let whole = number.filter(|number| number.fract() == 0.0 && number.abs() <= EXACT);
    #[expect(clippy::cast_possible_truncation, reason = "exact below 2^53")]
    if let Some(whole) = whole {
        *value = (whole as i64).into();
    }
}

/// Adds the range of a number to the error, if the schema of the object at `place` has one.
pub(crate) fn in_range<T: PartialSchema>(
    place: &str,
    mut error: ValidationError,
) -> ValidationError {
    if error.message != format!("must be {WHOLE}") {
        return error;
    }
    let field = error.pointer.strip_prefix(place).and_then(|rest| rest.strip_prefix('/'));
    let RefOr::T(Schema::Object(object)) = T::schema() else { return error };
    let field = field.and_then(|field| object.properties.get(&unescaped_key(field)));
    let Some(RefOr::T(Schema::Object(number))) = field else { return error };
    let text = |number: &Number| match number {
        Number::Int(number) => number.to_string(),
        Number::UInt(number) => number.to_string(),
        Number::Float(number) => number.to_string(),
    };
    let range = match (number.minimum.as_ref().map(text), number.maximum.as_ref().map(text)) {
        (Some(least), Some(most)) => format!(" from {least} to {most}"),
        (Some(least), None) => format!(" of at least {least}"),
        (None, _) => String::new(),
    };
    error.message.push_str(&range);
    error
}

/// Describes an integer, for errors.
const WHOLE: &str = "a whole number";

/// An error of serde about a value, without names of Rust types.
fn in_words(said: String) -> String {
    if said.starts_with("UUID parsing failed") {
        return "must be a UUID".to_owned();
    }
    let kinds = ["invalid type: ", "invalid value: ", "unknown variant "];
    let is_wrong = kinds.iter().any(|kind| said.starts_with(kind));
    let Some((_, expected)) = said.rsplit_once(", expected ").filter(|_| is_wrong) else {
        return said;
    };
    let given = said.split('`').nth(1).and_then(|value| value.parse::<f64>().ok());
    #[expect(clippy::cast_precision_loss, reason = "what is compared is far from the largest")]
    let whole = |least: i64, most: u64| match given {
        Some(given) if given > most as f64 => format!("{WHOLE} of at most {most}"),
        Some(given) if least < 0 && given < least as f64 => format!("{WHOLE} of at least {least}"),
        _ => WHOLE.to_owned(),
    };
    let expected = match expected {
        "a map" => "an object".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a formatted UUID string" => "a UUID".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "u8" => whole(0, u8::MAX.into()),
        "u16" => whole(0, u16::MAX.into()),
        "u32" => whole(0, u32::MAX.into()),
        "u64" | "usize" => whole(0, u64::MAX),
        "i8" => whole(i8::MIN.into(), 127),
        "i16" => whole(i16::MIN.into(), 32_767),
        "i32" => whole(i32::MIN.into(), 2_147_483_647),
        "i64" | "isize" => whole(i64::MIN, 9_223_372_036_854_775_807),
        "map with a single key" => "an object with one field".to_owned(),
        "string or map" => "a string or an object".to_owned(),
        other if other.starts_with("struct ") => "an object".to_owned(),
        other => other.to_owned(),
    };
    format!("must be {expected}")
}

fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let segments = path.iter().filter_map(|segment| match segment {
        Segment::Seq { index } => Some(format!("/{index}")),
        Segment::Map { key } => Some(format!("/{}", escaped_key(key))),
        Segment::Enum { .. } | Segment::Unknown => None,
    });
    segments.collect()
}

/// A run id in the path; 404 if it is not a UUID.
pub(crate) struct RunId(pub(crate) Uuid);

impl FromRequestParts<App> for RunId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Name(text) = Name::from_request_parts(parts, app).await?;
        Uuid::try_parse(&text).map(Self).map_err(|_| Problem::not_found("run"))
    }
}

/// A run id and a tool call id in the path; 404 if one of them is not a UUID.
pub(crate) struct CallId(pub(crate) CallRef);

impl FromRequestParts<App> for CallId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let ids = Path::<(String, String)>::from_request_parts(parts, app).await;
        let Path((run, call)) = ids.map_err(|_| Problem::not_found("path"))?;
        let run = Uuid::try_parse(&run).map_err(|_| Problem::not_found("run"))?;
        let call = Uuid::try_parse(&call).map_err(|_| Problem::not_found("tool call"))?;
        Ok(Self(CallRef { run, call, seq: None }))
    }
}

/// A name or id in the path, percent-decoded.
pub(crate) struct Name(pub(crate) String);

impl FromRequestParts<App> for Name {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Path(name) = Path::<String>::from_request_parts(parts, app)
            .await
            .map_err(|_| Problem::not_found("path"))?;
        if name.contains('\0') { Err(Problem::not_found("path")) } else { Ok(Self(name)) }
    }
}

/// The query parameters. Handlers take the ones that they know; [`Self::finish`] rejects the rest.
#[derive(Debug, Default)]
pub(crate) struct Params {
    left: Vec<(String, String)>,
    /// As requested: lists are identified by it.
    uri: Uri,
}

impl FromRequestParts<App> for Params {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let params = Self::parse(parts.uri.query().unwrap_or_default())?;
        Ok(Self { uri: parts.uri.clone(), ..params })
    }
}

impl Params {
    /// Splits and decodes a query.
    pub(crate) fn parse(query: &str) -> Result<Self, Problem> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (Some(name), Some(value)) = (decoded(name), decoded(value)) else {
                return Err(invalid_parameter(name, "is not percent-encoded UTF-8 without NUL"));
            };
            if pairs.iter().any(|(known, _)| *known == name) {
                return Err(invalid_parameter(&name, "is given more than once"));
            }
            if pairs.len() == MAX_PARAMETERS {
                let detail = format!("The query has more than {MAX_PARAMETERS} parameters.");
                return Err(Problem::new(Code::InvalidParameter, detail));
            }
            pairs.push((name, value));
        }
        Ok(Self { left: pairs, uri: Uri::default() })
    }

    /// The id of the requested list, whichever parameters were taken.
    pub(crate) fn list(&self, tenant: &str) -> ListId {
        let given = Self::parse(self.uri.query().unwrap_or_default()).unwrap_or_default().left;
        let given = given.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Filters::new(self.uri.path(), given).of(tenant)
    }

    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        let at = self.left.iter().position(|(n, _)| n == name)?;
        Some(self.left.remove(at).1)
    }

    /// Takes a parameter and parses it with `read`; `what` describes a valid value for the error.
    pub(crate) fn value<T>(
        &mut self,
        name: &str,
        what: &str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Problem> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let value =
            read(&text).ok_or_else(|| invalid_parameter(name, &format!("must be {what}")))?;
        Ok(Some(value))
    }

    /// Takes a parameter that is one of the names of `T`.
    pub(crate) fn one_of<T: FromStr + VariantNames>(
        &mut self,
        name: &str,
    ) -> Result<Option<T>, Problem> {
        self.value(name, &format!("one of {}", T::VARIANTS.join(", ")), |text| text.parse().ok())
    }

    /// Takes a parameter that is one of these words.
    pub(crate) fn word(&mut self, name: &str, words: &[&str]) -> Result<Option<String>, Problem> {
        let read = |text: &str| words.contains(&text).then(|| text.to_owned());
        self.value(name, &format!("one of {}", words.join(", ")), read)
    }

    pub(crate) fn time(&mut self, name: &str) -> Result<Option<DateTime<Utc>>, Problem> {
        // An unencoded `+` of an offset was decoded as a space.
        self.value(name, A_TIME, |text| time(&text.replace(' ', "+")))
    }

    /// Takes the end of a period, or its beginning that belongs to it. Stored times are whole
    /// microseconds: the next one means the same.
    pub(crate) fn bound(&mut self, name: &str) -> Result<Option<DateTime<Utc>>, Problem> {
        let up = |time: DateTime<Utc>| match time.trunc_subsecs(6) {
            whole if whole < time => whole + TimeDelta::microseconds(1),
            whole => whole,
        };
        Ok(self.time(name)?.map(up))
    }

    pub(crate) fn uuid(&mut self, name: &str) -> Result<Option<Uuid>, Problem> {
        self.value(name, "a UUID", |text| Uuid::try_parse(text).ok())
    }

    /// Takes a parameter that is `true` or `false`, and `false` if it is absent.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, Problem> {
        let flag = self.value(name, "`true` or `false`", |text| text.parse().ok())?;
        Ok(flag.unwrap_or(false))
    }

    /// Takes all parameters named `<prefix><key>`, as `(key, value)`.
    pub(crate) fn prefixed(&mut self, prefix: &str) -> Vec<(String, String)> {
        let taken = self
            .left
            .extract_if(.., |(name, _)| name.len() > prefix.len() && name.starts_with(prefix));
        taken.map(|(name, value)| (name[prefix.len()..].to_owned(), value)).collect()
    }

    /// Rejects parameters that were not taken.
    pub(crate) fn finish(self) -> Result<(), Problem> {
        self.left.first().map_or(Ok(()), |(name, _)| {
            Err(invalid_parameter(name, "is not a parameter of this route"))
        })
    }
}

fn time(text: &str) -> Option<DateTime<Utc>> {
    let time = DateTime::parse_from_rfc3339(text).ok()?.to_utc();
    // A leap second is the first one of the next minute.
    let nanos = time.timestamp_subsec_nanos();
    let time = DateTime::from_timestamp(time.timestamp() + i64::from(nanos / NANOS), nanos % NANOS);
    // In UTC it may have a year of five digits, which RFC 3339 cannot write.
    time.filter(|time| (0..=9999).contains(&time.year()))
}

/// Nanoseconds of a second.
const NANOS: u32 = 1_000_000_000;

/// A time in a body, with an error that says how one is written.
pub(crate) fn optional_time<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let parsed =
        text.map(|text| time(&text).ok_or_else(|| D::Error::custom(format!("must be {A_TIME}"))));
    parsed.transpose()
}

pub(crate) fn invalid_parameter(name: &str, why: &str) -> Problem {
    Problem::new(Code::InvalidParameter, format!("The parameter {} {why}.", quoted(name)))
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [rest.next()?, rest.next()?].map(char::from);
                let [high, low] = digits.map(|digit| digit.to_digit(16));
                u8::try_from(high? * 16 + low?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

#[cfg(test)]
#[path = "extract_tests.rs"]
mod tests;
