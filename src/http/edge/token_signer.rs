//! Short-lived tokens for one run or one session, and sessions of the console: what they say, and
//! how they are signed.
//!
//! Both are JWTs (RFC 7519, HS256), signed with a secret of the store, so that every replica accepts
//! them. Each names the API key that made it, and ends with that key. Neither can be read as the
//! other.

use chrono::{DateTime, Utc};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use strum::IntoStaticStr;
use utoipa::ToSchema;
use uuid::Uuid;

use super::problem::Problem;
use crate::clock;
use crate::run::Caller;
use crate::runtime::keys::{KeyError, random};
use crate::store::Store;

/// The name of the signing secret in the store.
const SECRET: &str = "access_tokens";
const ISSUER: &str = "toolloop";
/// Bytes of a token; longer than any that is made here.
const MAX_BYTES: usize = 32 * 1024;

/// What a token may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, ToSchema)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
#[schema(as = TokenAction)]
pub(crate) enum Action {
    /// Get the run or session and its parts.
    Read,
    /// Follow the events of the run, or of the session's runs, as a stream.
    Stream,
    /// Cancel the run, or runs of the session.
    Cancel,
    /// Answer what the run waits for: approvals, reviews and results of client tools.
    Respond,
}

/// What a token is for. A run's token reaches the runs that it delegated to, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    Run(Uuid),
    Session(String),
}

/// The content of a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The id of the API key that made it; empty if there was none.
    #[serde(rename = "sub")]
    pub(crate) key: String,
    /// Who made it, if it was a caller of the identity provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) caller: Option<Caller>,
    pub(crate) target: Target,
    pub(crate) actions: Vec<Action>,
    #[serde(rename = "exp", with = "chrono::serde::ts_seconds")]
    pub(crate) expires_at: DateTime<Utc>,
}

impl Grant {
    pub(super) fn is_over(&self) -> bool {
        self.expires_at <= clock::now()
    }
}

/// The content of a console's session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ConsoleSession {
    /// The id of the API key that signed in.
    #[serde(rename = "sub")]
    pub(crate) key: String,
    #[serde(rename = "console_session")]
    pub(crate) id: Uuid,
    #[serde(rename = "exp", with = "chrono::serde::ts_seconds")]
    pub(crate) expires_at: DateTime<Utc>,
}

#[derive(Serialize, Deserialize)]
struct Claims<T> {
    iss: String,
    #[serde(flatten)]
    content: T,
}

/// Signs and verifies tokens.
pub struct TokenSigner {
    encoding: EncodingKey,
    decoding: DecodingKey,
    /// The name of the cookie with a console's session. Each store has its own, so that services on one
    /// host do not sign each other's people out.
    cookie: String,
}

impl TokenSigner {
    /// The signer that all replicas of a store share.
    ///
    /// # Errors
    /// The store failed, or there are no random numbers.
    pub async fn of(store: &Store) -> Result<Self, KeyError> {
        Ok(Self::with(&store.secret(SECRET, random::<32>()?.to_vec()).await?))
    }

    #[cfg(test)]
    pub(crate) fn known() -> Self {
        Self::with(&[1; 32])
    }

    fn with(secret: &[u8]) -> Self {
        let named = Sha256::new().chain_update("cookie").chain_update(secret).finalize();
        let named: Vec<u8> = named.into_iter().take(4).collect();
        Self {
            encoding: EncodingKey::from_secret(secret),
            decoding: DecodingKey::from_secret(secret),
            cookie: format!("toolloop_{}", hex::encode(named)),
        }
    }

    /// The name of the cookie that has a console's session.
    pub(crate) fn cookie(&self) -> &str {
        &self.cookie
    }

    /// Signs a [`Grant`] or a [`ConsoleSession`].
    pub(crate) fn sign(&self, content: impl Serialize) -> Result<String, Problem> {
        let claims = Claims { iss: ISSUER.to_owned(), content };
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &self.encoding)
            .map_err(|error| Problem::internal(error.to_string()))
    }

    /// The content of a token that was signed here, expired or not.
    pub(crate) fn verify<T: DeserializeOwned>(&self, token: &str) -> Option<T> {
        if token.len() > MAX_BYTES {
            return None;
        }
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_issuer(&[ISSUER]);
        validation.validate_exp = false; // judged by the service's clock
        let read = jsonwebtoken::decode::<Claims<T>>(token, &self.decoding, &validation);
        read.ok().map(|read| read.claims.content)
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::prelude::BASE64_URL_SAFE_NO_PAD;

    use super::*;
    use crate::bounds::secrets::redacted;

    fn grant() -> Grant {
        Grant {
            caller: None,
            key: "abc".into(),
            target: Target::Run(Uuid::nil()),
            actions: vec![Action::Read, Action::Stream],
            expires_at: DateTime::from_timestamp(1_900_000_000, 0).unwrap(),
        }
    }

    #[test]
    fn a_token_reads_back_where_it_was_signed_and_nowhere_else() {
        let signer = TokenSigner::known();
        let token = signer.sign(grant()).unwrap();
        assert_eq!(signer.verify(&token), Some(grant()));
        assert_eq!(TokenSigner::with(&[2; 32]).verify::<Grant>(&token), None);
        let [head, body, signature] = token.split('.').collect::<Vec<_>>()[..] else { panic!() };
        let unsigned = BASE64_URL_SAFE_NO_PAD.encode(r#"{"typ":"JWT","alg":"none"}"#);
        let other = BASE64_URL_SAFE_NO_PAD.encode(r#"{"typ":"JWT","alg":"HS512"}"#);
        let wide = serde_json::json!({"iss": ISSUER, "sub": "abc", "target": {"session": "s"},
            "actions": ["cancel"], "exp": 1_900_000_000});
        let wide = BASE64_URL_SAFE_NO_PAD.encode(wide.to_string());
        for forged in [
            format!("{unsigned}.{body}."),
            format!("{unsigned}.{body}.{signature}"),
            format!("{other}.{body}.{signature}"),
            format!("{head}.{wide}.{signature}"),
            format!("{head}.{body}"),
            format!("{head}.{body}.{signature}.{signature}"),
            format!("{}{}", token, "A".repeat(MAX_BYTES)),
            String::new(),
            "eyJ".into(),
        ] {
            assert_eq!(signer.verify::<Grant>(&forged), None, "{forged}");
        }
    }

    #[test]
    fn a_session_of_the_console_is_no_token_and_a_token_is_no_session() {
        let signer = TokenSigner::known();
        let session = ConsoleSession {
            key: "abc".into(),
            id: Uuid::nil(),
            expires_at: DateTime::from_timestamp(1_900_000_000, 0).unwrap(),
        };
        let kept = signer.sign(session.clone()).unwrap();
        assert_eq!(signer.verify(&kept), Some(session));
        assert_eq!(signer.verify::<Grant>(&kept), None);
        let token = signer.sign(grant()).unwrap();
        assert_eq!(signer.verify::<ConsoleSession>(&token), None);
        assert_ne!(signer.cookie(), TokenSigner::with(&[2; 32]).cookie());
    }

    #[test]
    fn a_token_is_removed_from_what_is_logged() {
        let token = TokenSigner::known().sign(grant()).unwrap();
        for text in [token.clone(), format!("/runs/x/events?access_token={token}")] {
            assert!(!redacted(&text).contains(&token[4..]), "{text}");
        }
    }
}
