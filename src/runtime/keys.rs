//! API keys: how a token is made, read and verified, and the first one.
//!
//! A token is `tl_<id>_<secret>`. The row is found by the id. The secret is random and long, so its plain
//! SHA-256 is stored, and compared in constant time. The callers of this module decide who may create which
//! key: routes check scopes, the command line needs access to the database.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::clock;
use crate::store::{AdminKeys, ApiKeyRecord, KeyStored, Store, StoreError};

/// All scopes, except `tools:<name>`.
pub const SCOPES: [&str; 16] = [
    "admin",
    "agents:invoke",
    "agents:read",
    "audit:read",
    "files:read",
    "files:write",
    "keys:admin",
    "memory:read",
    "memory:write",
    "runs:approve",
    "runs:cancel",
    "runs:read",
    "sessions:read",
    "sessions:write",
    "tools:execute",
    "tools:read",
];

/// How many scopes a key, or a token of an identity provider, can have.
pub const MAX_SCOPES: usize = 64;

/// Bytes of a scope.
pub const MAX_SCOPE: usize = 256;

/// The tenant of the first admin key, and of everyone where authentication is off.
pub const DEFAULT_TENANT: &str = "default";

/// The fixed id of the first key: if two replicas start at once, only one of them creates it.
const FIRST_ID: &str = "bootstrapadmin";

/// The subjects in records of acts without a key; no key has such an id.
const OTHER_SUBJECTS: [&str; 3] = ["local", "service", "unknown"];

const ID_BYTES: usize = 9;
const SECRET_BYTES: usize = 32;

/// Why a key could not be made.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The operating system gives no random numbers.
    #[error("no random numbers: {0}")]
    Random(String),
    /// `TOOLLOOP_ADMIN_KEY` is not a token.
    #[error(
        "TOOLLOOP_ADMIN_KEY must have the form tl_<id>_<secret>: id of 1 to 64 letters and digits, \
             but not `local`, `service` or `unknown`; secret of 16 to 256 visible characters"
    )]
    MalformedAdminKey,
    /// `TOOLLOOP_ADMIN_KEY` names a key that has another secret.
    #[error("TOOLLOOP_ADMIN_KEY has the id of an existing key, but another secret")]
    AdminKeyTaken,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A new key, with the token that is known only now.
pub struct NewKey {
    /// The id, by which it is found.
    pub id: String,
    /// The whole token, `tl_<id>_<secret>`.
    pub token: String,
    /// What is stored of the secret.
    pub secret_hash: Vec<u8>,
}

impl NewKey {
    fn with_id(id: String) -> Result<Self, KeyError> {
        let secret = BASE64_URL_SAFE_NO_PAD.encode(random::<SECRET_BYTES>()?);
        Ok(Self { token: format!("tl_{id}_{secret}"), secret_hash: hash(&secret), id })
    }
}

/// Makes a key.
///
/// # Errors
/// [`KeyError::Random`].
pub fn generate() -> Result<NewKey, KeyError> {
    NewKey::with_id(hex::encode(random::<ID_BYTES>()?))
}

/// Random bytes.
///
/// # Errors
/// [`KeyError::Random`].
pub fn random<const N: usize>() -> Result<[u8; N], KeyError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| KeyError::Random(e.to_string()))?;
    Ok(bytes)
}

/// Splits a token into id and secret. The secret is 16 to 256 visible ASCII characters.
pub fn parse(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.strip_prefix("tl_")?.split_once('_')?;
    let fits = is_id(id)
        && !OTHER_SUBJECTS.contains(&id)
        && (16..=256).contains(&secret.len())
        && secret.bytes().all(|b| b.is_ascii_graphic());
    fits.then_some((id, secret))
}

/// Whether a text can be the id of a key: 1 to 64 letters and digits.
pub fn is_id(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// The stored hash of a secret.
pub fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret.as_bytes()).to_vec()
}

/// Whether this is the secret, in constant time.
pub fn verify(secret: &str, stored: &[u8]) -> bool {
    hash(secret).as_slice().ct_eq(stored).into()
}

/// Whether a key may have this scope.
pub fn is_scope(scope: &str) -> bool {
    SCOPES.contains(&scope)
        || (scope.len() <= MAX_SCOPE
            && scope.strip_prefix("tools:").is_some_and(|tool| !tool.is_empty()))
}

/// Whether this may be a tenant: `^[a-z0-9][a-z0-9_-]{0,63}$`.
pub fn is_tenant(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    name.len() <= 64
        && name.bytes().next().is_some_and(plain)
        && name.bytes().all(|b| plain(b) || b == b'_' || b == b'-')
}

