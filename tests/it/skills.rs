//! Skills: what the model is told of them, how it activates one, and what an active one takes away.

use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, command, on_both_stores};

on_both_stores! {
    a_skill_is_read_when_it_is_needed_and_narrows_from_then_on,
    skills_are_active_from_the_start_by_definition_and_request,
    an_activated_skill_holds_after_a_crash,
    tools_that_skills_take_away_are_neither_offered_nor_executed,
    a_decision_for_a_tool_that_a_skill_took_away_is_blocked,
}

const AGENT: &str = "
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}}
";

fn agent(model: &str, more: &str) -> String {
    format!("model: scripted/{model}\n{more}{AGENT}")
}

fn call(tool: &str, arguments: &str) -> String {
    format!("{{tool_calls: [{{tool: {tool}, arguments: {arguments}}}]}}")
}

const LIST: &str = "{operation: list}";
const WRITE: &str = "{operation: write, path: new.txt, content: x}";

async fn part(service: &Service, run: &Value, part: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/{part}?limit=200", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn system_prompt(service: &Service, run: &Value) -> String {
    part(service, run, "messages").await[0]["content"].as_str().unwrap().to_owned()
}

async fn a_skill_is_read_when_it_is_needed_and_narrows_from_then_on(db: Db) {
    let steps = [
        call("file_ops", WRITE),
        call("use_skill", "{name: careful}"),
        call("file_ops", WRITE),
        call("use_skill", "{name: careful}"),
        call("file_ops", LIST),
        call("use_skill", "{name: unknown}"),
        "{text: done}".to_owned(),
    ];
    let service = Setup::new()
        .agent("worker", &agent("worker", "skills: [careful, house-style]"))
        .scenario("worker", &format!("steps: [{}]", steps.join(", ")))
        .skill(
            "careful",
            "autonomy: read-only\nallowed_tools: ['file_*']\n",
            "Never write anything.",
        )
        .skill("house-style", "", "Be brief.")
        .agent("hasty", &agent("hasty", "skills: [blind]\nparallel_tool_calls: true"))
        .scenario(
            "hasty",
            &format!(
                "steps: [{{tool_calls: [{{tool: file_ops, arguments: {LIST}}}, {{tool: use_skill, \
                 arguments: {{name: blind}}}}, {{tool: file_ops, arguments: {LIST}}}]}}, {{text: done}}]"
            ),
        )
        .skill("blind", "disallowed_tools: [file_ops]\n", "Look at nothing.")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let system = system_prompt(&service, &run).await;
    assert!(
        system.contains("- careful: When to use careful.") && system.contains("- house-style: "),
        "{system}"
    );
    assert!(!system.contains("Never write"), "{system}");

    let events = part(&service, &run, "events").await;
    let results: Vec<&Value> = events
        .iter()
        .filter(|e| {
            ["tool_call.completed", "tool_call.blocked"].contains(&e["type"].as_str().unwrap())
        })
        .map(|e| &e["data"])
        .collect();
    assert_eq!(results[1]["content"], "Never write anything.");
    assert_eq!(
        (&results[2]["rule"], &results[2]["decision"]),
        (&json!("skill"), &json!("blocked")),
        "{results:#?}"
    );
    assert_eq!(results[4]["failure"], Value::Null);
    assert!(
        results[5]["content"].as_str().unwrap().contains("house-style"),
        "it is told which there are: {results:#?}"
    );
    let activated: Vec<_> = events.iter().filter(|e| e["type"] == "skill.activated").collect();
    assert_eq!(activated.len(), 1, "once, however often it is asked for");
    assert_eq!(activated[0]["data"]["skill"], "careful");
    let before = events
        .iter()
        .find(|e| e["seq"].as_i64() == activated[0]["seq"].as_i64().map(|seq| seq - 1))
        .unwrap();
    assert_eq!(
        (&before["type"], &before["data"]["tool"]),
        (&json!("tool_call.completed"), &json!("use_skill"))
    );

    // It holds for the calls behind it, also where they could be made at the same time.
    let run = service.run("hasty", &json!({})).await;
    let made = part(&service, &run, "tool-calls").await;
    let decisions: Vec<&Value> = made.iter().map(|call| &call["decision"]).collect();
    assert_eq!(decisions, ["allowed", "allowed", "blocked"], "{made:#?}");
}

