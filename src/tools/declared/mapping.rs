//! Maps the arguments of a call to a request, by templates for its parts.
//!
//! A value that a model writes cannot change the structure of the request: it is percent-encoded in the
//! path, encoded in the query and in a form, must be one line in a header, and is a value in a JSON body.
//! Templates of the query and of headers may also use `env`, whose values are secrets: they are inserted
//! here and appear in no message.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use url::Url;
use url::form_urlencoded::byte_serialize;

use super::file::{BodyFormat, Entry};
use super::form::{self, text_of};
use super::{Environment, Wrong};
use crate::bounds::address;
use crate::bounds::json;
use crate::bounds::secrets;
use crate::bounds::template::{TemplateError, Templates, Undefined, is_template};

/// Bytes from which on a secret is looked for in answers.
const MIN_REMOVED: usize = 4;
/// Methods that a tool may have.
const METHODS: [Method; 6] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
/// Headers that may not be declared, most of them because the client sets them itself.
const NOT_HEADERS: [&str; 12] = [
    "accept-encoding",
    "connection",
    "content-length",
    "cookie",
    "expect",
    "host",
    "idempotency-key",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The media type of JSON.
const JSON: &str = "application/json";

/// Values of environment variables, by name.
#[derive(Clone, Default)]
pub(super) struct Secrets(BTreeMap<String, String>);

impl Secrets {
    /// Adds those that a template names.
    pub(super) fn add(
        &mut self,
        key: &str,
        template: &str,
        environment: Environment<'_>,
    ) -> Result<(), Wrong> {
        for name in named(template) {
            let value = environment(name).filter(|value| !value.is_empty()).ok_or_else(|| {
                Wrong::at(key, format!("the environment variable {name} is not set"))
            })?;
            secrets::remember([value.clone()]);
            self.0.insert(name.to_owned(), value);
        }
        Ok(())
    }

    /// A text without them, as they are and as they stand in a query.
    pub(super) fn removed_from(&self, mut text: String) -> String {
        for secret in removable(self.0.values()) {
            let encoded: String = byte_serialize(secret.as_bytes()).collect();
            for written in [secret, &encoded] {
                if text.contains(written.as_str()) {
                    text = text.replace(written.as_str(), "[redacted]");
                }
            }
        }
        text
    }

    fn variable(&self) -> Value {
        Value::Object(self.0.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect())
    }
}

/// The secrets that are looked for in answers, the longest first, because one may be a part of another. A short one
/// would be found everywhere.
pub(super) fn removable<S: AsRef<str>>(secrets: impl IntoIterator<Item = S>) -> Vec<S> {
    let long = secrets.into_iter().filter(|secret| secret.as_ref().len() >= MIN_REMOVED);
    let mut secrets: Vec<S> = long.collect();
    secrets.sort_by_key(|secret| Reverse(secret.as_ref().len()));
    secrets
}

/// The variables that a template names as `env.NAME`.
fn named(template: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    template.match_indices("env.").filter_map(move |(at, prefix)| {
        let is_other = template[..at].ends_with(|c: char| is_part(c) || c == '.');
        let rest = &template[at + prefix.len()..];
        let end = rest.find(|c: char| !is_part(c)).unwrap_or(rest.len());
        (end > 0 && !is_other).then(|| &rest[..end])
    })
}

/// A template that makes a text, or leaves it out where its only expression is undefined.
struct Part {
    name: String,
    template: String,
}

/// What templates may name, beside secrets.
#[derive(Clone, Copy)]
pub(super) struct TemplateInputs<'a> {
    pub(super) arguments: &'a Value,
    /// The call that is asked about; none for the call itself.
    pub(super) call: Option<&'a Value>,
}

impl<'a> TemplateInputs<'a> {
    fn variables(self) -> Vec<(&'static str, &'a Value)> {
        let call = self.call.map(|call| ("call", call));
        std::iter::once(("args", self.arguments)).chain(call).collect()
    }
}

/// How arguments become a request.
pub(super) struct Mapping {
    method: Method,
    path: String,
    query: Vec<Part>,
    headers: Vec<Part>,
    body: Option<Value>,
    body_format: BodyFormat,
    texts: Templates,
    paths: Templates,
}

