//! The two labels of a run, which say what it has read and restrict what it may do.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;

use super::GovernanceMode;

/// A label of a run.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    EnumString,
    ToSchema,
    JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Label {
    /// It has read something that an outsider can write.
    Untrusted,
    /// It has read something that must not leave.
    Private,
}

/// What a source gives to the run that reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Yield {
    Untrusted,
    Private,
    /// No label, whatever the default is.
    None,
}

/// The labels of a run; a list of names in JSON.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<Label>", into = "Vec<Label>")]
pub struct Labels {
    pub untrusted: bool,
    pub private: bool,
}

impl Labels {
    pub const UNTRUSTED: Self = Self { untrusted: true, private: false };
    pub const PRIVATE: Self = Self { untrusted: false, private: true };
    pub const ALL: Self = Self { untrusted: true, private: true };

    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }

    #[must_use]
    pub fn and(self, more: Self) -> Self {
        Self { untrusted: self.untrusted || more.untrusted, private: self.private || more.private }
    }

    #[must_use]
    pub fn without(self, cleared: Self) -> Self {
        Self {
            untrusted: self.untrusted && !cleared.untrusted,
            private: self.private && !cleared.private,
        }
    }

    /// The labels of these yields.
    pub fn yielded(yields: &[Yield]) -> Self {
        let has = |wanted| yields.contains(&wanted);
        Self { untrusted: has(Yield::Untrusted), private: has(Yield::Private) }
    }

    /// The names used in JSON and SQL.
    pub fn names(self) -> Vec<String> {
        let name = |label: Label| <&'static str>::from(label).to_owned();
        Vec::from(self).into_iter().map(name).collect()
    }

    /// The labels of these names; others are ignored.
    pub fn named(names: &[String]) -> Self {
        names.iter().filter_map(|name| name.parse().ok()).collect::<Vec<Label>>().into()
    }
}

impl From<Vec<Label>> for Labels {
    fn from(labels: Vec<Label>) -> Self {
        let has = |wanted| labels.contains(&wanted);
        Self { untrusted: has(Label::Untrusted), private: has(Label::Private) }
    }
}

impl From<Labels> for Vec<Label> {
    fn from(labels: Labels) -> Self {
        let label = |is_there: bool, label| is_there.then_some(label);
        let all =
            [label(labels.untrusted, Label::Untrusted), label(labels.private, Label::Private)];
        all.into_iter().flatten().collect()
    }
}

/// A rule over labels and actions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentFlowRule)]
#[serde(deny_unknown_fields)]
pub struct FlowRule {
    /// CEL over `labels {untrusted, private}`, `action {kind, effect, destructive, egress, path, url, argv,
    /// tool}` and `tool`; judged for each action of a call. One that cannot be evaluated denies.
    pub when: String,
    /// What happens to a call for which the rule is true.
    pub r#do: FlowDecision,
    /// With `observe` the call is executed as `warned`, and the decision that would have been enforced is recorded.
    #[serde(default, skip_serializing_if = "GovernanceMode::is_enforce")]
    pub mode: GovernanceMode,
}

/// What a flow rule decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FlowDecision {
    /// A person decides.
    Ask,
    Deny,
    /// The call is executed, and the audit log says why that was questionable.
    Warn,
}

impl FlowRule {
    /// The rules of a `supervised` agent that names none.
    pub fn defaults() -> Vec<Self> {
        let rule = |when: &str, decision| Self {
            when: when.to_owned(),
            r#do: decision,
            mode: GovernanceMode::Enforce,
        };
        vec![
            rule("labels.untrusted && action.destructive", FlowDecision::Ask),
            rule("labels.untrusted && labels.private && action.egress", FlowDecision::Deny),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_a_list_of_names() {
        let both = Labels::UNTRUSTED.and(Labels::PRIVATE);
        for (labels, json) in [
            (Labels::default(), "[]"),
            (Labels::PRIVATE, r#"["private"]"#),
            (both, r#"["untrusted","private"]"#),
        ] {
            assert_eq!(serde_json::to_string(&labels).unwrap(), json);
            assert_eq!(serde_json::from_str::<Labels>(json).unwrap(), labels);
            assert_eq!(Labels::named(&labels.names()), labels);
        }
        assert_eq!(both.without(Labels::UNTRUSTED), Labels::PRIVATE);
        assert!(serde_json::from_str::<Labels>(r#"["secret"]"#).is_err());
    }
}
