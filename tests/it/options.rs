//! Options of sampling, and what is passed on to providers by name: each provider gets them under
//! the names of its API, what a model does not have is refused by name, before anything starts.
//!
//! | together with | here |
//! |---|---|
//! | request's own model or temperature | `a_model_without_an_option_cannot_be_chosen` |
//! | dry run | the same |
//! | fallbacks, reload | `check_reports_options_that_a_model_does_not_have` |
//! | a summary of the conversation | without `stop`; no test of its own |
//! | children, handoffs, sessions, replicas | none: options come from the agent's own definition |

use reqwest::Method;
use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply as Said};
use crate::mock_server::{MockServer, Reply};
use crate::service::{Db, Setup, command, on_both_stores};
use crate::{mock_anthropic, mock_ollama};

on_both_stores! {
    options_reach_each_provider_under_its_names,
    a_refused_option_is_named_in_the_error,
    a_model_without_an_option_cannot_be_chosen,
    decisions_are_asked_for_in_json_mode,
}

fn server(name: &str, kind: &str, base_url: &str) -> String {
    format!(
        "[models.{name}]\nkind = \"{kind}\"\nbase_url = \"{base_url}\"\nmax_retries = 0\nheaders = {{ x-api-key = \"k\" }}\n"
    )
}

const ALL: &str = "sampling: {top_p: 0.9, stop: [END, STOP], seed: 7, presence_penalty: 0.5, frequency_penalty: -0.5}\n";

async fn options_reach_each_provider_under_its_names(db: Db) {
    let openai = MockModel::start().await;
    openai.script([Said::text("fine"), Said::text("fine")]);
    let claude = MockServer::start(mock_anthropic::API, [Reply::text("fine")]).await;
    let ollama = MockServer::start(mock_ollama::API, [Reply::text("fine")]).await;
    let service = Setup::new()
        .config(&server("chat", "openai", openai.base_url()))
        .config(&server("responses", "openai-responses", openai.base_url()))
        .config(&server("claude", "anthropic", &claude.base_url))
        .config(&server("llama", "ollama", &ollama.base_url))
        .agent("chat", &format!("model: chat/gpt-4.1\n{ALL}provider_options: {{user: u, logit_bias: {{'50256': -100}}}}\n"))
        .agent("responses", "model: responses/gpt-4.1\nsampling: {top_p: 0.9}\nprovider_options: {text: {verbosity: low}, user: u}\n")
        .agent("claude", "model: claude/claude-sonnet-4-5\nsampling: {top_p: 0.9, stop: END}\nprovider_options: {top_k: 5, service_tier: auto}\n")
        .agent("llama", &format!("model: llama/qwen3:4b\n{ALL}provider_options: {{keep_alive: 5m, options: {{top_k: 5}}}}\n"))
        .start(db)
        .await;
    for agent in ["chat", "responses", "claude", "llama"] {
        let run = service.run(agent, &json!({})).await;
        assert_eq!(run["status"], "completed", "{agent}: {run:#}");
    }
    let all = json!({"top_p": 0.9, "stop": ["END", "STOP"], "seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5});
    let with = |base: &Value, more: &Value| {
        let mut base = base.as_object().unwrap().clone();
        base.extend(more.as_object().unwrap().clone());
        Value::from(base)
    };
    let chat = &openai.requests()[0].body;
    holds(chat, &with(&all, &json!({"user": "u", "logit_bias": {"50256": -100}})));
    let responses = &openai.requests()[1].body;
    holds(responses, &json!({"top_p": 0.9, "text": {"verbosity": "low"}, "user": "u"}));
    let expected =
        json!({"top_p": 0.9, "stop_sequences": ["END"], "top_k": 5, "service_tier": "auto"});
    holds(&claude.requests()[0], &expected);
    let llama = ollama.requests().remove(0);
    holds(&llama["options"], &with(&all, &json!({"top_k": 5})));
    assert_eq!(llama["keep_alive"], "5m", "{llama:#}");
}

fn holds(body: &Value, expected: &Value) {
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&body[name], value, "{name} in {body:#}");
    }
}