/// Ensures that there is an admin key: the one of `TOOLLOOP_ADMIN_KEY`, if that is set (a revoked one stays
/// revoked). Otherwise, creates a key if there never was one, and returns its token, which is printed once.
///
/// # Errors
/// The given token is malformed or contradicts a stored key; the store failed.
pub async fn bootstrap(
    store: &Store,
    admin_key: Option<&SecretString>,
) -> Result<Option<String>, KeyError> {
    if let Some(token) = admin_key {
        let (id, secret) = parse(token.expose_secret()).ok_or(KeyError::MalformedAdminKey)?;
        let key = admin(id, "operator's key", hash(secret));
        if store.insert_key(&key).await? == KeyStored::Stored {
            return Ok(None);
        }
        let stored = store.key(id).await?;
        let Some(key) = stored.filter(|key| verify(secret, &key.secret_hash)) else {
            return Err(KeyError::AdminKeyTaken);
        };
        if key.revoked_at.is_some() {
            tracing::warn!(key_id = id, "the key of TOOLLOOP_ADMIN_KEY is revoked");
        }
        return Ok(None);
    }
    if store.admin_keys().await? != AdminKeys::Never {
        return Ok(None);
    }
    let key = NewKey::with_id(FIRST_ID.to_owned())?;
    let first = admin(&key.id, "first admin key", key.secret_hash);
    let stored = store.insert_key(&first).await?;
    Ok((stored == KeyStored::Stored).then_some(key.token))
}

fn admin(id: &str, name: &str, secret_hash: Vec<u8>) -> ApiKeyRecord {
    ApiKeyRecord {
        id: id.to_owned(),
        name: name.to_owned(),
        tenant: DEFAULT_TENANT.into(),
        scopes: vec!["admin".into()],
        secret_hash,
        created_at: clock::now(),
        created_by: None,
        expires_at: None,
        revoked_at: None,
        last_used_at: None,
        rate_limit_per_minute: None,
        rate_limit_burst: None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::open;

    #[tokio::test]
    async fn admin_keys_that_the_service_creates_can_be_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("keys.db").display());
        let store = open(&url, 1, false).await.unwrap();
        store.migrate().await.unwrap();
        assert!(bootstrap(&store, None).await.unwrap().is_some());
        for id in ["one", "two"] {
            let token = SecretString::from(format!("tl_{id}_{}", "s".repeat(32)));
            assert_eq!(bootstrap(&store, Some(&token)).await.unwrap(), None);
        }
        let ids = [FIRST_ID, "one", "two"].map(str::to_owned);
        let named = store.key_names(DEFAULT_TENANT, &ids).await.unwrap();
        let expected = [
            (FIRST_ID, "first admin key", false),
            ("one", "operator's key", true),
            ("two", "operator's key", true),
        ];
        let expected = expected.map(|(id, name, shared)| (id.to_owned(), name.to_owned(), shared));
        assert_eq!(named, expected);
    }

    #[test]
    fn a_generated_token_reads_back_and_verifies() {
        let key = generate().unwrap();
        let (id, secret) = parse(&key.token).unwrap();
        assert_eq!((id, secret.len()), (key.id.as_str(), 43));
        assert!(verify(secret, &key.secret_hash));
        let other = generate().unwrap();
        assert!(other.token != key.token && other.id != key.id);
        assert!(!verify(secret, &other.secret_hash));
        assert!(!verify(secret, &key.secret_hash[..31]));
    }

    #[test]
    fn malformed_tokens_are_refused() {
        let secret = "s".repeat(32);
        assert!(parse(&format!("tl_id_{secret}")).is_some());
        assert_eq!(parse(&format!("tl_id_a_b-{secret}")).unwrap().1, format!("a_b-{secret}"));
        for token in [
            String::new(),
            "tl_".into(),
            "tl__".into(),
            secret.clone(),
            format!("tl_{secret}"),
            format!("tl__{secret}"),
            format!("TL_id_{secret}"),
            format!("tl_i-d_{secret}"),
            format!("tl_local_{secret}"),
            format!("tl_service_{secret}"),
            format!("tl_unknown_{secret}"),
            format!("tl_id_{secret}\n"),
            format!("tl_id_{secret}é"),
            "tl_id_tooshort".into(),
            format!("tl_id_{}", "s".repeat(257)),
            format!("tl_{}_{secret}", "i".repeat(65)),
        ] {
            assert_eq!(parse(&token), None, "{token}");
        }
    }

    #[test]
    fn scopes_and_tenants() {
        assert!(is_scope("runs:read") && is_scope("tools:mcp:time/now") && is_scope("admin"));
        assert!(!is_scope("tools:") && !is_scope("runs:*") && !is_scope(""));
        assert!(is_tenant("default") && is_tenant("0-a_b") && is_tenant(&"x".repeat(64)));
        assert!(
            !is_tenant("")
                && !is_tenant("-a")
                && !is_tenant("A")
                && !is_tenant("a/b")
                && !is_tenant(&"x".repeat(65))
        );
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_loses_nothing(token in "(tl_)?[a-zA-Z0-9_é-]{0,90}") {
            if let Some((id, secret)) = parse(&token) {
                prop_assert_eq!(format!("tl_{id}_{secret}"), token);
            }
        }
    }
}
