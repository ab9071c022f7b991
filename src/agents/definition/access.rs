//! Which files, hosts and tools an agent may use.
//!
//! A rule that denies or asks is a word, or a mapping with `mode: observe`: the call is then executed as
//! `warned`, and the decision that would have been enforced is recorded.

use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::run::GovernanceMode;

/// Globs relative to the workspace; `./**` is everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentPaths)]
#[serde(default, deny_unknown_fields)]
pub struct PathsSection {
    /// Paths that may be read; default: the whole workspace.
    #[schemars(inner(regex(pattern = PATH_PATTERN)))]
    pub read: Vec<String>,
    /// Paths that may be written; default: none.
    #[schemars(inner(regex(pattern = PATH_PATTERN)))]
    pub write: Vec<String>,
    /// Paths that may be neither read nor written.
    #[schemars(schema_with = "denied_paths")]
    pub deny: Vec<DenyRule>,
    /// Paths whose content labels a run that reads it `private`.
    #[schemars(inner(regex(pattern = PATH_PATTERN)))]
    pub private: Vec<String>,
    /// Paths in other directories of the tenant that may be neither read nor written: globs by
    /// directory. Also applies to child runs.
    pub deny_in: BTreeMap<String, Vec<DenyRule>>,
    /// Private paths in other directories of the tenant: globs by directory. Also applies to child
    /// runs.
    pub private_in: BTreeMap<String, Vec<String>>,
}

impl Default for PathsSection {
    fn default() -> Self {
        Self {
            read: vec!["./**".into()],
            write: Vec::new(),
            deny: Vec::new(),
            private: Vec::new(),
            deny_in: BTreeMap::new(),
            private_in: BTreeMap::new(),
        }
    }
}

/// Which hosts tools may contact. A list's entry is `host`, `*.host` (everything below it) or `*`, with
/// `:port` or without; an IPv6 address is written in brackets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentNetwork)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkSection {
    /// Hosts that may be contacted, on ports 80 and 443 unless one is given; default: none. Addresses
    /// in the operator's configuration, e.g. of HTTP tools, need no entry.
    #[schemars(inner(regex(pattern = HOST_PATTERN)))]
    pub allow: Vec<String>,
    /// Hosts that may not be contacted, on all ports unless one is given.
    #[schemars(schema_with = "denied_hosts")]
    pub deny: Vec<DenyRule>,
    /// Networks (CIDR) whose addresses may be connected to although they are not public, where the
    /// host is allowed.
    #[schemars(inner(regex(pattern = r"^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$")))]
    pub allow_private: Vec<String>,
    /// Secrets of the service's configuration (`[tools.credentials]`) that are added to requests of
    /// programs.
    #[schemars(length(max = 16))]
    pub credentials: Vec<String>,
    /// Requests of one run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_requests: Option<u64>,
}

const HOST_PATTERN: &str = r"^(\*|(\*\.)?[^\s*%:/?#@\[\]\\]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$";

const PATH_PATTERN: &str = "^[^/]";

fn denied_paths(generator: &mut SchemaGenerator) -> Schema {
    denied(PATH_PATTERN, generator)
}

fn denied_hosts(generator: &mut SchemaGenerator) -> Schema {
    denied(HOST_PATTERN, generator)
}

/// A list of [`DenyRule`]s whose patterns match this expression.
fn denied(pattern: &str, generator: &mut SchemaGenerator) -> Schema {
    let (word, mode) = (
        json!({"type": "string", "pattern": pattern}),
        generator.subschema_for::<GovernanceMode>(),
    );
    let with_mode = json!({
        "type": "object",
        "required": ["pattern"],
        "properties": {"pattern": word, "mode": mode},
        "additionalProperties": false,
    });
    json_schema!({"type": "array", "items": {"anyOf": [word, with_mode]}})
}

/// How a tool is treated, from the mildest to the strictest.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[schema(as = ToolPolicy)]
#[serde(rename_all = "snake_case")]
pub enum ToolPolicySetting {
    /// Other rules decide.
    Allow,
    /// Needs approval.
    Ask,
    /// Never.
    Deny,
}