impl Mapping {
    /// The mapping of an entry that has a method, and the secrets that it needs.
    pub(super) fn new(
        entry: &Entry,
        environment: Environment<'_>,
        secrets: &mut Secrets,
    ) -> Result<Self, Wrong> {
        let method = entry.method.as_deref().unwrap_or_default();
        let method = METHODS.iter().find(|known| known.as_str() == method).ok_or_else(|| {
            Wrong::at("method", "is not one of GET, HEAD, POST, PUT, PATCH and DELETE")
        })?;
        let path = entry.path.clone().ok_or_else(|| Wrong::at("path", "is missing"))?;
        if !path.starts_with('/')
            || outside_of_templates(&path).any(|text| text.contains(['?', '#', '\\']))
        {
            return Err(Wrong::at("path", "must begin with / and have neither ? nor #"));
        }
        if entry.body.is_some() && matches!(*method, Method::GET | Method::HEAD) {
            return Err(Wrong::at("body", format!("has no meaning with {method}")));
        }
        let texts = Templates::new(Undefined::Tested);
        let paths = Templates::new(Undefined::Tested).percent_encoding();
        check(&paths, "path", &path)?;
        if named(&path).next().is_some() {
            return Err(Wrong::at("path", "cannot use env: paths are recorded"));
        }
        for (name, template) in &entry.query {
            let key = format!("query.{name}");
            check(&texts, &key, template)?;
            secrets.add(&key, template, environment)?;
        }
        for (name, template) in &entry.headers {
            let key = format!("headers.{name}");
            check_header(&key, name)?;
            check(&texts, &key, template)?;
            secrets.add(&key, template, environment)?;
        }
        if let Some(body) = &entry.body {
            check_body(&texts, "body", body)?;
        }
        if entry.body_format == BodyFormat::Form {
            form::check(entry.body.as_ref(), |body| sole_expression(&texts, body).is_some())?;
        }
        let part = |(name, template): (&String, &String)| Part {
            name: name.clone(),
            template: template.clone(),
        };
        Ok(Self {
            method: method.clone(),
            path,
            query: entry.query.iter().map(part).collect(),
            headers: entry.headers.iter().map(part).collect(),
            body: entry.body.clone(),
            body_format: entry.body_format,
            texts,
            paths,
        })
    }

    pub(super) fn method(&self) -> &Method {
        &self.method
    }

    /// Where a call with these arguments goes, without its query.
    pub(super) fn address(&self, base: &Url, given: TemplateInputs<'_>) -> Result<Url, String> {
        let path = self
            .paths
            .render_source(&self.path, &given.variables())
            .map_err(|e| format!("The path cannot be made: {}.", described(&e)))?;
        let is_dots = |part: &str| {
            let part = part.to_ascii_lowercase().replace("%2e", ".");
            part == "." || part == ".."
        };
        let parts = path.strip_suffix('/').filter(|_| self.path.ends_with('/')).unwrap_or(&path);
        if path.split('/').any(is_dots) || parts.split('/').skip(1).any(str::is_empty) {
            return Err("An argument in the path is empty, `.` or `..`.".to_owned());
        }
        let whole = format!("{}{path}", base.as_str().trim_end_matches('/'));
        let url = address::read(&whole).map_err(|why| format!("The address {why}."))?;
        let root = base.path().trim_end_matches('/');
        if !address::is_same_origin(base, &url) || !url.path().starts_with(&format!("{root}/")) {
            return Err("The arguments lead out of the tool's path.".to_owned());
        }
        Ok(url)
    }

    /// The query of a call, put behind its address.
    pub(super) fn with_query(
        &self,
        mut url: Url,
        given: TemplateInputs<'_>,
        secrets: &Secrets,
    ) -> Result<Url, String> {
        let env = secrets.variable();
        let mut variables = given.variables();
        variables.push(("env", &env));
        let mut pairs: Vec<(&str, String)> = Vec::new();
        for Part { name, template } in &self.query {
            match self.value(template, &variables).map_err(|e| problem("query", name, &e))? {
                None | Some(Value::Null) => {}
                Some(Value::Array(items)) => {
                    pairs.extend(items.iter().map(|item| (name.as_str(), text_of(item))));
                }
                Some(value) => pairs.push((name, text_of(&value))),
            }
        }
        if !pairs.is_empty() {
            url.query_pairs_mut().extend_pairs(pairs);
        }
        Ok(url)
    }

    /// The headers of a call.
    pub(super) fn headers(
        &self,
        given: TemplateInputs<'_>,
        secrets: &Secrets,
    ) -> Result<HeaderMap, String> {
        let env = secrets.variable();
        let mut variables = given.variables();
        variables.push(("env", &env));
        let mut headers = HeaderMap::new();
        for Part { name, template } in &self.headers {
            let value =
                self.value(template, &variables).map_err(|e| problem("header", name, &e))?;
            let Some(value) = value.filter(|value| !value.is_null()) else { continue };
            let name = HeaderName::try_from(name.as_str())
                .map_err(|_| format!("{name} is not a header name."))?;
            let mut value = HeaderValue::try_from(text_of(&value)).map_err(|_| {
                format!("The argument for the header {name} must be one line of text.")
            })?;
            value.set_sensitive(named(template).next().is_some());
            headers.insert(name, value);
        }
        Ok(headers)
    }

