//! What agents with a memory keep of their runs, and recall in later ones.

use serde_json::{Value, json};

use crate::service::{ADMIN_KEY, Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_later_run_recalls_what_fits_its_inputs,
    a_model_recalls_by_itself,
    what_is_private_is_never_kept,
    nobody_recalls_what_is_anothers,
    what_was_deleted_is_forgotten,
    a_tool_without_a_memory_is_a_mistake,
}

const MODEL: &str = "
model: scripted/bird
enable_double_confirmation: false
";

const BIRD: &str = "
match:
  - when: inputs.say == 'learn'
    steps: [{text: 'The pelicans of Neptune are blue. api_key=k-123 <private>Their nest is under the bridge.</private>'}]
  - when: inputs.say == 'ask'
    steps:
      - tool_calls: [{tool: recall, arguments: {query: '{{ inputs.query }}', top_k: 3}}]
      - text: done
  - when: 'true'
    steps: [{text: done}]
";

fn setup() -> Setup {
    Setup::new()
        .agent(
            "bird",
            &format!("{MODEL}tools: [file_ops, recall]\nmemory: {{recall: {{top_k: 3}}}}\n"),
        )
        .agent("fish", &format!("{MODEL}tools: [file_ops, recall]\nmemory: {{}}\n"))
        .agent("stone", &format!("{MODEL}tools: ['*']\n"))
        .scenario("bird", BIRD)
}

async fn messages(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/messages?limit=200", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn system(service: &Service, run: &Value) -> String {
    messages(service, run).await[0]["content"].as_str().unwrap().to_owned()
}

fn say(text: &str) -> Value {
    json!({"inputs": {"say": text}})
}

/// What the tool answered.
async fn asked(service: &Service, agent: &str, query: &str) -> String {
    let run = service.run(agent, &json!({"inputs": {"say": "ask", "query": query}})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let messages = messages(service, &run).await;
    let result = messages.iter().find(|message| message["role"] == "tool").unwrap();
    assert_eq!(result["name"], "recall");
    result["content"].as_str().unwrap().to_owned()
}

async fn a_later_run_recalls_what_fits_its_inputs(db: Db) {
    let service = setup().start(db).await;
    let first = service.run("bird", &say("learn")).await;
    assert!(!system(&service, &first).await.contains("## Memory"));
    let later =
        system(&service, &service.run("bird", &say("What colour has a pelican?")).await).await;
    let memory = later.split("## Memory").nth(1).unwrap();
    assert!(memory.contains("model_response] The pelicans of Neptune are blue."), "{memory}");
    let other = system(&service, &service.run("bird", &say("Tell me of elephants")).await).await;
    assert!(!other.contains("## Memory"), "{other}");
    let fish = service.run("fish", &say("learn")).await;
    assert_eq!(fish["status"], "completed");
    let fish = system(&service, &service.run("fish", &say("pelicans?")).await).await;
    assert!(!fish.contains("## Memory"), "it keeps, and recalls only when its model asks: {fish}");
    // A run from the queue recalls as well.
    let request = service.request(reqwest::Method::POST, "/v1/agents/bird/invoke-iterative");
    let queued =
        request.header("prefer", "respond-async").json(&say("pelicans?")).send().await.unwrap();
    let queued: Value = queued.json().await.unwrap();
    let path = format!("/v1/runs/{}", queued["run_id"].as_str().unwrap());
    let queued = service.until(&path, |run| run["status"] == "completed").await;
    assert!(system(&service, &queued).await.contains("Neptune"));
}

async fn a_model_recalls_by_itself(db: Db) {
    let service = setup().start(db).await;
    assert_eq!(asked(&service, "fish", "pelicans").await, "Nothing that fits is remembered.");
    service.run("fish", &say("learn")).await;
    let found = asked(&service, "fish", "\"pelicans\" OR ('").await;
    assert!(found.contains("model_response] The pelicans of Neptune are blue."), "{found}");
    let again = asked(&service, "fish", "pelicans").await;
    assert!(
        !again.contains("tool_call] recall"),
        "what was recalled is not remembered once more: {again}"
    );
    let tools = service.get("/v1/tools/recall").await.body;
    assert_eq!((&tools["effect"], &tools["source"]), (&json!("read"), &json!("builtin")));
    let stone = service.get("/v1/agents/stone").await;
    assert_eq!(stone.status, 200, "a glob may mean tools that an agent cannot have");
    assert_eq!(asked(&service, "stone", "pelicans").await, "Error: Unknown tool recall");
}

async fn what_is_private_is_never_kept(db: Db) {
    let service = setup().start(db).await;
    service.run("bird", &say("learn")).await;
    let later = system(
        &service,
        &service.run("bird", &say("pelicans and the nest under the bridge")).await,
    )
    .await;
    assert!(later.contains("## Memory") && !later.contains("bridge"), "{later}");
    assert!(later.contains("api_key=[redacted]") && !later.contains("k-123"), "{later}");
    let private = json!({"inputs": {"say": "learn"}, "private": true});
    service.run("fish", &private).await;
    let answer = service.post("/v1/agents/fish/invoke", &private).await;
    assert_eq!(answer.status, 200, "{:#}", answer.body);
    assert_eq!(asked(&service, "fish", "pelicans").await, "Nothing that fits is remembered.");
}

async fn nobody_recalls_what_is_anothers(db: Db) {
    let mut service = setup().start(db).await;
    service.run("bird", &say("learn")).await;
    assert_eq!(
        asked(&service, "fish", "pelicans").await,
        "Nothing that fits is remembered.",
        "another agent"
    );
    let scopes = json!(["agents:invoke", "runs:read", "tools:execute"]);
    let key =
        service.post("/v1/keys", &json!({"name": "k", "tenant": "acme", "scopes": scopes})).await;
    service.key = key.body["key"].as_str().unwrap().to_owned();
    assert_eq!(
        asked(&service, "bird", "pelicans").await,
        "Nothing that fits is remembered.",
        "another tenant"
    );
    let theirs = system(&service, &service.run("bird", &say("pelicans?")).await).await;
    assert!(!theirs.contains("Neptune"), "{theirs}");
    ADMIN_KEY.clone_into(&mut service.key);
    assert!(asked(&service, "bird", "pelicans").await.contains("Neptune"));
}

async fn what_was_deleted_is_forgotten(db: Db) {
    let service = setup().start(db).await;
    service.run("fish", &json!({"inputs": {"say": "learn"}, "session_id": "s"})).await;
    assert_eq!(service.delete("/v1/sessions/s").await.status, 204);
    assert_eq!(asked(&service, "fish", "pelicans").await, "Nothing that fits is remembered.");
}

async fn a_tool_without_a_memory_is_a_mistake(db: Db) {
    let service = setup().agent("sieve", &format!("{MODEL}tools: [recall]\n")).start(db).await;
    let ready = service.get("/readyz").await.body;
    let error = ready["definitions"][0]["error"].as_str().unwrap();
    assert!(error.contains("tools[0]") && error.contains("needs a memory"), "{ready:#}");
    assert_eq!(service.get("/v1/agents/sieve").await.status, 404);
}
