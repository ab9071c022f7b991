//! `dry_run`: the answer is what a run would be, and there is none.

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, command, on_both_stores};

on_both_stores! {
    a_dry_run_shows_the_run_and_starts_none,
    a_dry_run_is_refused_like_a_run,
    a_dry_run_keeps_to_the_sessions_that_a_run_would_keep_to,
    a_dry_run_shows_the_decisions_that_are_asked_for,
}

const AGENT: &str = "
version: 2.1.0
model: scripted/worker
fallback_models: [scripted/other]
instructions: 'You work on {{ inputs.task }}.'
inputs: {type: object, required: [task], properties: {task: {type: string}}}
output: {schema: {type: object}, reflection: {template: look}}
tools: [file_ops]
skills: [style, later]
active_skills: [style]
limits: {max_iterations: 9}
governance: {autonomy: read-only, budget: {max_tool_calls: 7}}
";

fn setup() -> Setup {
    Setup::new()
        .agent("worker", AGENT)
        .scenario("worker", "steps: [{text: never}]")
        .skill("style", "", "Be brief.")
        .skill("later", "", "Be late.")
}

async fn invoke(service: &Service, route: &str, body: Value) -> (u16, Value) {
    let answer = service.post(&format!("/v1/agents/worker/{route}"), &body).await;
    assert!(
        !answer.headers.contains_key("x-run-id") || answer.body["run_id"].is_string(),
        "{answer:?}"
    );
    (answer.status.as_u16(), answer.body)
}

async fn a_dry_run_shows_the_run_and_starts_none(db: Db) {
    let service = setup().start(db).await;
    let body = json!({"inputs": {"task": "this"}, "dry_run": true, "max_iterations": 3, "on_limit": "answer",
        "budget": {"max_tool_calls": 2}});
    let (status, dry) = invoke(&service, "invoke-iterative", body).await;
    assert_eq!((status, &dry["dry_run"], dry.get("run_id")), (200, &json!(true), None), "{dry:#}");
    assert_eq!((&dry["agent"], &dry["agent_version"]), (&json!("worker"), &json!("2.1.0")));
    assert_eq!(dry["models"], json!(["scripted/worker", "scripted/other"]));
    let system = dry["messages"][0]["content"].as_str().unwrap();
    assert!(
        system.contains("You work on this.")
            && system.contains("Be brief.")
            && system.contains("- later: "),
        "{system}"
    );
    assert_eq!(dry["messages"][1], json!({"role": "user", "content": "{\"task\":\"this\"}"}));
    let tools: Vec<_> =
        dry["tools"].as_array().unwrap().iter().map(|tool| tool["name"].clone()).collect();
    assert_eq!(tools, ["file_ops", "use_skill", "output", "submit"]);
    assert_eq!(dry["tools"][0]["input_schema"]["type"], "object");
    assert_eq!(
        (&dry["limits"]["max_iterations"], &dry["budget"]["max_tool_calls"]),
        (&json!(3), &json!(2))
    );
    let policy = &dry["policy"];
    assert_eq!(
        (&policy["on_limit"], &policy["governance"]["autonomy"]),
        (&json!("answer"), &json!("read-only"))
    );
    assert_eq!(policy["governance"]["budget"]["max_tool_calls"], 2);
    assert_eq!(dry["active_skills"], json!(["style"]));

    let (status, single) =
        invoke(&service, "invoke", json!({"inputs": {"task": "this"}, "dry_run": true})).await;
    assert_eq!(
        (status, &single["policy"]["single_shot"], &single["tools"]),
        (200, &json!(true), &json!([]))
    );
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]), "nothing is stored");
}

