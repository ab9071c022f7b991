//! `[auth.jwt]`: the identity provider whose tokens are accepted beside API keys.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;
use url::Url;

use super::sources::{ConfigError, Sources};
use crate::bounds::address;

/// `[auth.jwt]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jwt {
    /// What the claim `iss` must be.
    pub issuer: String,
    /// What the claim `aud` must be or contain.
    pub audience: String,
    pub key_set: KeySetSource,
}

/// Where the public keys of the identity provider are (a JWK Set, RFC 7517).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySetSource {
    File(PathBuf),
    Url(Url),
}

/// `[auth.jwt]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct JwtSettings {
    /// What the claim `iss` of a token must be.
    #[schemars(length(min = 1))]
    issuer: String,
    /// What the claim `aud` of a token must be or contain.
    #[schemars(length(min = 1))]
    audience: String,
    /// A file with the public keys of the identity provider (a JWK Set). Either this or `jwks_url`.
    jwks_file: Option<PathBuf>,
    /// The address of the public keys of the identity provider (a JWK Set).
    #[schemars(regex(pattern = "^https?://[^#@]+$"))]
    jwks_url: Option<String>,
}

/// The identity provider; needed where `auth.mode` is `jwt`.
pub(super) fn resolve(
    settings: Option<&JwtSettings>,
    sources: &Sources,
) -> Result<Jwt, ConfigError> {
    let Some(JwtSettings { issuer, audience, jwks_file, jwks_url }) = settings else {
        let message = "\"jwt\" needs [auth.jwt] with issuer, audience, and jwks_file or jwks_url";
        return Err(sources.error("auth.mode", message.to_owned()));
    };
    for (key, value) in [("auth.jwt.issuer", issuer), ("auth.jwt.audience", audience)] {
        if value.is_empty() {
            return Err(sources.error(key, "must not be empty".to_owned()));
        }
    }
    let key_set = match (jwks_file, jwks_url) {
        (Some(file), None) => KeySetSource::File(sources.resolve("auth.jwt.jwks_file", file)),
        (None, Some(url)) => KeySetSource::Url(
            address::read(url)
                .map_err(|why| sources.error("auth.jwt.jwks_url", why.to_string()))?,
        ),
        (None, None) => {
            return Err(sources.error("auth.jwt", "needs either jwks_file or jwks_url"));
        }
        (Some(_), Some(_)) => {
            let message = "has both jwks_file and jwks_url, and takes only one of them";
            return Err(sources.error("auth.jwt", message));
        }
    };
    Ok(Jwt { issuer: issuer.clone(), audience: audience.clone(), key_set })
}