/// How tools are treated, and whether that is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema, JsonSchema)]
#[schema(as = ToolPolicyRule)]
#[serde(untagged)]
pub enum ToolPolicyRule {
    /// Enforced.
    Enforced(ToolPolicySetting),
    /// As its mode says.
    WithMode(ToolPolicyWithMode),
}

/// How tools are treated, with a mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolPolicyWithMode {
    /// How calls are treated if the mode is `enforce`.
    #[serde(rename = "do")]
    pub setting: ToolPolicySetting,
    /// With `observe`, calls are executed.
    #[serde(default)]
    pub mode: GovernanceMode,
}

/// Paths or hosts that may not be used, and whether that is enforced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema, JsonSchema)]
#[schema(as = DenyRule)]
#[serde(untagged)]
pub enum DenyRule {
    /// Enforced.
    Enforced(String),
    /// As its mode says.
    WithMode(PatternWithMode),
}

/// Paths or hosts, with a mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PatternWithMode {
    /// A glob of paths, or a host.
    pub pattern: String,
    /// With `observe`, calls are executed.
    #[serde(default)]
    pub mode: GovernanceMode,
}

impl ToolPolicyRule {
    /// How calls are treated if that is enforced.
    pub fn setting(self) -> ToolPolicySetting {
        match self {
            Self::Enforced(setting) | Self::WithMode(ToolPolicyWithMode { setting, .. }) => setting,
        }
    }

    /// Whether calls are executed nevertheless.
    pub fn observes(self) -> bool {
        matches!(self, Self::WithMode(rule) if rule.mode == GovernanceMode::Observe)
    }

    /// The rule, if it only observes.
    #[must_use]
    pub fn observing(self) -> Self {
        let setting = self.setting();
        Self::WithMode(ToolPolicyWithMode { setting, mode: GovernanceMode::Observe })
    }

    /// The stricter of two rules: what is enforced before what is only observed.
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        let strictness = |rule: Self| {
            let enforced = if rule.observes() { ToolPolicySetting::Allow } else { rule.setting() };
            (enforced, rule.setting())
        };
        if strictness(other) > strictness(self) { other } else { self }
    }
}

impl DenyRule {
    /// A rule that only observes.
    pub fn observing(pattern: &str) -> Self {
        let pattern = pattern.to_owned();
        Self::WithMode(PatternWithMode { pattern, mode: GovernanceMode::Observe })
    }

    /// The paths or hosts.
    pub fn pattern(&self) -> &str {
        match self {
            Self::Enforced(pattern) | Self::WithMode(PatternWithMode { pattern, .. }) => pattern,
        }
    }

    /// Whether they may be used nevertheless.
    pub fn observes(&self) -> bool {
        matches!(self, Self::WithMode(rule) if rule.mode == GovernanceMode::Observe)
    }

    /// The patterns of the rules that only observe, or of those that are enforced.
    pub fn patterns(rules: &[Self], that_observe: bool) -> Vec<String> {
        let meant = rules.iter().filter(|rule| rule.observes() == that_observe);
        meant.map(|rule| rule.pattern().to_owned()).collect()
    }
}

impl<'de> Deserialize<'de> for ToolPolicyRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "allow, ask, deny, or a mapping of do and mode";
        deserializer.deserialize_any(WordOrMap(expected, Self::Enforced, Self::WithMode))
    }
}

impl<'de> Deserialize<'de> for DenyRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a string, or a mapping of pattern and mode";
        deserializer.deserialize_any(WordOrMap(expected, Self::Enforced, Self::WithMode))
    }
}

/// Reads a word or a mapping; unlike with an untagged enum, the error says what was expected.
struct WordOrMap<W, M, T>(&'static str, fn(W) -> T, fn(M) -> T);

impl<'de, W: Deserialize<'de>, M: Deserialize<'de>, T> Visitor<'de> for WordOrMap<W, M, T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<T, E> {
        W::deserialize(StrDeserializer::new(word)).map(self.1)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        M::deserialize(MapAccessDeserializer::new(map)).map(self.2)
    }
}
