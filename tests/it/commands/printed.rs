//! What needs no service: documents, schemas, completions, the list of models.

use serde_json::{Value, json};

use super::{ECHO, directory, toolloop};
use crate::service::command;

#[tokio::test]
async fn documents_and_completions_are_printed() {
    let dir = directory(&[("toolloop.toml", "this is not read")]);
    let printed = toolloop(dir.path(), &["openapi"]).await;
    assert_eq!(printed.code, Some(0), "{}", printed.err);
    assert!(
        printed.out == include_str!("../../../openapi/openapi.json"),
        "not the committed document"
    );
    for what in ["agent", "config"] {
        let printed = toolloop(dir.path(), &["schema", what]).await;
        assert_eq!(printed.code, Some(0), "{}", printed.err);
        let schema: Value = serde_json::from_str(&printed.out).unwrap();
        assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
        assert_eq!(schema["additionalProperties"], false);
    }
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let printed = toolloop(dir.path(), &["completions", shell]).await;
        assert_eq!((printed.code, printed.err.as_str()), (Some(0), ""));
        assert!(printed.out.contains("toolloop") && printed.out.contains("doctor"), "{shell}");
    }
}

#[tokio::test]
async fn models_are_listed_without_their_keys() {
    let dir = directory(&[
        ("agents/echo.yaml", ECHO),
        (
            "toolloop.toml",
            "[models.local]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\nmax_retries = 0\n\
             [prices.\"scripted/*\"]\ninput = 0.4\noutput = 1.6\n[capabilities.\"scripted/echo\"]\nforced_tool_choice = false\n",
        ),
    ]);
    let mut command = command(dir.path());
    let listed = command
        .args(["models", "--json"])
        .env("OPENAI_API_KEY", "sk-secret")
        .output()
        .await
        .unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    assert!(!text.contains("sk-secret"));
    let listed: Value = serde_json::from_str(&text).unwrap();
    let model = &listed["models"][0];
    assert_eq!((&model["model"], &model["agents"]), (&json!("scripted/echo"), &json!(["echo"])));
    assert_eq!(
        model["price"],
        json!({"input": 0.4, "cached_input": 0.4, "cache_write": 0.4, "output": 1.6})
    );
    assert_eq!(model["capabilities"]["forced_tool_choice"], "no");
    let fable = listed["shipped"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["pattern"] == "claude-fable-*")
        .unwrap();
    assert_eq!(
        (&fable["kind"], &fable["capabilities"]["thinking"]),
        (&json!("anthropic"), &json!("adaptive"))
    );
    let keys: Vec<_> = listed["providers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| (&p["provider"], &p["key"]))
        .collect();
    let expected = [
        (json!("anthropic"), json!("not set")),
        (json!("local"), json!("none")),
        (json!("ollama"), json!("none")),
        (json!("openai"), json!("set")),
        (json!("scripted"), Value::Null),
    ];
    assert_eq!(keys, expected.iter().map(|(name, key)| (name, key)).collect::<Vec<_>>());
    assert_eq!(listed["providers"][1]["max_retries"], 0);

    let table = toolloop(dir.path(), &["models"]).await;
    assert!(table.out.contains("not set: OPENAI_API_KEY"), "{}", table.out);
    let mythos =
        table.out.lines().find(|line| line.starts_with("anthropic: claude-mythos-*")).unwrap();
    let cells: Vec<&str> = mythos.split_whitespace().skip(2).collect();
    assert_eq!(
        cells,
        [
            "no",
            "yes",
            "yes",
            "yes",
            "yes",
            "yes",
            "1000000",
            "-",
            "max_tokens",
            "no",
            "no",
            "yes",
            "no",
            "no",
            "no",
            "adaptive"
        ]
    );
}
