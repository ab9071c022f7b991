//! The ids of calls that are sent back to a provider. A conversation may hold calls of other
//! providers, whose ids this one does not accept or which have none, and models that give the same
//! id again.

use std::borrow::Cow;
use std::collections::HashSet;

use crate::message::ToolCall;

/// Ids that are unique within a conversation, asked for in its order.
pub(super) struct CallIds<'a> {
    accepts: fn(&str) -> bool,
    prefix: &'static str,
    used: HashSet<&'a str>,
}

impl<'a> CallIds<'a> {
    /// For an API that accepts the ids for which `accepts` is true. Generated ids begin with the prefix.
    pub(super) fn new(accepts: fn(&str) -> bool, prefix: &'static str) -> Self {
        Self { accepts, prefix, used: HashSet::new() }
    }

    /// The ids of a turn's calls: the provider's own where the API accepts it and no earlier call
    /// has it, else one derived from ours.
    pub(super) fn of(&mut self, calls: &'a [ToolCall]) -> Vec<Cow<'a, str>> {
        let id = |call: &'a ToolCall| {
            let own = call.provider_id.as_str();
            if !own.is_empty() && (self.accepts)(own) && self.used.insert(own) {
                Cow::Borrowed(own)
            } else {
                Cow::Owned(format!("{}{}", self.prefix, call.id.simple()))
            }
        };
        calls.iter().map(id).collect()
    }

    /// Whether the provider's own ids of a turn's calls can be sent as they are, for no earlier call
    /// has one of them.
    pub(super) fn are_new(&mut self, calls: &'a [ToolCall]) -> bool {
        calls.iter().all(|call| self.used.insert(&call.provider_id))
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::message::CallTarget;

    #[test]
    fn ids_are_kept_where_they_can_be_and_told_apart_always() {
        let call = |(number, id): (u128, &&str)| ToolCall {
            id: Uuid::from_u128(number),
            provider_id: (*id).to_owned(),
            name: "t".into(),
            arguments: "{}".into(),
            target: CallTarget::Tool,
        };
        let turn = |first: u128, ids: &[&str]| (first..).zip(ids).map(call).collect::<Vec<_>>();
        let (one, two) = (turn(0, &["call_1", "", "call_1", "a b", "x"]), turn(5, &["y", "x"]));
        let ours = |number: u128| format!("call_{number:032x}");
        let mut ids = CallIds::new(|id| !id.contains(' '), "call_");
        assert_eq!(ids.of(&one), ["call_1".to_owned(), ours(1), ours(2), ours(3), "x".to_owned()]);
        assert_eq!(ids.of(&two), ["y".to_owned(), ours(6)]);
        let (new, old) = (turn(9, &["a b", "z"]), turn(7, &["q", "y"]));
        assert!(ids.are_new(&new) && !ids.are_new(&old));
        assert_eq!(ids.of(&old), [ours(7), ours(8)]);
    }
}