async fn a_refused_option_is_named_in_the_error(db: Db) {
    let mock = MockModel::start().await;
    let refusal = |message: &str, param: &str| Said::Status {
        status: 400,
        headers: Vec::new(),
        body: json!({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": null}}),
    };
    mock.script([
        refusal("Unsupported value.", "seed"),
        refusal("Unrecognized request argument supplied: user", ""),
        refusal("Something else.", ""),
    ]);
    let service = Setup::new()
        .config(&server("mock", "openai", mock.base_url()))
        .agent("asker", "model: mock/x\nsampling: {seed: 7}\nprovider_options: {user: u}\n")
        .start(db)
        .await;
    for option in [json!("sampling.seed"), json!("provider_options.user"), Value::Null] {
        let run = service.run("asker", &json!({})).await;
        let error = &run["error"];
        assert_eq!((&error["code"], &error["context"]["option"]), (&json!("MODEL_ERROR"), &option));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(option.as_str().unwrap_or("Something")), "{message}");
    }
}

async fn a_model_without_an_option_cannot_be_chosen(db: Db) {
    let agent = "model: openai/gpt-4.1\nmodels: ['openai/*', 'anthropic/*']\nsampling: {seed: 7}\n";
    let either = "model: anthropic/claude-sonnet-4-5\nsampling: {top_p: 0.9}\n";
    let service = Setup::new().agent("one", agent).agent("either", either).start(db).await;
    let table = [
        (
            "one",
            json!({"model": "anthropic/claude-sonnet-4-5"}),
            "/model",
            "anthropic/claude-sonnet-4-5 does not take it",
        ),
        ("either", json!({"temperature": 0.5}), "/temperature", "either a temperature or top_p"),
    ];
    for (agent, request, pointer, message) in table {
        for dry_run in [false, true] {
            let mut request = request.clone();
            request["dry_run"] = dry_run.into();
            let path = format!("/v1/agents/{agent}/invoke-iterative");
            let answer = service.request(Method::POST, &path).json(&request).send().await.unwrap();
            assert_eq!(answer.status(), 422);
            let body: Value = answer.json().await.unwrap();
            assert_eq!(body["code"], "INVALID_OVERRIDE", "{body:#}");
            assert_eq!(body["errors"][0]["pointer"], pointer, "{body:#}");
            let said = body["errors"][0]["message"].as_str().unwrap();
            assert!(said.contains(message), "{said}");
        }
    }
}

/// Model, what its agent says, and what `check` tells of it; nothing where it loads.
const TOLD: &[(&str, &str, &str)] = &[
    ("openai/gpt-4.1", "sampling: {seed: 7, stop: END}", ""),
    ("openai/gpt-5.2", "sampling: {seed: 7}", ""),
    (
        "openai/gpt-5.2",
        "sampling: {stop: END}",
        "line 3, column 12: sampling.stop: openai/gpt-5.2 does not take it",
    ),
    (
        "openai/o4-mini",
        "sampling: {presence_penalty: 1}",
        "sampling.presence_penalty: openai/o4-mini",
    ),
    (CLAUDE, "sampling: {seed: 7}", "sampling.seed: anthropic/claude-sonnet-4-5"),
    (CLAUDE, "sampling: {frequency_penalty: 1}", "sampling.frequency_penalty"),
    (CLAUDE, "sampling: {top_p: 0.9, temperature: 1}", "either a temperature or top_p"),
    (CLAUDE, "sampling: {top_p: 0.9}\nthinking: {budget_tokens: 2000}", "below 0.95"),
    ("anthropic/claude-opus-4-8", "sampling: {top_p: 0.9}", "sampling.top_p"),
    (
        "openai/gpt-4.1",
        "sampling: {seed: 7}\nfallback_models: [anthropic/claude-sonnet-4-5]",
        "sampling.seed: anthropic/claude-sonnet-4-5",
    ),
    (
        "openai/gpt-4.1",
        "sampling: {seed: 7}\nreact: {final_via_inference: true, final_model: anthropic/claude-sonnet-4-5}",
        "react.final_sampling.seed: anthropic/claude-sonnet-4-5",
    ),
    (
        "openai/gpt-4.1",
        "react: {final_via_inference: true, final_model: nobody/x}",
        "react.final_model: there is no provider",
    ),
    (
        "openai/gpt-4.1",
        "react: {final_model: openai/gpt-5}",
        "react.final_model: needs final_via_inference",
    ),
    (
        "openai/gpt-4.1",
        "react: {final_via_inference: true, final_model: openai/unpriced}\ngovernance: {budget: {max_cost_usd: 1}}",
        "governance.budget.max_cost_usd: openai/unpriced has no price",
    ),
    (
        "openai/gpt-4.1",
        "tools: [file_ops]\ninterceptors: {after: [{tool: file_ops, replace: '{{ reslt }}'}]}",
        "interceptors.after[0].replace: there is no \"reslt\"",
    ),
    (
        "openai/gpt-4.1",
        "tools: [file_ops]\ninterceptors: {after: [{tool: file_ops, replace: x, redact: y}]}",
        "interceptors.after[0]: must have either",
    ),
    (
        "openai/gpt-4.1",
        "react: {decision_schema: {type: object}}",
        "react.decision_schema: needs driver: react",
    ),
    (
        "openai/gpt-4.1",
        "driver: react\nreact: {decision_schema: {properties: {args: {type: object}}}}",
        "react.decision_schema.properties.args: is a field of every decision already",
    ),
    (
        "openai/gpt-4.1",
        "driver: react\nreact: {decision_schema: {type: objekt}}",
        "react.decision_schema: ",
    ),
    ("openai/gpt-4.1", "sampling: {top_p: 1.5}", "sampling.top_p: 1.5 is not between 0 and 1"),
    ("openai/gpt-4.1", "sampling: {stop: [a, b, c, d, e]}", "sampling.stop"),
    ("openai/gpt-4.1", "sampling: {stop: {a: 1}}", "a text or a list of texts"),
    ("openai/gpt-4.1", "provider_options: {user: u}", ""),
    (
        "openai/gpt-4.1",
        "provider_options: {stream: true}",
        "line 3, column 20: provider_options.stream: `stream` is written by the service",
    ),
    ("openai/gpt-4.1", "provider_options: {seed: 1}", "provider_options.seed"),
    ("ollama/x", "provider_options: {options: {num_ctx: 1}}", "provider_options.options.num_ctx"),
    ("ollama/x", "provider_options: {options: 1}", "provider_options.options: must be an object"),
];
const CLAUDE: &str = "anthropic/claude-sonnet-4-5";

#[tokio::test]
async fn check_reports_options_that_a_model_does_not_have() {
    let agents: Vec<(String, &(&str, &str, &str))> =
        TOLD.iter().enumerate().map(|(i, row)| (format!("agent-{i:02}"), row)).collect();
    let setup = agents.iter().fold(Setup::new(), |setup, (name, (model, more, _))| {
        setup.agent(name, &format!("model: {model}\n{more}\n"))
    });
    let dir = setup.write_directory();
    let check = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&check.stdout) + String::from_utf8_lossy(&check.stderr);
    for (name, (model, more, expected)) in agents {
        let of_it: Vec<&str> = said.lines().filter(|line| line.contains(&name)).collect();
        let is_told = of_it.iter().any(|line| line.contains(expected));
        assert_eq!(is_told, !expected.is_empty(), "{model} {more}: {of_it:#?}");
        assert!(!expected.is_empty() || of_it.is_empty(), "{model} {more}: {of_it:#?}");
    }
}

