//! `[webhooks]`: with what events are signed, and which private addresses they may be sent to.
//!
//! Without a secret there are no webhooks. What is sent to whom is the runtime's.

use std::collections::HashMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use schemars::JsonSchema;
use secrecy::SecretString;
use serde::Deserialize;

use super::sources::{ConfigError, Sources};
use crate::bounds::address::{Network, canonical_host};

/// Bytes of a secret (Standard Webhooks).
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// `[webhooks]`
#[derive(Debug, Clone)]
pub struct Webhooks {
    /// Each `whsec_` and base64; several where one is being replaced. None: there are no webhooks.
    pub secrets: Vec<SecretString>,
    /// Hosts that may have any address.
    pub hosts: Vec<String>,
    /// Networks that may be connected to although they are private.
    pub networks: Vec<Network>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct WebhookSettings {
    /// The environment variable with the secret; several are separated by spaces.
    secret_env: String,
    /// Hosts and networks that would otherwise be refused as private.
    allow: Vec<String>,
}

pub(super) fn resolve(
    settings: &WebhookSettings,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<Webhooks, ConfigError> {
    let written = env.get(&settings.secret_env).map(String::as_str).unwrap_or_default();
    let secrets: Vec<&str> = written.split_whitespace().collect();
    if secrets.iter().any(|secret| key(secret).is_none()) {
        let message = format!(
            "the variable {} must hold \"whsec_\" and the base64 of 24 to 64 bytes",
            settings.secret_env
        );
        return Err(sources.error("webhooks.secret_env", message));
    }
    let (mut hosts, mut networks) = (Vec::new(), Vec::new());
    for entry in &settings.allow {
        match (entry.parse::<Network>(), canonical_host(entry)) {
            (Ok(network), _) => networks.push(network),
            (Err(_), Ok(host)) if !entry.contains(['/', ':', '*']) => hosts.push(host),
            _ => {
                let message = "an entry is neither a host nor a network like 10.0.0.0/8";
                return Err(sources.error("webhooks.allow", message));
            }
        }
    }
    let secrets = secrets.into_iter().map(SecretString::from).collect();
    Ok(Webhooks { secrets, hosts, networks })
}

/// The key that a secret encodes.
pub fn key(secret: &str) -> Option<Vec<u8>> {
    let key = BASE64_STANDARD.decode(secret.strip_prefix("whsec_")?).ok()?;
    SECRET_BYTES.contains(&key.len()).then_some(key)
}
