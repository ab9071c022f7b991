//! A tool call that the caller makes in an agent's name, instead of a model.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// The call of a run of the kind `call`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GivenCall {
    /// The tool, one of the agent's.
    #[schema(example = "file_ops")]
    pub tool: String,
    /// Its arguments.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub arguments: Map<String, Value>,
}
