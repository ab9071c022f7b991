//! The same call with the same result, again and again: a sign that a model makes no progress.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::bounds::json;
use crate::message::{ToolCall, canonical_json};

/// How many times in a row the same call had the same result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Streak {
    /// The tool.
    pub(super) tool: String,
    /// How often.
    pub(super) times: u32,
    fingerprint: Vec<u8>,
}

impl Streak {
    /// The streak after this result.
    pub(super) fn with(&self, call: &ToolCall, result: &str) -> Self {
        let fingerprint = fingerprint(call, result);
        let times = if self.fingerprint == fingerprint { self.times + 1 } else { 1 };
        Self { times, tool: call.name.clone(), fingerprint }
    }
}

fn fingerprint(call: &ToolCall, result: &str) -> Vec<u8> {
    let same = same_call(call);
    Sha256::new().chain_update(same).chain_update([0]).chain_update(result).finalize().to_vec()
}

/// A key that is equal for calls of the same tool with the same arguments.
pub(super) fn same_call(call: &ToolCall) -> String {
    let arguments = json::read::<Value>(&call.arguments).map(canonical_json);
    format!("{}\0{}", call.name, arguments.as_deref().unwrap_or(&call.arguments))
}
