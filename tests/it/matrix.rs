//! One run on every API, by both drivers, followed or not: what callers see is the same. The
//! servers refuse what the real ones refuse.

use reqwest::Method;
use serde_json::{Value, json};

use crate::mock_model::{self, MockModel};
use crate::mock_server::{self, Api, MockServer};
use crate::service::{Db, Service, Setup, on_both_stores};
use crate::streaming::Reader;
use crate::{mock_anthropic, mock_ollama};

on_both_stores! {
    the_same_run_on_every_api_by_both_drivers_followed_or_not,
}

/// Kind in a configuration, model, and the rules of the APIs that are not OpenAI's.
const APIS: [(&str, &str, Option<Api>); 4] = [
    ("openai", "gpt-4.1-mini", None),
    ("openai-responses", "gpt-5.2", None),
    ("anthropic", "claude-sonnet-4-5", Some(mock_anthropic::API)),
    ("ollama", "qwen3:4b", Some(mock_ollama::API)),
];

const READER: &str = "
model: mock/MODEL
driver: DRIVER
instructions: Read the files.
tools: [file_ops]
enable_double_confirmation: false
";

const LOOK: &str = r#"{"thought": "look", "type": "call_tool", "tool": "file_ops", "args": {"operation": "read", "path": "notes.txt"}}"#;
const DONE: &str = r#"{"type": "final_answer", "answer": {"read": "seventeen"}}"#;

/// What a model says under a driver: a call of `file_ops`, then the answer.
enum Saying {
    Call(Value),
    Text(&'static str),
}

fn sayings(driver: &str) -> [Saying; 2] {
    match driver {
        "native" => [
            Saying::Call(json!({"operation": "read", "path": "notes.txt"})),
            Saying::Text(r#"{"read": "seventeen"}"#),
        ],
        _ => [Saying::Text(LOOK), Saying::Text(DONE)],
    }
}

/// A model server of either make; it lives as long as the run.
enum Mock {
    OpenAi(MockModel),
    Other(MockServer),
}

impl Mock {
    async fn start(api: Option<Api>, sayings: [Saying; 2]) -> Self {
        if let Some(api) = api {
            let replies = sayings.map(|saying| match saying {
                Saying::Call(arguments) => mock_server::Reply::call("file_ops", arguments),
                Saying::Text(text) => mock_server::Reply::text(text),
            });
            return Self::Other(MockServer::start(api, replies).await);
        }
        let mock = MockModel::start().await;
        mock.script(sayings.map(|saying| match saying {
            Saying::Call(arguments) => {
                mock_model::Reply::ToolCalls(vec![("file_ops".into(), arguments.to_string())])
            }
            Saying::Text(text) => mock_model::Reply::text(text),
        }));
        Self::OpenAi(mock)
    }

    fn base_url(&self) -> String {
        match self {
            Self::OpenAi(mock) => mock.base_url().to_string(),
            Self::Other(mock) => mock.base_url.clone(),
        }
    }
}

async fn followed(service: &Service) -> Value {
    let request =
        service.request(Method::POST, "/v1/agents/reader/invoke-iterative").json(&json!({}));
    let mut reader =
        Reader::of(request.header("accept", "text/event-stream").send().await.unwrap());
    let mut last = reader.next().await.unwrap();
    while let Some(frame) = reader.next().await {
        last = frame;
    }
    assert!(!reader.deltas.is_empty(), "answers come in pieces: {last:?}");
    last.data["data"]["run"].clone()
}

async fn the_same_run_on_every_api_by_both_drivers_followed_or_not(db: Db) {
    for (kind, model, api) in APIS {
        for driver in ["native", "react"] {
            for is_followed in [false, true] {
                let case = format!("{kind}, {driver}, followed: {is_followed}");
                let mock = Mock::start(api, sayings(driver)).await;
                let url = mock.base_url();
                let provider = format!(
                    "[models.mock]\nkind = \"{kind}\"\nbase_url = \"{url}\"\nheaders = {{ x-api-key = \"k\" }}"
                );
                let agent = READER.replace("MODEL", model).replace("DRIVER", driver);
                let setup = Setup::new()
                    .agent("reader", &agent)
                    .config(&provider)
                    .file("notes.txt", "seventeen\n");
                let service = setup.start(db).await;
                let run = if is_followed {
                    followed(&service).await
                } else {
                    service.run("reader", &json!({})).await
                };
                assert_eq!(run["output"], json!({"read": "seventeen"}), "{case}: {run:#}");
                assert_eq!(
                    (&run["iterations"], &run["tool_calls_made"]),
                    (&json!(2), &json!(1)),
                    "{case}: {run:#}"
                );
                assert_eq!(run["tools_used"], json!(["file_ops"]), "{case}");
            }
        }
    }
}