async fn skills_are_active_from_the_start_by_definition_and_request(db: Db) {
    let service = Setup::new()
        .agent(
            "worker",
            &agent("worker", "skills: [careful, house-style]\nactive_skills: [house-style]"),
        )
        .scenario("worker", &format!("steps: [{}, {{text: done}}]", call("file_ops", LIST)))
        .skill("careful", "disallowed_tools: [file_ops]\n", "Touch no file.")
        .skill("house-style", "", "Be brief.")
        .agent("filer", &agent("worker", "skills: [files]"))
        .skill("files", "allowed_tools: [file_ops]\n", "Only files.")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let system = system_prompt(&service, &run).await;
    assert!(system.contains("## Skill: house-style\nBe brief."), "{system}");
    assert!(system.contains("- careful: ") && !system.contains("- house-style: "), "{system}");
    assert_eq!(run["tools_used"], json!(["file_ops"]));

    let narrowed = service.run("worker", &json!({"active_skills": ["careful"]})).await;
    let system = system_prompt(&service, &narrowed).await;
    assert!(
        system.contains("Touch no file.")
            && system.contains("Be brief.")
            && !system.contains("use_skill"),
        "{system}"
    );
    let single =
        service.post("/v1/agents/worker/invoke", &json!({"active_skills": ["careful"]})).await;
    assert_eq!(single.status, 200, "{single:?}");
    assert!(system_prompt(&service, &single.body).await.contains("Touch no file."));

    for route in ["invoke", "invoke-iterative"] {
        let foreign = service
            .post(
                &format!("/v1/agents/worker/{route}"),
                &json!({"active_skills": ["careful", "other"]}),
            )
            .await;
        assert_eq!(
            (foreign.status.as_u16(), &foreign.body["code"]),
            (422, &json!("INVALID_OVERRIDE")),
            "{foreign:?}"
        );
        assert_eq!(foreign.body["errors"][0]["pointer"], "/active_skills/1");
    }
    let ask = json!({"name": "ask", "input_schema": {"type": "object"}});
    for (agent, skills, tools) in [
        ("worker", json!([]), vec!["file_ops", "use_skill", "ask"]),
        ("worker", json!(["careful"]), vec!["ask"]),
        ("filer", json!(["files"]), vec!["file_ops"]),
    ] {
        let body = json!({"active_skills": skills, "client_tools": [ask], "dry_run": true});
        let dry = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &body).await.body;
        let offered: Vec<&str> = dry["tools"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["name"].as_str().unwrap())
            .collect();
        assert_eq!(offered, tools, "{skills}");
    }
    let detail =
        service.get(&format!("/v1/runs/{}", narrowed["run_id"].as_str().unwrap())).await.body;
    assert_eq!(detail["overrides"]["active_skills"], json!(["careful"]));
}

async fn an_activated_skill_holds_after_a_crash(db: Db) {
    let scenario = |delay: u32| {
        let steps = [
            call("use_skill", "{name: careful}"),
            format!("{{tool_calls: [{{tool: file_ops, arguments: {LIST}}}], delay_ms: {delay}}}"),
            call("file_ops", WRITE),
            "{text: done}".to_owned(),
        ];
        format!("steps: [{}]", steps.join(", "))
    };
    let mut service = Setup::new()
        .agent("worker", &agent("worker", "skills: [careful]"))
        .scenario("worker", &scenario(600_000))
        .skill("careful", "autonomy: read-only\n", "Never write anything.")
        .start(db)
        .await;
    let start = service.request(reqwest::Method::POST, "/v1/agents/worker/invoke-iterative");
    let accepted =
        crate::service::answer(start.header("Prefer", "respond-async").json(&json!({}))).await;
    let path = format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap());
    let is_active = |page: &Value| {
        page["data"].as_array().unwrap().iter().any(|e| e["type"] == "skill.activated")
    };
    service.until(&format!("{path}/events"), is_active).await;
    service.kill().await;
    service.write("scenarios/worker.yaml", &scenario(0));
    service.restart().await;
    let run = service.until(&path, |run| run["status"] == "completed").await;
    let blocked = part(&service, &run, "events").await;
    let blocked: Vec<_> = blocked.iter().filter(|e| e["type"] == "tool_call.blocked").collect();
    assert_eq!((blocked.len(), &blocked[0]["data"]["rule"]), (1, &json!("skill")), "{blocked:#?}");
}