    /// The body of a call; a content type goes along unless the headers have one.
    pub(super) fn body(
        &self,
        given: TemplateInputs<'_>,
        headers: &mut HeaderMap,
    ) -> Result<Bytes, String> {
        let Some(body) = &self.body else { return Ok(Bytes::new()) };
        let variables = given.variables();
        let made = match body {
            Value::String(template) => self.value(template, &variables),
            value => self.members(value, &variables),
        };
        let made = made.map_err(|e| format!("The body cannot be made: {}.", described(&e)))?;
        let (kind, bytes) = match made {
            None => return Ok(Bytes::new()),
            Some(form) if self.body_format == BodyFormat::Form => {
                (form::TYPE, form::encoded(&form)?)
            }
            Some(Value::String(text)) if body.is_string() && is_json(&text) => (JSON, text),
            Some(Value::String(text)) if body.is_string() => ("text/plain; charset=utf-8", text),
            Some(value) => (JSON, value.to_string()),
        };
        headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static(kind));
        Ok(bytes.into())
    }

    /// The value of a text that is one expression, else the text that a template makes; `None` where
    /// the expression is undefined.
    fn value(
        &self,
        template: &str,
        variables: &[(&str, &Value)],
    ) -> Result<Option<Value>, TemplateError> {
        if !is_template(template) {
            return Ok(Some(template.into()));
        }
        match sole_expression(&self.texts, template) {
            Some(expression) => self.texts.value(expression, variables),
            None => self.texts.render_source(template, variables).map(|text| Some(text.into())),
        }
    }

    /// JSON with its texts filled in. What is undefined is left out.
    fn members(
        &self,
        value: &Value,
        variables: &[(&str, &Value)],
    ) -> Result<Option<Value>, TemplateError> {
        Ok(Some(match value {
            Value::String(template) => return self.value(template, variables),
            Value::Array(items) => {
                let mut made = Vec::with_capacity(items.len());
                for item in items {
                    made.extend(self.members(item, variables)?);
                }
                Value::Array(made)
            }
            Value::Object(members) => {
                let mut made = Map::new();
                for (name, member) in members {
                    if let Some(member) = self.members(member, variables)? {
                        made.insert(name.clone(), member);
                    }
                }
                Value::Object(made)
            }
            other => other.clone(),
        }))
    }
}

/// Whether a header may be set.
pub(super) fn check_header(key: &str, name: &str) -> Result<(), Wrong> {
    check_header_name(name).map_err(|why| Wrong::at(key, why))
}

/// The same, with the reason alone.
pub(super) fn check_header_name(name: &str) -> Result<(), &'static str> {
    if NOT_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Err("is set by the client");
    }
    HeaderName::try_from(name).map(drop).map_err(|_| "is not the name of a header")
}

/// A template over `env` alone, filled in.
pub(super) fn rendered(key: &str, template: &str, secrets: &Secrets) -> Result<HeaderValue, Wrong> {
    let text = Templates::new(Undefined::Strict)
        .render_source(template, &[("env", &secrets.variable())])
        .map_err(|e| Wrong::at(key, format!("is not a valid template: {}", described(&e))))?;
    let mut value = HeaderValue::try_from(text)
        .map_err(|_| Wrong::at(key, "is not one line of text once its variables are filled in"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn check(templates: &Templates, key: &str, template: &str) -> Result<(), Wrong> {
    templates
        .check(template)
        .map_err(|e| Wrong::at(key, format!("is not a valid template: {}", described(&e))))
}

fn check_body(templates: &Templates, key: &str, body: &Value) -> Result<(), Wrong> {
    match body {
        Value::String(template) if named(template).next().is_some() => {
            Err(Wrong::at(key, "cannot use env: put secrets into a header or the query"))
        }
        Value::String(template) => check(templates, key, template),
        Value::Array(items) => items.iter().try_for_each(|item| check_body(templates, key, item)),
        Value::Object(members) => members
            .iter()
            .try_for_each(|(name, member)| check_body(templates, &format!("{key}.{name}"), member)),
        _ => Ok(()),
    }
}

/// The expression of a text that is a single `{{ … }}`.
fn sole_expression<'a>(templates: &Templates, template: &'a str) -> Option<&'a str> {
    let inside = template.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    let inside = inside.trim_start_matches('-').trim_end_matches('-').trim();
    templates.is_expression(inside).then_some(inside)
}

/// Whether a text that a template made is an object, a list or a text in JSON. A number or a word
/// may as well be plain text.
fn is_json(text: &str) -> bool {
    text.trim_start().starts_with(['{', '[', '"']) && json::read::<IgnoredAny>(text).is_ok()
}

/// The parts of a template that stand as they are.
fn outside_of_templates(template: &str) -> impl Iterator<Item = &str> {
    template.split("{{").enumerate().map(|(i, part)| {
        if i == 0 { part } else { part.split_once("}}").map_or("", |(_, rest)| rest) }
    })
}

fn problem(place: &str, name: &str, error: &TemplateError) -> String {
    format!("The {place} {name} cannot be made: {}.", described(error))
}

/// Neither the template's text nor the variables.
fn described(error: &TemplateError) -> String {
    error.detail.clone().unwrap_or_else(|| error.kind.clone())
}
