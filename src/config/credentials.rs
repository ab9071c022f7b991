//! `[tools.credentials.<name>]`: secrets that the proxy of programs adds to their requests.
//!
//! Which agent's programs have them is said by its definition (`governance.network.credentials`).

use std::collections::HashMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderName, HeaderValue};
use schemars::JsonSchema;
use serde::Deserialize;
use url::Url;

use super::sources::{ConfigError, Sources};
use crate::bounds::address;

/// A header for the requests to one address and everything beneath it.
#[derive(Debug, Clone)]
pub struct Credential {
    pub url: Url,
    pub header: HeaderName,
    /// `None` if the variable is unset.
    pub secret: Option<Secret>,
    /// The environment variable with the secret.
    pub token_env: String,
}

/// A secret, and how it is sent.
#[derive(Debug, Clone)]
pub struct Secret {
    pub token: String,
    /// Marked as sensitive, so that it is not printed.
    pub value: HeaderValue,
}

/// `[tools.credentials.<name>]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CredentialSettings {
    /// Where the secret may be sent: this address and everything beneath its path.
    #[schemars(regex(pattern = "^https?://[^?#@]+$"))]
    url: String,
    /// The environment variable with the secret.
    token_env: String,
    /// With it, the secret is its password (Basic); without it, a bearer token.
    username: Option<String>,
    /// The header whose value is the secret as it is, in place of `Authorization`.
    header: Option<String>,
}

impl CredentialSettings {
    /// The environment variable with the secret.
    pub(super) fn variable(&self) -> &str {
        &self.token_env
    }
}

pub(super) fn resolve(
    name: &str,
    settings: &CredentialSettings,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<Credential, ConfigError> {
    let key = |setting: &str| format!("tools.credentials.{name}.{setting}");
    let CredentialSettings { url, token_env, username, header } = settings;
    let url = address::read(url).map_err(|why| sources.error(&key("url"), why.to_string()))?;
    if url.query().is_some() {
        return Err(sources.error(&key("url"), "must not have a query"));
    }
    if token_env.is_empty() {
        return Err(sources.error(&key("token_env"), "names no environment variable"));
    }
    let is_username = |name: &String| !name.is_empty() && !name.contains([':', '\r', '\n']);
    if username.as_ref().is_some_and(|name| !is_username(name)) {
        return Err(sources.error(&key("username"), "must be one line without a colon"));
    }
    if username.is_some() && header.is_some() {
        let message = "must not be set together with username, which is sent in Authorization";
        return Err(sources.error(&key("header"), message));
    }
    let header = header.as_ref().map(|name| HeaderName::try_from(name.as_str())).transpose();
    let header =
        header.map_err(|_| sources.error(&key("header"), "is not the name of a header"))?;
    if header == Some(HOST) {
        return Err(sources.error(&key("header"), "cannot be Host, which is the address"));
    }
    let token = env.get(token_env);
    let secret = token.map(|token| {
        let written = match (username, &header) {
            (Some(name), _) => {
                format!("Basic {}", BASE64_STANDARD.encode(format!("{name}:{token}")))
            }
            (None, None) => format!("Bearer {token}"),
            (None, Some(_)) => token.clone(),
        };
        let mut value = HeaderValue::try_from(written).map_err(|_| {
            let message = format!("the variable {token_env} must hold one line of text");
            sources.error(&key("token_env"), message)
        })?;
        value.set_sensitive(true);
        Ok(Secret { token: token.clone(), value })
    });
    Ok(Credential {
        url,
        header: header.unwrap_or(AUTHORIZATION),
        secret: secret.transpose()?,
        token_env: token_env.clone(),
    })
}
