//! The public keys of an identity provider (a JWK Set, RFC 7517): read from a file or fetched, and read again
//! regularly, and after a token that none of the known keys has signed.
//!
//! If a set cannot be read, the last one stays in use. Keys that are not for accepted signatures (other
//! algorithms, keys for encryption) are skipped.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use parking_lot::RwLock;
use reqwest::redirect;
use serde::Deserialize;
use serde_json::Value;
use tokio::io::AsyncReadExt as _;
use tokio::sync::Mutex;
use url::Url;

use crate::bounds::json;
use crate::config::KeySetSource;
use crate::tls;

/// Bytes of a key set.
const MAX_BYTES: usize = 256 * 1024;
/// Keys of a set that are looked at.
const MAX_KEYS: usize = 100;
/// How long fetching may take.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// How often the set is read again: a key that the provider has withdrawn is accepted this long.
const REFRESH_INTERVAL: Duration = Duration::from_mins(5);
/// The least time between two reads because of tokens that no known key has signed.
const PAUSE: Duration = Duration::from_secs(5);

/// Why the keys are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JwksError {
    #[error("the key set of the identity provider cannot be read: {0}")]
    Unreadable(String),
    #[error("the key set of the identity provider {0}")]
    Unusable(&'static str),
}

/// A key that verifies signatures.
pub(super) struct VerifyingKey {
    id: Option<String>,
    pub(super) algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// The keys of one identity provider.
pub struct Jwks {
    source: KeySetSource,
    keys: RwLock<Option<Arc<[Arc<VerifyingKey>]>>>,
    /// When reading them was last tried; locked while they are read.
    tried: Mutex<Option<Instant>>,
}

impl std::fmt::Debug for Jwks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jwks").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Jwks {
    pub(super) fn new(source: KeySetSource) -> Self {
        Self { source, keys: RwLock::default(), tried: Mutex::default() }
    }

    /// The keys by which a token can have been signed: those with its key id, or all where it names
    /// none.
    pub(super) async fn candidates(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
    ) -> Result<Vec<Arc<VerifyingKey>>, JwksError> {
        match self.known(id, algorithm).filter(|found| !found.is_empty()) {
            Some(found) => Ok(found),
            None => self.reread(id, algorithm).await,
        }
    }

    /// The same, after reading the set again, because a key may be new, whatever its id. This is limited to
    /// one read every few seconds, not one per token.
    pub(super) async fn reread(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
    ) -> Result<Vec<Arc<VerifyingKey>>, JwksError> {
        let mut tried = self.tried.lock().await;
        if tried.is_none_or(|at| at.elapsed() >= PAUSE) {
            let read = self.read().await;
            *tried = Some(Instant::now());
            if let Err(error) = read {
                tracing::warn!(%error, "tokens of the identity provider may be refused");
            }
        }
        self.known(id, algorithm).ok_or(JwksError::Unusable("is not known yet"))
    }

    fn known(&self, id: Option<&str>, algorithm: Algorithm) -> Option<Vec<Arc<VerifyingKey>>> {
        let keys = Arc::clone(self.keys.read().as_ref()?);
        let fits = |key: &&Arc<VerifyingKey>| {
            key.algorithm == algorithm
                && (id.is_none() || key.id.is_none() || key.id.as_deref() == id)
        };
        Some(keys.iter().filter(fits).cloned().collect())
    }

    /// Reads the keys; the last ones stay in use where that fails.
    ///
    /// # Errors
    /// The set cannot be read, or has no key that can be used.
    pub async fn read(&self) -> Result<(), JwksError> {
        let text = match &self.source {
            KeySetSource::File(path) => {
                read_file(path).await.map_err(|error| JwksError::Unreadable(error.to_string()))?
            }
            KeySetSource::Url(url) => tokio::time::timeout(MAX_WAIT, fetched(url))
                .await
                .unwrap_or(Err(JwksError::Unusable("was not sent within 5 seconds")))?,
        };
        if text.len() > MAX_BYTES {
            return Err(JwksError::Unusable("has more than 256 KiB"));
        }
        *self.keys.write() = Some(usable(&text)?);
        Ok(())
    }

    /// Reads the keys again every few minutes.
    pub async fn keep_fresh(&self) {
        loop {
            tokio::time::sleep(REFRESH_INTERVAL).await;
            if let Err(error) = self.read().await {
                tracing::warn!(%error, "the keys that were read last stay in use");
            }
        }
    }
}

async fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let file = tokio::fs::File::open(path).await?;
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut text).await?;
    Ok(text)
}

async fn fetched(url: &Url) -> Result<Vec<u8>, JwksError> {
    let unreadable = |error: reqwest::Error| JwksError::Unreadable(error.without_url().to_string());
    let client = tls::http_client().map_err(|error| JwksError::Unreadable(error.to_string()))?;
    let client = client.no_proxy().redirect(redirect::Policy::none()).referer(false);
    let client = client.build().map_err(unreadable)?;
    let response = client.get(url.clone()).send().await.map_err(unreadable)?;
    if response.status() != reqwest::StatusCode::OK {
        return Err(JwksError::Unreadable(format!("the status is {}", response.status().as_u16())));
    }
    let (mut text, mut parts) = (Vec::new(), response.bytes_stream());
    while let Some(part) = parts.next().await {
        text.extend_from_slice(&part.map_err(unreadable)?);
        if text.len() > MAX_BYTES {
            break;
        }
    }
    Ok(text)
}

fn usable(text: &[u8]) -> Result<Arc<[Arc<VerifyingKey>]>, JwksError> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<Value>,
    }
    let set: Set =
        json::read(text).map_err(|_| JwksError::Unusable("is not a JSON object with `keys`"))?;
    if set.keys.len() > MAX_KEYS {
        return Err(JwksError::Unusable("has more than 100 keys"));
    }
    let keys: Arc<[_]> = set.keys.into_iter().filter_map(verifying).map(Arc::new).collect();
    if keys.is_empty() {
        return Err(JwksError::Unusable("has no key for RS256, ES256 or EdDSA"));
    }
    Ok(keys)
}

/// The key, if tokens can be signed with it in a way that is accepted. The key says how, never the
/// token.
fn verifying(key: Value) -> Option<VerifyingKey> {
    let key: Jwk = serde_json::from_value(key).ok()?;
    let (algorithm, named) = match &key.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(curve) if curve.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(pair) if pair.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let signs = key.common.public_key_use.as_ref().is_none_or(|of| *of == PublicKeyUse::Signature);
    let is_for_it = key.common.key_algorithm.is_none_or(|of| of == named);
    let decoding = DecodingKey::from_jwk(&key).ok().filter(|_| signs && is_for_it)?;
    Some(VerifyingKey { id: key.common.key_id, algorithm, key: decoding })
}
