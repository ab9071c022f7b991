//! API keys: `tl_<id>_<secret>`, found by id, kept as a hash.
//!
//! The secret is 256 random bits, so one SHA-256 is enough and fast enough for every request. Where
//! keys are stored, and what a key may do, is decided elsewhere.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A fresh key; the only moment at which the whole token is known.
pub struct NewKey {
    /// The part by which it is found.
    pub id: String,
    /// The whole token, `tl_<id>_<secret>`.
    pub token: String,
    /// What is stored of the secret.
    pub secret_hash: Vec<u8>,
}

/// Makes a key from the operating system's randomness.
///
/// # Errors
/// Where there is none to be had.
pub fn generate() -> Result<NewKey, getrandom::Error> {
    let (mut id, mut secret) = ([0; 8], [0; 32]);
    getrandom::fill(&mut id)?;
    getrandom::fill(&mut secret)?;
    let id = format!("{:016x}", u64::from_be_bytes(id));
    let secret = BASE64_URL_SAFE_NO_PAD.encode(secret);
    Ok(NewKey { token: format!("tl_{id}_{secret}"), secret_hash: hash(&secret), id })
}

/// Splits a token into id and secret. The id is 1 to 64 letters and digits, the secret at least 16
/// visible ASCII characters.
pub fn parse(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.strip_prefix("tl_")?.split_once('_')?;
    let fits = is_id(id) && (16..=256).contains(&secret.len()) && secret.bytes().all(|b| b.is_ascii_graphic());
    fits.then_some((id, secret))
}

/// Whether a text can be the id of a key.
pub fn is_id(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// What is stored of a secret.
pub fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}

/// Whether a secret belongs to a stored hash; takes the same time for every wrong secret.
pub fn verify(secret: &str, secret_hash: &[u8]) -> bool {
    Sha256::digest(secret).as_slice().ct_eq(secret_hash).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_key_is_found_by_its_id_and_verified_by_its_secret_only() {
        let key = generate().unwrap();
        let (id, secret) = parse(&key.token).unwrap();
        assert_eq!(id, key.id);
        assert!(verify(secret, &key.secret_hash));
        assert!(!verify(&secret[1..], &key.secret_hash));
        assert_ne!(generate().unwrap().token, key.token);
    }

    #[test]
    fn what_is_no_token_is_not_taken_for_one() {
        for text in ["", "tl_", "tl_abc", "tl_abc_", "tl__0123456789abcdef", "sk_abc_0123456789abcdef"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        for text in ["tl_a-b_0123456789abcdef", "tl_abc_0123456789 abcdef", "tl_abc_tooshort"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse("tl_abc_0123456789_abcdef"), Some(("abc", "0123456789_abcdef")));
    }
}
