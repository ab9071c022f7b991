//! A tool that is a request to one service of the operator's.
//!
//! The request goes to the host of `base_url` and nowhere else, whatever it redirects to. Secrets
//! are put in here, behind the gate, and are taken out of what comes back. A call that may be
//! repeated is repeated where the service is down or busy; one that may not is repeated only where
//! it was certainly never sent.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use http::HeaderMap;
use http::header::{ACCEPT, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use serde_json::Value;
use url::Url;

use super::answer::Shown;
use super::file::{Entry, ResponseSection};
use super::mapping::{self, Mapping, Secrets};
use super::{Environment, Wrong};
use crate::bounds::address;
use crate::event::ValidationError;
use crate::governance::{Action, ActionKind, Permit};
use crate::message::tool_schema::ToolSchema;
use crate::outbound::{
    AddressPolicy, Client, MAX_REDIRECTS, OutboundError, Request, Response, Terms,
};
use crate::run::{Effect, Target};
use crate::tools::requests::Requests;
use crate::tools::{Tool, ToolContext, ToolError, ToolInfo, readers};

/// The header by which a service recognises a call that is repeated.
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Bytes of an answer.
const MAX_ANSWER: usize = 8 * 1024 * 1024;
/// Bytes of an answer that is read where it came.
const SMALL_ANSWER: usize = 64 * 1024;
/// For one request; the call has a limit of its own, which is shorter as a rule.
const DEADLINE: Duration = Duration::from_mins(10);
/// Tries to reach the service. What reached it is repeated by the executor, as the options of the tool
/// say.
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
            shown,
            base: service.base.clone(),
            headers: service.headers.clone(),
            secrets,
            client: service.client.clone(),
            addresses: service.addresses.clone(),
        })
    }

    fn request(&self, arguments: &Value, effect_key: &str) -> Result<Request, String> {
        let url = self.mapping.address(&self.base, arguments)?;
        let url = self.mapping.with_query(url, arguments, &self.secrets)?;
        let mut headers = self.headers.clone();
        headers.extend(self.mapping.headers(arguments, &self.secrets)?);
        let body = self.mapping.body(arguments, &mut headers)?;
        if self.info.effect != Effect::Read
            && let Ok(key) = HeaderValue::try_from(effect_key)
        {
            headers.insert(IDEMPOTENCY_KEY, key);
        }
        Ok(Request { method: self.mapping.method().clone(), url, headers, body })
    }

    async fn send(
        &self,
        request: &Request,
        requests: &Requests,
    ) -> Result<Response, OutboundError> {
        let stays = |url: &Url| {
            if address::is_same_origin(url, &self.base) {
                return Ok(());
            }
            Err("it redirects to another host, which is not followed".to_owned())
        };
        let terms = Terms {
            addresses: &self.addresses,
            judge: &stays,
            redirects: MAX_REDIRECTS,
            deadline: DEADLINE,
            max_body: MAX_ANSWER,
        };
        let sent = self.client.send_each(request.clone(), &terms, &requests.counting()).await;
        requests.came_back(sent.is_ok());
        sent
    }

    async fn show(&self, response: Response) -> Result<String, String> {
        if response.body.len() <= SMALL_ANSWER {
            return self.shown.of(&response);
        }
        let shown = self.shown.clone();
        let shown = readers::read(move || shown.of(&response)).await;
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
        let url = self.mapping.address(&self.base, arguments).map_err(ToolError::ForModel)?;
        let target = Target::of(&url, true);
        let (effect, destructive) = (self.info.effect, self.info.destructive);
        Ok(vec![Action {
            destructive,
            egress: true,
            ..Action::new(ActionKind::Fetch(target), effect)
        }])
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let request = self.request(&arguments, &context.effect_key).map_err(ToolError::ForModel)?;
        let mut tries = 0;
        let sent = loop {
            tries += 1;
            let sent = self.send(&request, &context.requests).await;
            let is_unreachable = matches!(
                sent,
                Err(OutboundError::Unreachable { .. } | OutboundError::Unresolved(_))
            );
            if !is_unreachable || tries == TRIES {
                break sent;
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(tries - 1)).await;
            if self.info.effect != Effect::Read {
                context.standing.held().await;
            }
        };
        let shown = match sent {
            Ok(response) => {
                if let Some(pause) = asked_pause(&response) {
                    context.requests.asked_to_pause(pause);
                }
                self.show(response).await
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
}

/// How long a service that is busy asks to be left alone.
fn asked_pause(response: &Response) -> Option<Duration> {
    if !matches!(response.status.as_u16(), 429 | 503) {
        return None;
    }
    let seconds = response.headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}
