//! Temporary.

use serde_json::Value;

use crate::agents::Agent;

/// Temporary.
#[expect(clippy::unused_async)]
pub async fn reflect(_: &Agent, output: &Value, _: &Value) -> Result<String, String> {
    Ok(output.to_string())
}
