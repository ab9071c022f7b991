//! A tool that is a request to one service of the operator's.
//!
//! The request goes to the host of `base_url` only; redirects to other hosts are refused. Secrets are
//! inserted here, after the gate has judged the call, and are removed from the answer. A call that may
//! be repeated is retried if the service is down or busy. Any other call is retried only if it was
//! certainly never sent.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use http::HeaderMap;
use http::header::{ACCEPT, HeaderName, HeaderValue, USER_AGENT};
use serde_json::Value;
use url::Url;

use super::answer::{MAX_ANSWER, Shown};
use super::file::{BodyFormat, Entry, ResponseSection};
use super::mapping::{self, Mapping, Secrets, TemplateInputs};
use super::outcome;
use super::reconcile::{QuerySection, ReconcileSection};
use super::{Environment, Wrong};
use crate::bounds::address;
use crate::bounds::retry_after::retry_after;
use crate::clock;
use crate::event::ValidationError;
use crate::governance::{Action, ActionKind, Permit};
use crate::message::tool_schema::ToolSchema;
use crate::outbound::{
    AddressPolicy, Client, MAX_REDIRECTS, OutboundError, Request, Response, Terms,
};
use crate::run::{Effect, Target};
use crate::tools::requests::Requests;
use crate::tools::{CallOutcome, Tool, ToolContext, ToolError, ToolInfo, parse_pool};

/// The header by which a service recognises a call that is repeated.
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Bytes of an answer that is read where it came.
const SMALL_ANSWER: usize = 64 * 1024;
/// For one request; the call has a limit of its own, which is shorter as a rule.
const DEADLINE: Duration = Duration::from_mins(10);
/// Tries to reach the service. A request that reached it is retried by the executor only, by the tool's
/// options.
const TRIES: u32 = 3;
/// The wait before the second one; it doubles.
const PAUSE: Duration = Duration::from_millis(250);

/// What the tools of one file have in common.
pub(super) struct Service {
    set: String,
    base: Url,
    /// As declared: secrets by the names of their variables.
    templates: BTreeMap<String, String>,
    headers: HeaderMap,
    secrets: Secrets,
    client: Client,
    addresses: AddressPolicy,
}

