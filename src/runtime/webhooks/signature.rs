//! Signatures of webhooks: Standard Webhooks, version 1.
//!
//! The id, the time and the body are signed together, so that none of them can be exchanged. While a secret is
//! being replaced, there is one signature per secret.

use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use crate::config::webhooks::key;

/// Signs with every secret.
#[derive(Clone)]
pub(super) struct Signer(Vec<Hmac<Sha256>>);

impl Signer {
    /// Nothing where there is no secret.
    pub(super) fn new(secrets: &[SecretString]) -> Option<Self> {
        let keys = secrets.iter().filter_map(|secret| key(secret.expose_secret()));
        let keyed: Vec<_> = keys.filter_map(|key| Hmac::new_from_slice(&key).ok()).collect();
        (!keyed.is_empty()).then_some(Self(keyed))
    }

    /// The value of `webhook-signature`.
    pub(super) fn sign(&self, id: &str, timestamp: i64, body: &[u8]) -> String {
        let signatures = self.0.iter().map(|keyed| {
            let mut mac = keyed.clone();
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body);
            format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
        });
        signatures.collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the specification's own libraries.
    #[test]
    fn signatures_are_those_of_other_implementations() {
        let secret = SecretString::from("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let sign = |secrets: &[SecretString]| {
            let signer = Signer::new(secrets).unwrap();
            signer.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#)
        };
        let expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        assert_eq!(sign(std::slice::from_ref(&secret)), expected);
        let other = SecretString::from(format!("whsec_{}", BASE64_STANDARD.encode([7; 32])));
        let both = sign(&[secret, other.clone()]);
        assert_eq!(both, format!("{expected} {}", sign(&[other])));
        assert!(Signer::new(&[]).is_none());
    }
}
