//! What a tool call would do: judged by the gate, counted by budgets, kept by the journal.
//!
//! A tool turns its arguments into actions. They are normalised, so that the same call can be
//! judged again later under other rules: paths are resolved, programs are absolute, ports are
//! written out.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use url::Url;
use utoipa::ToSchema;

use super::{Consumption, Effect};

/// Bytes of the actions of one call that the journal keeps, about.
const MAX_RECORDED: usize = 64 * 1024;

/// One thing that a tool call would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Action {
    #[serde(flatten)]
    pub what: ActionKind,
    /// What repeating it would do.
    pub effect: Effect,
    /// Whether existing data would be lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub destructive: bool,
    /// Whether bytes would leave the service.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub egress: bool,
    /// Lines that it would write or replace.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lines: u64,
    /// Parent directories that the action creates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub makes: Vec<String>,
}

/// `kind` and its fields in JSON. Paths are normalised and relative to the run's workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ActionKind {
    /// Reads a file or lists a directory.
    Read {
        /// Relative to the workspace.
        path: String,
    },
    /// Writes, creates, moves or deletes.
    Write {
        /// Relative to the workspace.
        path: String,
    },
    /// Runs a program: the absolute path of its file, then its arguments.
    Exec {
        /// The absolute path of the program's file, then its arguments.
        argv: Vec<String>,
        /// Whether the operator wrote the program, which needs no `commands.allow`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        declared: bool,
    },
    /// Sends an HTTP request.
    Fetch(Target),
    /// Calls something known only by name.
    Call {
        /// Its name.
        tool: String,
    },
    /// Delegates to another agent, whose actions are judged in its own run.
    Delegate {
        /// The other agent.
        agent: String,
    },
}

/// Where an HTTP request goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Target {
    /// `http` or `https`.
    pub scheme: String,
    /// In lower case; an IPv6 address in brackets.
    pub host: String,
    /// As given, or the scheme's own.
    pub port: u16,
    /// Without query and fragment.
    pub path: String,
    /// Whether the operator wrote the address, which needs no `network.allow`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub declared: bool,
}

impl Target {
    /// The target of an address.
    pub fn of(url: &Url, declared: bool) -> Self {
        Self {
            scheme: url.scheme().to_owned(),
            host: url.host_str().unwrap_or_default().to_owned(),
            port: url.port_or_known_default().unwrap_or_default(),
            path: url.path().to_owned(),
            declared,
        }
    }
}

impl Action {
    /// An action that loses nothing and sends nothing.
    pub fn new(what: ActionKind, effect: Effect) -> Self {
        Self { what, effect, destructive: false, egress: false, lines: 0, makes: Vec::new() }
    }

    /// Whether it does more than another action: at another target, or with more effect.
    pub fn goes_beyond(&self, other: &Self) -> bool {
        self.what != other.what
            || self.effect > other.effect
            || (self.destructive && !other.destructive)
            || (self.egress && !other.egress)
            || self.makes.iter().any(|made| !other.makes.contains(made))
    }

    /// The actions as the journal keeps them: all, or none where they are too large for an event.
    pub fn recorded(actions: &Arc<[Self]>) -> Arc<[Self]> {
        let size = |action: &Self| {
            let made = action.makes.iter().map(String::len).sum::<usize>();
            made + match &action.what {
                ActionKind::Read { path } | ActionKind::Write { path } => path.len(),
                ActionKind::Exec { argv, .. } => argv.iter().map(|arg| arg.len() + 3).sum(),
                ActionKind::Fetch(target) => target.host.len() + target.path.len(),
                ActionKind::Call { tool: name } | ActionKind::Delegate { agent: name } => {
                    name.len()
                }
            } + 64
        };
        let total = actions.iter().map(size).sum::<usize>();
        if total > MAX_RECORDED { Arc::default() } else { Arc::clone(actions) }
    }

    /// The hash of actions, unless they are recorded.
    pub fn hash_of_unrecorded(actions: &[Self], recorded: &[Self]) -> Option<String> {
        (recorded.len() < actions.len()).then(|| Self::hash_of(actions))
    }

    /// SHA-256 of the actions, without how many lines they change.
    pub fn hash_of(actions: &[Self]) -> String {
        let mut hash = Sha256::new();
        for action in actions {
            let action = Self { lines: 0, ..action.clone() };
            hash.update(serde_json::json!(action).to_string());
            hash.update("\n");
        }
        hex::encode(hash.finalize())
    }
}