const LOOKING: &str = "
model: mock/m
tools: [file_ops, 'http:fx/look']
skills: [without, spare]
enable_double_confirmation: false
governance: {autonomy: full, network: {allow: ['127.0.0.1']}}
";

const TOOLS: &str = "
base_url: http://127.0.0.1:1
tools: [{name: look, description: Looks., method: POST, path: /look, effect: read, input_schema: {type: object}}]
";

async fn looking(db: Db, agent: &str) -> (Service, MockModel) {
    let mock = MockModel::start().await;
    let models = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"PATH\"\nmax_retries = 0",
        mock.base_url()
    );
    let service = Setup::new()
        .agent("worker", agent)
        .tools("fx", TOOLS)
        .skill("without", "disallowed_tools: ['http:*', ask]\n", "Look at nothing.")
        .skill("spare", "", "Nothing.")
        .config(&models)
        .start(db)
        .await;
    (service, mock)
}

/// The names of the tools that each request offers.
fn offered(mock: &MockModel) -> Vec<Vec<String>> {
    assert_eq!(mock.refusals(), Vec::<String>::new());
    let names = |tool: &Value| tool["function"]["name"].as_str().unwrap().to_owned();
    let of = |body: &Value| body["tools"].as_array().unwrap().iter().map(names).collect();
    mock.requests().iter().map(|request| of(&request.body)).collect()
}

/// The calls of a tool were blocked by the rule of skills, and that is on record.
async fn assert_blocked(service: &Service, run: &Value, tool: &str, times: usize) {
    assert_eq!(run["status"], "completed", "{run:#}");
    let calls = part(service, run, "tool-calls").await;
    let calls: Vec<_> = calls.iter().filter(|call| call["tool"] == tool).collect();
    assert_eq!(calls.len(), times, "{calls:#?}");
    for call in calls {
        assert_eq!((&call["state"], &call["decision"]), (&json!("denied"), &json!("blocked")));
        let reason = call["reason"].as_str().unwrap();
        assert!(reason.contains("the skill without does not allow"), "{reason}");
    }
    let path = format!("/v1/audit?run_id={}&tool={tool}", run["run_id"].as_str().unwrap());
    let records = service.get(&path).await.body["data"].as_array().unwrap().clone();
    let blocked = |record: &&Value| record["rule"] == "skill" && record["decision"] == "blocked";
    assert_eq!(records.iter().filter(blocked).count(), times, "{records:#?}");
}

async fn tools_that_skills_take_away_are_neither_offered_nor_executed(db: Db) {
    let (service, mock) = looking(db, LOOKING).await;
    let look = || Reply::call("http__fx__look", &json!({}));
    let all = ["file_ops", "http__fx__look", "use_skill"];
    let left = ["file_ops", "use_skill"];
    let ask = json!({"name": "ask", "input_schema": {"type": "object"}});

    mock.script([look(), Reply::call("ask", &json!({})), Reply::text("done")]);
    let from_the_start = json!({"active_skills": ["without"], "client_tools": [ask]});
    let run = service.run("worker", &from_the_start).await;
    assert_blocked(&service, &run, "http:fx/look", 1).await;
    assert_blocked(&service, &run, "ask", 1).await;
    assert_eq!(offered(&mock), vec![left.to_vec(); 3]);

    let before = mock.requests().len();
    let read = Reply::call("use_skill", &json!({"name": "without"}));
    mock.script([read, look(), look(), Reply::text("done")]);
    let run = service.run("worker", &json!({})).await;
    assert_blocked(&service, &run, "http:fx/look", 2).await;
    let asked = &offered(&mock)[before..];
    assert_eq!(asked[0], all);
    assert_eq!(asked[1..], vec![left.to_vec(); 3], "the same from then on");

    let body = json!({"definition": format!("name: worker{LOOKING}")});
    let replayed = service.post("/v1/agents/worker/policy/replay", &body).await;
    assert_eq!(replayed.status, 200, "{replayed:?}");
    assert!(replayed.body["calls"].as_u64().unwrap() > 0, "{replayed:?}");
    assert_eq!(replayed.body["newly"]["allowed"], 0, "{replayed:?}");
}

