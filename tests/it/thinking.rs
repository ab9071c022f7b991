//! Models that think within a budget of tokens: thinking is output, which is paid for like any other.

use serde_json::{Value, json};

use crate::mock_anthropic;
use crate::mock_server::{MockServer, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    thinking_keeps_within_the_budget_of_tokens,
    a_last_answer_keeps_within_its_own_size,
}

const THINKER: &str = "
model: mock/claude-sonnet-4-5
instructions: Think.
tools: [file_ops]
thinking: {budget_tokens: 2000}
sampling: {max_output_tokens: 2000}
enable_double_confirmation: false
";

async fn service(db: Db, mock: &MockServer) -> Service {
    let config = format!(
        "[models.mock]\nkind = \"anthropic\"\nbase_url = \"{}\"\nheaders = {{ x-api-key = \"k\" }}\n",
        mock.base_url
    );
    Setup::new().agent("thinker", THINKER).config(&config).start(db).await
}

async fn run(service: &Service, tokens: u64) -> Value {
    service.run("thinker", &json!({"budget": {"max_total_tokens": tokens}})).await
}

async fn thinking_keeps_within_the_budget_of_tokens(db: Db) {
    let mock = MockServer::start(mock_anthropic::API, [(); 5].map(|()| Reply::text("so"))).await;
    let service = service(db, &mock).await;
    let refused = run(&service, 257).await;
    assert_eq!(refused["error"]["code"], "BUDGET_EXCEEDED", "{refused:#}");
    let input = refused["error"]["context"]["needs"].as_u64().unwrap() - 256;
    // What is left beside the input | `max_tokens` and the budget of thinking that are sent.
    let table = [
        (256, 256, Value::Null),
        (1279, 1279, Value::Null),
        (1500, 1500, json!(1024)),
        (3000, 3000, json!(1500)),
        (9000, 4000, json!(2000)),
    ];
    for (asked, (left, max_tokens, thinking)) in table.into_iter().enumerate() {
        let done = run(&service, input + left).await;
        assert_eq!(done["status"], "completed", "{left}: {done:#}");
        let sent = mock.requests().remove(asked);
        let told = (&sent["max_tokens"], &sent["thinking"]["budget_tokens"]);
        assert_eq!(told, (&json!(max_tokens), &thinking), "{left}");
    }
}

async fn a_last_answer_keeps_within_its_own_size(db: Db) {
    let list = Reply::call("file_ops", json!({"operation": "list", "path": "."}));
    let mock = MockServer::start(mock_anthropic::API, [list, Reply::text("so far")]).await;
    let service = service(db, &mock).await;
    let done = service.run("thinker", &json!({"max_iterations": 1, "on_limit": "answer"})).await;
    assert_eq!(done["output"], json!({"result": "so far"}), "{done:#}");
    let sent: Vec<Value> =
        mock.requests().iter().map(|request| request["max_tokens"].clone()).collect();
    assert_eq!(sent, [4000, 1024], "{done:#}");
}
