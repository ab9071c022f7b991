//! The ids of calls that are sent back to OpenAI. A conversation may hold calls of other providers,
//! whose ids are longer or missing.

use std::borrow::Cow;

use crate::message::ToolCall;

/// Longest id that Chat Completions accepts, in bytes.
const MAX_ID: usize = 40;

/// The ids of a turn's calls, in order: the provider's own if the API accepts it and no earlier
/// call of the turn has it, else one derived from ours.
pub(in crate::providers) fn wire_ids(calls: &[ToolCall]) -> impl Iterator<Item = Cow<'_, str>> {
    calls.iter().enumerate().map(|(index, call)| {
        let own = call.provider_id.as_str();
        let is_first = calls.iter().take(index).all(|earlier| earlier.provider_id != own);
        if (1..=MAX_ID).contains(&own.len()) && is_first {
            Cow::Borrowed(own)
        } else {
            Cow::Owned(format!("call_{}", call.id.simple()))
        }
    })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::message::CallTarget;

    #[test]
    fn ids_are_kept_where_they_can_be_and_told_apart_always() {
        let ids = ["call_1", "", "call_1", &"x".repeat(41), &"x".repeat(40)];
        let call = |(number, id): (u128, &&str)| ToolCall {
            id: Uuid::from_u128(number),
            provider_id: (*id).to_owned(),
            name: "t".into(),
            arguments: "{}".into(),
            target: CallTarget::Tool,
        };
        let calls: Vec<ToolCall> = (0..).zip(&ids).map(call).collect();
        let ours = |number: u128| format!("call_{number:032x}");
        let expected = [ids[0].to_owned(), ours(1), ours(2), ours(3), ids[4].to_owned()];
        assert_eq!(wire_ids(&calls).collect::<Vec<_>>(), expected);
    }
}