impl Service {
    pub(super) fn new(
        set: &str,
        base_url: Option<&str>,
        templates: &BTreeMap<String, String>,
        environment: Environment<'_>,
        client: &Client,
    ) -> Result<Self, Wrong> {
        let base = base_url.ok_or_else(|| Wrong::at("base_url", "is missing"))?;
        let base = address::read(base).map_err(|why| Wrong::at("base_url", why.to_string()))?;
        if base.query().is_some() {
            return Err(Wrong::at("base_url", "must not have a query"));
        }
        let mut secrets = Secrets::default();
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/*;q=0.8"));
        headers.insert(USER_AGENT, HeaderValue::from_static("toolloop"));
        for (name, template) in templates {
            let key = format!("headers.{name}");
            mapping::check_header(&key, name)?;
            secrets.add(&key, template, environment)?;
            let value = mapping::rendered(&key, template, &secrets)?;
            let name = HeaderName::try_from(name.as_str())
                .map_err(|_| Wrong::at(&key, "is not the name of a header"))?;
            headers.insert(name, value);
        }
        Ok(Self {
            set: set.to_owned(),
            base,
            templates: templates.clone(),
            headers,
            secrets,
            client: client.clone(),
            addresses: AddressPolicy::any(),
        })
    }
}

/// The tool.
pub(super) struct HttpTool {
    info: ToolInfo,
    does: String,
    mapping: Mapping,
    /// The request that asks about the outcome of an interrupted call.
    query: Option<Mapping>,
    shown: Shown,
    base: Url,
    headers: HeaderMap,
    secrets: Secrets,
    client: Client,
    addresses: AddressPolicy,
}

impl HttpTool {
    pub(super) fn new(
        service: &Service,
        entry: Entry,
        environment: Environment<'_>,
    ) -> Result<Self, Wrong> {
        let mut secrets = service.secrets.clone();
        let mapping = Mapping::new(&entry, environment, &mut secrets)?;
        let query = match &entry.reconcile {
            Some(ReconcileSection::Request(query)) => Some(entry_of(query, &entry)),
            _ => None,
        };
        let query = query.map(|query| Mapping::new(&query, environment, &mut secrets)).transpose();
        let query = query.map_err(|wrong| wrong.beneath("reconcile"))?;
        let shown = Shown::new(entry.response.as_ref().unwrap_or(&ResponseSection::default()))?;
        let defaults = entry.defaults(None);
        let does = format!("{} {:?} {}", service.base, service.templates, entry.does());
        let info = ToolInfo {
            name: format!("http:{}/{}", service.set, entry.name),
            description: entry.description,
            input_schema: ToolSchema::from(entry.input_schema),
            effect: entry.effect,
            varies: false,
            concurrent: false,
            source: format!("http:{}", service.set),
            destructive: entry.destructive,
            defaults,
        };
        Ok(Self {
            info,
            does,
            mapping,
            query,
            shown,
            base: service.base.clone(),
            headers: service.headers.clone(),
            secrets,
            client: service.client.clone(),
            addresses: service.addresses.clone(),
        })
    }

    fn request(&self, arguments: &Value, effect_key: &str) -> Result<Request, String> {
        let mut request = self.made(&self.mapping, TemplateInputs { arguments, call: None })?;
        if self.info.effect != Effect::Read
            && let Ok(key) = HeaderValue::try_from(effect_key)
        {
            request.headers.insert(IDEMPOTENCY_KEY, key);
        }
        Ok(request)
    }

    fn made(&self, mapping: &Mapping, given: TemplateInputs<'_>) -> Result<Request, String> {
        let url = mapping.address(&self.base, given)?;
        let url = mapping.with_query(url, given, &self.secrets)?;
        let mut headers = self.headers.clone();
        headers.extend(mapping.headers(given, &self.secrets)?);
        let body = mapping.body(given, &mut headers)?;
        Ok(Request { method: mapping.method().clone(), url, headers, body })
    }

    /// What a call does that sends such a request.
    fn action(&self, url: &Url, effect: Effect) -> Action {
        let what = ActionKind::Fetch(Target::of(url, true));
        let destructive = self.info.destructive && effect != Effect::Read;
        Action { destructive, egress: true, ..Action::new(what, effect) }
    }

    /// The answer to a request, which is repeated where it did not reach the service.
    async fn answer(
        &self,
        request: &Request,
        context: &ToolContext,
        effect: Effect,
        redirects: u32,
    ) -> Result<Response, OutboundError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let sent = self.send(request, &context.requests, redirects).await;
            let is_unreachable = matches!(
                sent,
                Err(OutboundError::Unreachable { .. } | OutboundError::Unresolved(_))
            );
            if !is_unreachable || tries == TRIES {
                return sent;
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(tries - 1)).await;
            if effect != Effect::Read {
                context.standing.until_valid().await;
            }
        }
    }

    async fn send(
        &self,
        request: &Request,
        requests: &Requests,
        redirects: u32,
    ) -> Result<Response, OutboundError> {
        let stays = |url: &Url| {
            if address::is_same_origin(url, &self.base) {
                return Ok(());
            }
            Err("it redirects to another host, which is not followed".to_owned())
        };
        let tenant = requests.tenant();
        let terms = Terms {
            addresses: &self.addresses,
            judge: &stays,
            redirects,
            deadline: DEADLINE,
            max_body: MAX_ANSWER,
            tenant: &tenant,
        };
        let sent = self.client.send_each(request.clone(), &terms, &requests.counting()).await;
        requests.came_back(sent.is_ok());
        sent
    }

    async fn show(&self, response: Response, tenant: &str) -> Result<String, String> {
        let effect = self.info.effect;
        if response.body.len() <= SMALL_ANSWER {
            return self.shown.of(&response, effect);
        }
        let shown = self.shown.clone();
        let shown = parse_pool::run(tenant, move || shown.of(&response, effect)).await;
        shown.unwrap_or_else(|| Err("The answer cannot be read.".to_owned()))
    }
}

#[async_trait]
impl Tool for HttpTool {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    fn does(&self) -> String {
        self.does.clone()
    }

    fn mistakes(&self, arguments: &Value) -> Vec<ValidationError> {
        let wrong = |message| ValidationError { pointer: String::new(), message };
        self.request(arguments, "").err().map(wrong).into_iter().collect()
    }

    async fn actions(&self, arguments: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let given = TemplateInputs { arguments, call: None };
        let url = self.mapping.address(&self.base, given).map_err(ToolError::ForModel)?;
        Ok(vec![self.action(&url, self.info.effect)])
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let request = self.request(&arguments, &context.effect_key).map_err(ToolError::ForModel)?;
        let sent = self.answer(&request, context, self.info.effect, MAX_REDIRECTS).await;
        let shown = match sent {
            Ok(response) => {
                if let Some(pause) = requested_pause(&response) {
                    context.requests.note_pause(pause);
                }
                self.show(response, &context.caller.tenant).await
            }
            Err(error) if self.info.effect == Effect::Read || error.was_not_sent() => {
                Err(format!("The request failed: {error}."))
            }
            Err(error) => {
                Err(format!("The request failed: {error}. It is unknown whether it took effect."))
            }
        };
        match shown {
            Ok(text) => Ok(self.secrets.removed_from(text)),
            Err(text) => Err(ToolError::ForModel(self.secrets.removed_from(text))),
        }
    }

    fn can_reconcile(&self) -> bool {
        self.query.is_some()
    }

    async fn reconcile_actions(
        &self,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<Vec<Action>, ToolError> {
        let Some(query) = &self.query else { return Ok(Vec::new()) };
        let call = outcome::call_variable(context);
        let given = TemplateInputs { arguments, call: Some(&call) };
        let url = query.address(&self.base, given).map_err(ToolError::ForModel)?;
        Ok(vec![self.action(&url, Effect::Read)])
    }

    /// A redirect does not count as an answer: it may lead to a page that exists for every call.
    async fn reconcile(
        &self,
        _: Permit,
        arguments: &Value,
        context: &ToolContext,
    ) -> Result<CallOutcome, ToolError> {
        let Some(query) = &self.query else { return Ok(CallOutcome::not_asked()) };
        let call = outcome::call_variable(context);
        let given = TemplateInputs { arguments, call: Some(&call) };
        let request = self.made(query, given).map_err(ToolError::ForModel)?;
        let sent = self.answer(&request, context, Effect::Read, 0).await;
        let response = match sent {
            Ok(response) => response,
            Err(error) => return Ok(CallOutcome::Unknown(format!("the request failed: {error}"))),
        };
        if let Some(outcome) = outcome::of_status(response.status) {
            return Ok(outcome);
        }
        let shown = self.show(response, &context.caller.tenant).await;
        let shown = shown.map_err(|why| self.secrets.removed_from(why));
        Ok(CallOutcome::Happened(shown.map(|text| self.secrets.removed_from(text))))
    }
}

/// The request that asks what became of a call, as that of a tool.
fn entry_of(query: &QuerySection, tool: &Entry) -> Entry {
    Entry {
        method: Some(query.method.clone()),
        path: Some(query.path.clone()),
        query: query.query.clone(),
        headers: query.headers.clone(),
        body: query.body.clone(),
        body_format: BodyFormat::Json,
        ..tool.clone()
    }
}

/// The `Retry-After` of a busy service.
fn requested_pause(response: &Response) -> Option<Duration> {
    let is_busy = matches!(response.status.as_u16(), 429 | 503);
    is_busy.then(|| retry_after(&response.headers, clock::now())).flatten()
}