async fn decisions_are_asked_for_in_json_mode(db: Db) {
    let done = r#"{"type": "final_answer", "answer": "fine"}"#;
    let openai = MockModel::start().await;
    openai.script([
        Said::text(done),
        Said::text(done),
        Said::text(done),
        Said::text("Fine."),
        Said::text(done),
    ]);
    let ollama = MockServer::start(mock_ollama::API, [Reply::text(done)]).await;
    let claude = MockServer::start(mock_anthropic::API, [Reply::text(done)]).await;
    let react = "driver: react\nenable_double_confirmation: false\ntools: [file_ops]\n";
    let service = Setup::new()
        .config(&server("chat", "openai", openai.base_url()))
        .config(&server("responses", "openai-responses", openai.base_url()))
        .config(&server("claude", "anthropic", &claude.base_url))
        .config(&server("llama", "ollama", &ollama.base_url))
        .config("[capabilities.\"chat/plain\"]\njson_mode = false")
        .agent("chat", &format!("model: chat/gpt-4.1\n{react}"))
        .agent("responses", &format!("model: responses/gpt-4.1\n{react}"))
        .agent(
            "writer",
            &format!("model: chat/gpt-4.1\n{react}react: {{final_via_inference: true}}\n"),
        )
        .agent("plain", &format!("model: chat/plain\n{react}"))
        .agent("claude", &format!("model: claude/claude-sonnet-4-5\n{react}"))
        .agent("llama", &format!("model: llama/qwen3:4b\n{react}"))
        .start(db)
        .await;
    for agent in ["chat", "responses", "writer", "plain", "claude", "llama"] {
        let run = service.run(agent, &json!({})).await;
        assert_eq!(run["status"], "completed", "{agent}: {run:#}");
    }
    let json = json!({"type": "json_object"});
    let seen: Vec<Value> = openai.requests().into_iter().map(|seen| seen.body).collect();
    let formats: Vec<&Value> = seen
        .iter()
        .map(|body| body.get("response_format").unwrap_or(&body["text"]["format"]))
        .collect();
    assert_eq!(formats, [&json, &json, &json, &Value::Null, &Value::Null]);
    assert_eq!(ollama.requests()[0]["format"], "json");
    assert_eq!(claude.requests()[0].get("output_config"), None);
}