impl Consumption {
    /// What actions consume of a run's budget.
    pub fn of(actions: &[Action]) -> Self {
        let mut consumed = Self::default();
        for Action { what, lines, makes, .. } in actions {
            match what {
                ActionKind::Read { .. } => consumed.files_read += 1,
                ActionKind::Write { path } => {
                    consumed.files_written += 1 + makes.len() as u64;
                    consumed.files_modified.extend(makes.iter().cloned());
                    consumed.lines_changed += lines;
                    consumed.files_modified.insert(path.clone());
                }
                ActionKind::Exec { .. } => consumed.commands += 1,
                ActionKind::Fetch(_) => consumed.network_requests += 1,
                ActionKind::Call { .. } | ActionKind::Delegate { .. } => {}
            }
        }
        consumed
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn actions_are_flat_objects_in_the_journal() {
        let target = Target {
            scheme: "https".into(),
            host: "api.example.com".into(),
            port: 443,
            path: "/v1/items".into(),
            declared: false,
        };
        let table = [
            (
                Action::new(ActionKind::Read { path: "a/b".into() }, Effect::Read),
                json!({"kind": "read", "path": "a/b", "effect": "read"}),
            ),
            (
                Action {
                    destructive: true,
                    lines: 3,
                    makes: vec!["a".into()],
                    ..Action::new(ActionKind::Write { path: "a/b".into() }, Effect::Once)
                },
                json!({"kind": "write", "path": "a/b", "effect": "once", "destructive": true,
                    "lines": 3, "makes": ["a"]}),
            ),
            (
                Action::new(
                    ActionKind::Exec {
                        argv: vec!["/usr/bin/git".into(), "log".into()],
                        declared: false,
                    },
                    Effect::Read,
                ),
                json!({"kind": "exec", "argv": ["/usr/bin/git", "log"], "effect": "read"}),
            ),
            (
                Action::new(
                    ActionKind::Exec { argv: vec!["/usr/bin/wc".into()], declared: true },
                    Effect::Once,
                ),
                json!({"kind": "exec", "argv": ["/usr/bin/wc"], "declared": true, "effect": "once"}),
            ),
            (
                Action { egress: true, ..Action::new(ActionKind::Fetch(target), Effect::Read) },
                json!({"kind": "fetch", "scheme": "https", "host": "api.example.com", "port": 443,
                    "path": "/v1/items", "effect": "read", "egress": true}),
            ),
            (
                Action::new(ActionKind::Call { tool: "recall".into() }, Effect::Read),
                json!({"kind": "call", "tool": "recall", "effect": "read"}),
            ),
            (
                Action::new(ActionKind::Delegate { agent: "writer".into() }, Effect::Idempotent),
                json!({"kind": "delegate", "agent": "writer", "effect": "idempotent"}),
            ),
        ];
        for (action, expected) in table {
            assert_eq!(serde_json::to_value(&action).unwrap(), expected);
            assert_eq!(serde_json::from_value::<Action>(expected).unwrap(), action);
        }
    }

    #[test]
    fn a_hash_tells_actions_apart_whatever_lines_they_change() {
        let write = |path: &str, lines| Action {
            lines,
            ..Action::new(ActionKind::Write { path: path.into() }, Effect::Once)
        };
        let hash = Action::hash_of(&[write("a", 1), write("b", 1)]);
        assert_eq!(Action::hash_of(&[write("a", 2), write("b", 3)]), hash);
        for other in [vec![write("a", 1)], vec![write("a", 1), write("c", 1)]] {
            assert_ne!(Action::hash_of(&other), hash);
        }
        let destructive = Action { destructive: true, ..write("b", 1) };
        assert_ne!(Action::hash_of(&[write("a", 1), destructive]), hash);
    }

    #[test]
    fn actions_too_large_for_an_event_are_not_recorded() {
        let reads = |count: usize| -> Arc<[Action]> {
            let read = Action::new(ActionKind::Read { path: "p".repeat(100) }, Effect::Read);
            std::iter::repeat_n(read, count).collect()
        };
        assert_eq!(Action::recorded(&reads(300)).len(), 300);
        assert_eq!(Action::recorded(&reads(1_000)).len(), 0);
        assert_eq!(Action::hash_of_unrecorded(&reads(300), &Action::recorded(&reads(300))), None);
        let many = reads(1_000);
        assert_eq!(
            Action::hash_of_unrecorded(&many, &Action::recorded(&many)),
            Some(Action::hash_of(&many))
        );
    }
}
