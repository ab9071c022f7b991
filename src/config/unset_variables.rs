//! Environment variables that hold secrets and are not set.
//!
//! A configuration is also checked where its secrets are missing, e.g. in CI. Placeholders stand in for
//! them there, so that everything else is checked.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use super::Settings;

/// Variables that are not set, each with the key or the file that names it.
pub type UnsetVariables = BTreeMap<String, String>;

/// The placeholder for a secret that is one line of text.
pub const SECRET_PLACEHOLDER: &str = "an-environment-variable-that-is-not-set";

/// Adds placeholders to the environment for the key of the audit log and for credentials of
/// programs whose variables are not set. Returns all unset variables, those of MCP servers included.
pub(super) fn add_placeholders(
    settings: &Settings,
    env: &mut HashMap<String, String>,
) -> UnsetVariables {
    let audit_key = settings.audit.key_env.as_str();
    let mut unset = UnsetVariables::new();
    if !audit_key.is_empty() && !env.contains_key(audit_key) {
        env.insert(audit_key.to_owned(), BASE64_STANDARD.encode([0; 32]));
        unset.insert(audit_key.to_owned(), "audit.key_env".to_owned());
    }
    for (name, credential) in &settings.tools.credentials {
        let variable = credential.variable();
        if !variable.is_empty() && !env.contains_key(variable) {
            env.insert(variable.to_owned(), SECRET_PLACEHOLDER.to_owned());
            unset.insert(variable.to_owned(), format!("tools.credentials.{name}.token_env"));
        }
    }
    for (name, server) in &settings.mcp {
        if let Some(variable) = server.variable().filter(|variable| !env.contains_key(*variable)) {
            unset.insert(variable.to_owned(), format!("mcp.{name}.api_key_env"));
        }
    }
    unset
}