async fn a_decision_for_a_tool_that_a_skill_took_away_is_blocked(db: Db) {
    let (service, mock) = looking(db, &format!("{LOOKING}driver: react\n")).await;
    let decides = |tool: &str, args: Value| {
        let decision = json!({"thought": "t", "type": "call_tool", "tool": tool, "args": args});
        Reply::text(&decision.to_string())
    };
    let done = || Reply::text(r#"{"type": "final_answer", "answer": "done"}"#);
    let look = || decides("http:fx/look", json!({}));
    mock.script([look(), done()]);
    let run = service.run("worker", &json!({"active_skills": ["without"]})).await;
    assert_blocked(&service, &run, "http:fx/look", 1).await;
    mock.script([decides("use_skill", json!({"name": "without"})), look(), done()]);
    let run = service.run("worker", &json!({})).await;
    assert_blocked(&service, &run, "http:fx/look", 1).await;
    let told: Vec<bool> = mock
        .requests()
        .iter()
        .map(|request| {
            request.messages()[0]["content"].as_str().unwrap().contains("- http:fx/look:")
        })
        .collect();
    assert_eq!(told, [false, false, true, false, false]);
}

#[tokio::test]
async fn skills_are_read_again_without_a_restart() {
    let setup = Setup::new()
        .agent("worker", &agent("worker", "skills: [style]\nactive_skills: [style]"))
        .agent("waiting", &agent("worker", "skills: [later]"))
        .scenario("worker", "steps: [{text: done}]")
        .skill("style", "", "Be brief.");
    let dir = setup.write_directory();
    let check = command(dir.path()).arg("check").output().await.unwrap();
    assert!(
        String::from_utf8_lossy(&check.stderr)
            .contains("skills[0]: there is no skill named \"later\"")
            || String::from_utf8_lossy(&check.stdout)
                .contains("skills[0]: there is no skill named \"later\"")
    );
    let service = setup.start(Db::Sqlite).await;
    let unknown = service.get("/readyz").await.body;
    assert_eq!(unknown["definitions"][0]["file"], "waiting.yaml", "{unknown:#}");

    std::fs::create_dir(service.dir.path().join("skills/later")).unwrap();
    service.write("skills/later/SKILL.md", "---\nname: later\ndescription: d\n---\nLate.\n");
    service
        .write("skills/style/SKILL.md", "---\nname: style\ndescription: d\n---\nBe very brief.\n");
    service.until("/readyz", |ready| ready["definitions"] == json!([])).await;
    // The two files may be seen one after the other.
    for tried in 1.. {
        let run = service.run("worker", &json!({})).await;
        if system_prompt(&service, &run).await.contains("Be very brief.") {
            break;
        }
        assert!(tried < 600, "the skill was not read again: {}", service.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(service.run("waiting", &json!({})).await["status"], "completed");

    service.write("skills/style/SKILL.md", "---\nname: style\ncolour: red\n---\nBroken.\n");
    let ready = service
        .until("/readyz", |ready| ready["definitions"][0]["file"] == "skills/style/SKILL.md")
        .await;
    assert!(ready["definitions"][0]["error"].as_str().unwrap().contains("line 3"), "{ready:#}");
    let run = service.run("worker", &json!({})).await;
    assert!(
        system_prompt(&service, &run).await.contains("Be very brief."),
        "the last good version stays"
    );

    std::fs::remove_dir_all(service.dir.path().join("skills/later")).unwrap();
    service.until("/readyz", |ready| ready.to_string().contains("there is no skill named")).await;
    let gone = service
        .post("/v1/agents/waiting/invoke-iterative", &json!({"active_skills": ["later"]}))
        .await;
    assert_eq!(
        (gone.status.as_u16(), &gone.body["code"]),
        (422, &json!("INVALID_OVERRIDE")),
        "{:#}",
        gone.body
    );
    assert_eq!(
        service.run("waiting", &json!({})).await["status"],
        "completed",
        "the last good version goes on"
    );
}