async fn a_dry_run_is_refused_like_a_run(db: Db) {
    let service = setup().agent("plain", "model: scripted/worker").start(db).await;
    for body in [
        json!({}),
        json!({"inputs": {"task": 1}}),
        json!({"inputs": {"task": "x"}, "max_iterations": 0}),
        json!({"inputs": {"task": "x"}, "tool_choice": "none"}),
        json!({"inputs": {"task": "x"}, "budget": {"max_cost_usd": 1}}),
        json!({"inputs": {"task": "x"}, "active_skills": ["other"]}),
    ] {
        let (status, mut refused) = invoke(&service, "invoke-iterative", body.clone()).await;
        let mut dry = body.clone();
        dry["dry_run"] = true.into();
        let (same_status, mut same) = invoke(&service, "invoke-iterative", dry).await;
        for answer in [&mut refused, &mut same] {
            answer.as_object_mut().unwrap().remove("request_id");
        }
        assert_eq!((status, &refused), (same_status, &same), "{body}");
        assert_eq!(status, 422, "{body}");
    }
    // Without tools it would be a single model call, of which this would be as wrong.
    for choice in [json!("required"), json!({"tool": "none_such"})] {
        let plain = service.post("/v1/agents/plain/dry-run", &json!({"tool_choice": choice})).await;
        let pointer = &plain.body["errors"][0]["pointer"];
        assert_eq!((plain.status.as_u16(), pointer), (422, &json!("/tool_choice")), "{choice}");
    }
    let real = json!({"inputs": {"task": "x"}, "dry_run": false, "max_attempts": 1});
    let (status, run) = invoke(&service, "invoke-iterative", real).await;
    assert_eq!((status, run["run_id"].is_string()), (200, true), "{run:#}");
    let taken = json!({"inputs": {"task": "x"}, "dry_run": true, "run_id": run["run_id"]});
    let (status, refused) = invoke(&service, "invoke-iterative", taken).await;
    assert_eq!((status, &refused["code"]), (409, &json!("RUN_ID_TAKEN")), "{refused:#}");
}

#[tokio::test]
async fn the_command_line_rehearses_too() {
    let dir = setup().write_directory();
    let args = ["invoke", "worker", "--input", "task=this", "--dry-run"];
    let done = command(dir.path()).args(args).output().await.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let dry: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(dry["dry_run"], true, "{dry:#}");
    assert!(dry["messages"][0]["content"].as_str().unwrap().contains("You work on this."));
}

async fn a_dry_run_keeps_to_the_sessions_that_a_run_would_keep_to(db: Db) {
    let other = "model: scripted/worker\nenable_double_confirmation: false";
    let service = setup().agent("other", other).start(db).await;
    let begun =
        service.post("/v1/agents/other/invoke-iterative", &json!({"session_id": "s"})).await;
    assert_eq!(begun.status, 200);
    let (status, refused) = invoke(
        &service,
        "invoke-iterative",
        json!({"inputs": {"task": "x"}, "session_id": "s", "dry_run": true}),
    )
    .await;
    assert_eq!((status, &refused["code"]), (409, &json!("SESSION_OF_OTHER_AGENT")), "{refused:#}");
    assert!(!refused.to_string().contains("never"), "nothing of what was said is told");
    let own = service
        .post("/v1/agents/other/invoke-iterative", &json!({"session_id": "s", "dry_run": true}))
        .await;
    assert_eq!(
        own.body["messages"].as_array().unwrap().len(),
        4,
        "history, and the next message: {:#}",
        own.body
    );
}

async fn a_dry_run_shows_the_decisions_that_are_asked_for(db: Db) {
    let decider =
        "model: scripted/worker\ndriver: react\ntools: [file_ops]\ntool_choice: first_required\n";
    let reflected =
        format!("{decider}output: {{schema: {{type: object}}, reflection: {{template: look}}}}\n");
    let service = setup().agent("decider", decider).agent("reflected", &reflected).start(db).await;
    let messages = async |agent: &str| {
        let path = format!("/v1/agents/{agent}/invoke-iterative");
        let dry = service.post(&path, &json!({"dry_run": true})).await.body;
        assert_eq!(dry["tools"][0]["name"], "file_ops", "{dry:#}");
        dry["messages"].clone()
    };
    let told = messages("decider").await;
    let system = told[0]["content"].as_str().unwrap();
    for part in ["- file_ops: ", "\"type\": \"call_tool\"", "\"type\": \"final_answer\""] {
        assert!(system.contains(part), "{part} in {system}");
    }
    assert_eq!(told[1]["content"], "{}\n\nYour next decision must be a `call_tool`.");

    let told = messages("reflected").await;
    let system = told[0]["content"].as_str().unwrap();
    for part in ["- output: ", "- submit: ", "`output`", "`submit`"] {
        assert!(system.contains(part), "{part} in {system}");
    }
    assert!(!system.contains("final_answer"), "no such decision gives a result: {system}");
}
