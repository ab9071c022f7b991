//! Environment variables that hold secrets and are not set.
//!
//! A configuration is checked where its secrets are not, e.g. in CI: something else stands in for
//! them there, so that everything else is looked at.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use super::credentials::CredentialSettings;

/// Variables that are not set, each with the key or the file that names it.
pub type UnsetVariables = BTreeMap<String, String>;

/// What stands in for a secret that is one line of text.
pub const STAND_IN: &str = "an-environment-variable-that-is-not-set";

/// Adds to the environment what stands in for the key of the audit log and for credentials of
/// programs, where their variables are not set, and tells which.
pub(super) fn stand_in(
    audit_key: &str,
    credentials: &BTreeMap<String, CredentialSettings>,
    env: &mut HashMap<String, String>,
) -> UnsetVariables {
    let mut unset = UnsetVariables::new();
    if !audit_key.is_empty() && !env.contains_key(audit_key) {
        env.insert(audit_key.to_owned(), BASE64_STANDARD.encode([0; 32]));
        unset.insert(audit_key.to_owned(), "audit.key_env".to_owned());
    }
    for (name, credential) in credentials {
        let variable = credential.variable();
        if !variable.is_empty() && !env.contains_key(variable) {
            env.insert(variable.to_owned(), STAND_IN.to_owned());
            unset.insert(variable.to_owned(), format!("tools.credentials.{name}.token_env"));
        }
    }
    unset
}
