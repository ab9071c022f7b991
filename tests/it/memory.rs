//! What agents with a memory keep of their runs, and recall in later ones.

use serde_json::{Value, json};

use crate::service::{ADMIN_KEY, Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_later_run_recalls_memories_that_fit_its_inputs,
    a_model_recalls_by_itself,
    private_texts_are_never_kept,
    memories_of_other_agents_and_tenants_are_not_recalled,
    memories_of_a_deleted_session_are_forgotten,
    a_tool_without_a_memory_is_a_mistake,
    inputs_and_answer_are_kept_once,
    memory_is_listed_and_forgotten,
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

async fn a_later_run_recalls_memories_that_fit_its_inputs(db: Db) {
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

async fn private_texts_are_never_kept(db: Db) {
    let service = setup().start(db).await;
    service.run("bird", &say("learn")).await;
    let later = system(
        &service,
        &service.run("bird", &say("pelicans and the nest under the bridge")).await,
    )
    .await;
    assert!(later.contains("## Memory") && !later.contains("bridge"), "{later}");
    assert!(later.contains("api_key=[redacted]") && !later.contains("k-123"), "{later}");
    let nested = "gull <private>a <private class='x'>sec4</private\n>sec5</private > <private>sec6";
    service.run("bird", &say(nested)).await;
    let kept = service.get("/v1/memory?agent=bird&q=gull").await.body.to_string();
    assert!(kept.contains("gull") && !kept.contains("sec"), "{kept}");
    let private = json!({"inputs": {"say": "learn"}, "private": true});
    service.run("fish", &private).await;
    let answer = service.post("/v1/agents/fish/invoke", &private).await;
    assert_eq!(answer.status, 200, "{:#}", answer.body);
    assert_eq!(asked(&service, "fish", "pelicans").await, "Nothing that fits is remembered.");
}

async fn memories_of_other_agents_and_tenants_are_not_recalled(db: Db) {
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

async fn memories_of_a_deleted_session_are_forgotten(db: Db) {
    let service = setup().start(db).await;
    service.run("fish", &json!({"inputs": {"say": "learn"}, "session_id": "s"})).await;
    assert_eq!(memory(&service, "?agent=fish&q=pelicans").await.len(), 1, "it was kept");
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

async fn memory(service: &Service, query: &str) -> Vec<Value> {
    let answer = service.get(&format!("/v1/memory{query}")).await;
    assert_eq!(answer.status, 200, "{:#}", answer.body);
    answer.body["data"].as_array().unwrap().clone()
}

/// Kind and content, oldest first.
fn kept(memory: &[Value]) -> Vec<(&str, &str)> {
    memory
        .iter()
        .rev()
        .map(|row| (row["kind"].as_str().unwrap(), row["content"].as_str().unwrap()))
        .collect()
}

async fn inputs_and_answer_are_kept_once(db: Db) {
    let service = setup()
        .agent("host", "model: scripted/host\ntools: [file_ops]\nmemory: {recall: {top_k: 3}}\n")
        .scenario("host", "steps: [{text: Hello Ines}, {text: Hello Ines}]")
        .agent(
            "clerk",
            "model: scripted/clerk\nmemory: {}\noutput: {schema: {type: object, properties: {n: {type: integer}}}}\n",
        )
        .scenario("clerk", "steps: [{tool_calls: [{tool: output, arguments: {n: 7}}]}]")
        .start(db)
        .await;
    let name = json!({"inputs": {"say": "My name is Ines, <private>of Rome</private>"}});
    let run = service.run("host", &name).await;
    assert_eq!(run["iterations"], 2, "its answer was confirmed: {run:#}");
    let of_host = memory(&service, "?agent=host").await;
    assert_eq!(
        kept(&of_host),
        [("input", r#"{"say":"My name is Ines, "}"#), ("model_response", "Hello Ines")]
    );
    let later = service.run("host", &say("Who is Ines?")).await;
    assert!(system(&service, &later).await.contains("input] {\"say\":\"My name is Ines"));
    // An output with a schema is remembered as well, and a run that was queued.
    let queued = service.enqueue("clerk").await;
    service.until(&queued, |run| run["status"] == "completed").await;
    let of_clerk = memory(&service, "?agent=clerk").await;
    assert_eq!(kept(&of_clerk), [("input", "{}"), ("model_response", r#"{"n":7}"#)]);
}

async fn memory_is_listed_and_forgotten(db: Db) {
    let mut service = setup().start(db).await;
    for session in ["s", "t"] {
        service.run("bird", &json!({"inputs": {"say": "learn"}, "session_id": session})).await;
    }
    let run = service.run("fish", &say("learn")).await;
    assert_eq!(memory(&service, "").await.len(), 6);
    assert_eq!(memory(&service, "?agent=bird").await.len(), 4);
    assert_eq!(memory(&service, "?session_id=s").await.len(), 2);
    assert_eq!(memory(&service, "?q=pelican%20neptune").await.len(), 3, "all words, in any form");
    assert_eq!(memory(&service, "?agent=fish&q=PELICANS").await.len(), 1);
    assert!(memory(&service, "?q=pelican%20tiger").await.is_empty());
    assert!(memory(&service, "?q=%27%29%20OR%20the").await.is_empty());
    assert_eq!(memory(&service, "?q=").await.len(), 6, "no words");
    let newest = &memory(&service, "?limit=1").await[0];
    assert_eq!(
        (&newest["run_id"], &newest["agent"], &newest["session_id"], &newest["kind"]),
        (&run["run_id"], &json!("fish"), &Value::Null, &json!("model_response"))
    );
    assert!(newest["at"].is_string() && newest["content"].as_str().unwrap().contains("Neptune"));
    // Pages neither repeat nor leave out.
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = service.get(&format!("/v1/memory?limit=1{cursor}")).await.body;
        seen.extend(page["data"].as_array().unwrap().iter().map(|row| row["id"].clone()));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen.len(), 6);
    seen.dedup();
    assert_eq!(seen.len(), 6);

    // Another tenant sees and forgets nothing of it; other scopes do not suffice.
    let id = newest["id"].as_str().unwrap().to_owned();
    let one = format!("/v1/memory/{id}");
    let scopes = json!(["memory:read", "memory:write"]);
    let key =
        service.post("/v1/keys", &json!({"name": "k", "tenant": "acme", "scopes": scopes})).await;
    service.key = key.body["key"].as_str().unwrap().to_owned();
    assert!(memory(&service, "").await.is_empty());
    assert_eq!(service.delete(&one).await.status, 404);
    assert_eq!(service.delete("/v1/memory?agent=bird").await.body, json!({"deleted": 0}));
    ADMIN_KEY.clone_into(&mut service.key);
    assert_eq!(memory(&service, "").await.len(), 6);

    let forgotten = service.delete(&one).await;
    assert_eq!((forgotten.status.as_u16(), forgotten.body), (200, json!({"deleted": 1})));
    let gone = service.delete(&one).await;
    assert_eq!(
        (gone.status.as_u16(), &gone.body["detail"]),
        (404, &json!("There is no such observation."))
    );
    assert_eq!(service.delete("/v1/memory/no-id").await.status, 404);
    assert_eq!(asked(&service, "fish", "neptune").await, "Nothing that fits is remembered.");
    assert_eq!(service.delete("/v1/memory").await.status, 400, "whose memory?");
    let of_session = service.delete("/v1/memory?agent=bird&session_id=s").await.body;
    assert_eq!(of_session, json!({"deleted": 2}));
    assert_eq!(service.delete("/v1/memory?agent=bird").await.body, json!({"deleted": 2}));
    assert!(memory(&service, "?agent=bird").await.is_empty());
    service.run("bird", &say("from Zürich")).await;
    assert_eq!(memory(&service, "?q=z%C3%BCrich").await.len(), 1);
    assert!(memory(&service, "?q=zurich").await.is_empty(), "another word, in both stores");
    let records = service.get("/v1/audit?action=memory.deleted").await.body;
    let deleted: Vec<_> =
        records["data"].as_array().unwrap().iter().map(|row| &row["arguments"]).collect();
    assert_eq!(deleted.len(), 3, "{deleted:#?}");
    assert_eq!((&deleted[0]["agent"], &deleted[0]["deleted"]), (&json!("bird"), &json!(2)));
}
