//! Whatever conversation there may be, with calls of whichever providers: what OpenAI's APIs are
//! sent of it is valid.

use proptest::prelude::*;
use toolloop::model::ProviderKind;
use toolloop::providers::{openai, responses};

use crate::dialects::{body, conversation, said, wish};
use crate::mock_model;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chat_completions_take_every_conversation(
        history in prop::collection::vec(said(), 0..8),
        wish in wish(vec!["gpt-4.1-mini", "gpt-5.2", "o4-mini", "meta-llama/llama-4"]),
    ) {
        let conversation = conversation(&history, |_, _, _| "[]".into());
        let body = body(ProviderKind::Openai, &conversation, &wish, openai::body);
        prop_assert_eq!(mock_model::check(&body), Ok(()), "{:#}", body);
    }

    #[test]
    fn responses_take_every_conversation(
        history in prop::collection::vec(said(), 0..8),
        wish in wish(vec!["gpt-4.1-mini", "gpt-5.6-luna", "codex-mini"]),
    ) {
        let conversation = conversation(&history, |_, _, _| "[]".into());
        let body =
            body(ProviderKind::OpenaiResponses, &conversation, &wish, |request, _| responses::body(request, "another"));
        prop_assert_eq!(mock_model::responses::check(&body), Ok(()), "{:#}", body);
    }
}
