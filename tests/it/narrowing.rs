//! Limits of a run also apply to the runs that it starts: files and lines are counted for all of them
//! together, denied paths are the same files everywhere, and skills and requests take tools away
//! from all.

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    files_and_lines_are_counted_in_the_tree,
    a_denied_path_is_the_same_file_in_every_workspace,
    an_active_skill_holds_for_children,
    the_tools_of_a_request_hold_for_children,
    overrides_beyond_the_agents_limits_are_warned_of,
    stop_conditions_see_the_tree,
    an_answer_shows_the_usage_of_the_tree,
    agents_that_can_only_read_work_at_the_same_time,
    the_autonomy_of_a_parent_that_observes_is_observed_in_children,
}

const CHILD: &str = "
model: scripted/child
tools: [file_ops]
enable_double_confirmation: false
limits: {error_threshold: 1000, max_tool_calls_per_iteration: 128}
governance: {autonomy: full, paths: {write: ['./**']}}
";

fn parent(more: &str) -> String {
    format!(
        "model: scripted/parent\nenable_double_confirmation: false\nlimits: {{error_threshold: 1000}}\n{more}"
    )
}

fn steps(steps: &[Value]) -> String {
    json!({ "steps": steps }).to_string()
}

fn calls(tool: &str, arguments: &[Value]) -> Value {
    let call = |arguments: &Value| json!({"tool": tool, "arguments": arguments});
    json!({"tool_calls": arguments.iter().map(call).collect::<Vec<_>>()})
}

fn file(operation: &str, path: &str) -> Value {
    match operation {
        "write" | "append" => json!({"operation": operation, "path": path, "content": "x\ny\n"}),
        _ => json!({"operation": operation, "path": path}),
    }
}

fn text(text: &str) -> Value {
    json!({ "text": text })
}

async fn children(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs?parent_run_id={}&limit=200", run["run_id"].as_str().unwrap());
    let mut children = service.get(&path).await.body["data"].as_array().unwrap().clone();
    children.reverse();
    children
}

async fn part(service: &Service, run: &Value, part: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/{part}?limit=200", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn detail(service: &Service, run: &Value) -> Value {
    service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body
}

async fn files_and_lines_are_counted_in_the_tree(db: Db) {
    let delegating = |model: &str, budget: &str| {
        parent(&format!(
            "tools: ['agent:child', file_ops]\ngovernance: {{autonomy: full, paths: {{write: ['./**']}}, budget: {{{budget}}}}}\n"
        ))
        .replace("scripted/parent", &format!("scripted/{model}"))
    };
    let asks = |prefix: &str| {
        let mut all: Vec<Value> = (0..4)
            .map(|number| calls("agent:child", &[json!({"file": format!("{prefix}{number}")})]))
            .collect();
        all.push(calls("file_ops", &[file("write", &format!("{prefix}-own"))]));
        all.push(text("done"));
        steps(&all)
    };
    let write = |name: &str| json!({"operation": "write", "path": format!("{{{{ inputs.file }}}}{name}"), "content": "x\ny\n"});
    let service = Setup::new()
        .agent("files", &delegating("files", "max_files_modified: 3"))
        .scenario("files", &asks("f"))
        .agent("lines", &delegating("lines", "max_lines_changed: 7"))
        .scenario("lines", &asks("l"))
        .agent("child", CHILD)
        .scenario("child", &steps(&[calls("file_ops", &[write("a"), write("b")]), text("written")]))
        .start(db)
        .await;
    // Of what is left, a run's last answer is no way out: it changes nothing.
    for (agent, limit, cap, left, prefix) in [
        ("files", "max_files_modified", 3, (3, 6), 'f'),
        ("lines", "max_lines_changed", 7, (3, 6), 'l'),
    ] {
        let run = service.run(agent, &json!({"on_limit": "answer"})).await;
        let context = &run["error"]["context"];
        assert_eq!(
            (&run["error"]["code"], &context["limit"], &context["max"], &context["shared"]),
            (&json!("BUDGET_EXCEEDED"), &json!(limit), &json!(cap), &json!(true)),
            "{run:#}"
        );
        let run = detail(&service, &run).await;
        let (tree, (files, lines)) = (&run["budget"]["tree"], left);
        assert_eq!(
            (&tree["files_modified"], &tree["lines_changed"]),
            (&json!(files), &json!(lines)),
            "{run:#}"
        );
        let children = children(&service, &run).await;
        let ended: Vec<&Value> = children.iter().map(|run| &run["status"]).collect();
        assert_eq!(ended, ["completed", "failed", "failed", "failed"], "{children:#?}");
        assert_eq!(children[1]["error"]["context"]["limit"], limit, "{:#}", children[1]);
        let written = std::fs::read_dir(service.dir.path().join("workspace/default")).unwrap();
        let written = written.filter(|entry| {
            entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(prefix)
        });
        assert_eq!(written.count(), 3, "{agent}");
    }
}

async fn a_denied_path_is_the_same_file_in_every_workspace(db: Db) {
    let lead = parent(
        "tools: ['agent:middle', 'agent:inside', 'agent:same', file_ops]\nworkspace: rules\n\
         governance: {autonomy: full, paths: {write: ['./**'], deny: ['secret/**', '*.key']}}\n",
    );
    let asks = |agent: &str| calls(&format!("agent:{agent}"), &[json!({})]);
    let works = |files: &[(&str, &str)]| {
        let files: Vec<Value> =
            files.iter().map(|(operation, path)| file(operation, path)).collect();
        steps(&[calls("file_ops", &files), text("done")])
    };
    let child = |model: &str, workspace: &str| {
        CHILD.replace("scripted/child", &format!("scripted/{model}"))
            + &format!("workspace: {workspace}\n")
    };
    let middle =
        CHILD.replace("scripted/child", "scripted/middle").replace("file_ops", "'agent:outside'")
            + "workspace: elsewhere\n";
    let service = Setup::new()
        .agent("lead", &lead)
        .scenario("parent", &steps(&[asks("middle"), asks("inside"), asks("same"), text("done")]))
        .agent("middle", &middle)
        .scenario("middle", &steps(&[asks("outside"), text("done")]))
        .agent("outside", &child("outside", "."))
        .scenario(
            "outside",
            &works(&[
                ("read", "rules/secret/x"),
                ("append", "rules/secret/x"),
                ("write", "rules/new.key"),
                ("list", "rules/secret"),
                ("delete", "rules/secret/x"),
                ("read", "rules/other"),
                ("write", "secret/x"),
                ("write", "a.key"),
            ]),
        )
        .agent("inside", &child("inside", "rules/secret"))
        .scenario(
            "inside",
            &works(&[("read", "x"), ("append", "x"), ("write", "y"), ("list", ".")]),
        )
        .agent("same", &child("same", "./rules/"))
        .scenario(
            "same",
            &works(&[("read", "secret/x"), ("append", "secret/../a.key"), ("write", "b")]),
        )
        .file("rules/secret/x", "kept\n")
        .file("rules/other", "open\n")
        .start(db)
        .await;
    let run = service.run("lead", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let started = children(&service, &run).await;
    let outside = children(&service, &started[0]).await;
    for (child, expected) in [
        (
            &outside[0],
            &[
                "blocked", "blocked", "blocked", "blocked", "blocked", "allowed", "allowed",
                "allowed",
            ][..],
        ),
        (&started[1], &["blocked"; 4]),
        (&started[2], &["blocked", "blocked", "allowed"]),
    ] {
        let calls = part(&service, child, "tool-calls").await;
        let decisions: Vec<_> =
            calls.iter().map(|call| call["decision"].as_str().unwrap()).collect();
        assert_eq!(decisions, *expected, "{calls:#?}");
        let reasons = calls.iter().filter(|call| call["decision"] == "blocked");
        assert!(
            reasons.into_iter().all(|call| call["result"].as_str().unwrap().contains("path rule")),
            "{calls:#?}"
        );
    }
    let kept = std::fs::read_to_string(service.dir.path().join("workspace/default/rules/secret/x"));
    assert_eq!(kept.unwrap(), "kept\n");
    assert!(!service.dir.path().join("workspace/default/rules/new.key").exists());
}

async fn an_active_skill_holds_for_children(db: Db) {
    let delegating = |skill: &str, agent: &str| {
        parent(&format!("tools: ['agent:{agent}']\nskills: [{skill}]\n"))
            .replace("scripted/parent", &format!("scripted/{skill}"))
            + "governance: {autonomy: full}\n"
    };
    let skilled = |skill: &str, agent: &str| {
        let first = calls("use_skill", &[json!({"name": skill})]);
        steps(&[first, calls(&format!("agent:{agent}"), &[json!({})]), text("{{ results[0] }}")])
    };
    let writes = |path: &str| {
        steps(&[calls("file_ops", &[file("write", path)]), text("child: {{ results[0] }}")])
    };
    let middle =
        CHILD.replace("scripted/child", "scripted/middle").replace("file_ops", "'agent:child'");
    let service = Setup::new()
        .skill("without", "disallowed_tools: ['file_*']\n", "Touch no file.")
        .skill("only", "allowed_tools: ['agent:*']\n", "Only ask others.")
        .skill("both", "allowed_tools: ['agent:*', file_ops]\n", "Ask others.")
        .skill("asks", "approval_required: [file_ops]\n", "Ask first.")
        .agent("without", &delegating("without", "middle"))
        .scenario("without", &skilled("without", "middle"))
        .agent("only", &delegating("only", "child"))
        .scenario("only", &skilled("only", "child"))
        .agent("both", &delegating("both", "child"))
        .scenario("both", &skilled("both", "child"))
        .agent("asks", &delegating("asks", "child"))
        .scenario("asks", &skilled("asks", "child"))
        .agent("middle", &middle)
        .scenario("middle", &steps(&[calls("agent:child", &[json!({})]), text("{{ results[0] }}")]))
        .skill("spare", "", "Nothing.")
        .agent("child", &format!("{CHILD}skills: [spare]\n"))
        .scenario("child", &writes("new.txt"))
        .start(db)
        .await;
    let written = || service.dir.path().join("workspace/default/new.txt").exists();
    for skill in ["without", "only"] {
        let run = service.run(skill, &json!({})).await;
        let told = run["output"]["result"].as_str().unwrap();
        let why = format!("the skill {skill} does not allow file_ops");
        assert!(told.contains(&why), "{skill}: {run:#}");
        assert!(!written(), "{skill}");
        let child = children(&service, &run).await.remove(0);
        let events = part(&service, &child, "events").await;
        let activated: Vec<&Value> =
            events.iter().filter(|event| event["type"] == "skill.activated").collect();
        assert_eq!(activated.len(), 1, "{events:#?}");
        let data = &activated[0]["data"];
        assert_eq!((&data["skill"], &data["inherited"]), (&json!(skill), &json!(true)));
        let system = part(&service, &child, "messages").await[0]["content"].clone();
        let system = system.as_str().unwrap();
        assert!(!system.contains("Touch no") && !system.contains("Only ask"), "{system}");
    }
    let body = json!({"run_id": uuid::Uuid::now_v7()});
    let request = service
        .request(reqwest::Method::POST, "/v1/agents/asks/invoke-iterative")
        .header("Prefer", "respond-async")
        .json(&body);
    crate::service::answer(request).await;
    let run = json!({"run_id": body["run_id"]});
    let path = format!("/v1/runs?parent_run_id={}", body["run_id"].as_str().unwrap());
    let waits = |runs: &Value| runs["data"][0]["status"] == "awaiting_approval";
    service.until(&path, waits).await;
    assert!(!written(), "it is asked for");
    service.post(&format!("/v1/runs/{}/cancel", run["run_id"].as_str().unwrap()), &json!({})).await;

    let run = service.run("both", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    assert!(written(), "{run:#}");
}

async fn the_tools_of_a_request_hold_for_children(db: Db) {
    let lead = parent(
        "models: ['scripted/by-*']\ntools: ['agent:middle', transfer_to_child]\ngovernance: {autonomy: full}\n",
    );
    let middle =
        CHILD.replace("scripted/child", "scripted/middle").replace("file_ops", "'agent:child'");
    let asks = |tool: &str| calls(tool, &[json!({})]);
    let service = Setup::new()
        .agent("lead", &lead)
        .scenario("by-task", &steps(&[asks("agent:middle"), text("{{ results[0] }}")]))
        .scenario("by-handoff", &steps(&[asks("transfer_to_child"), text("{{ results[0] }}")]))
        .agent("middle", &middle)
        .scenario("middle", &steps(&[asks("agent:child"), text("{{ results[0] }}")]))
        .agent("child", CHILD)
        .scenario(
            "child",
            &steps(&[
                calls("file_ops", &[file("write", "new.txt")]),
                text("child: {{ results[0] }}"),
            ]),
        )
        .start(db)
        .await;
    let written = || service.dir.path().join("workspace/default/new.txt").exists();
    let table = [
        ("by-task", json!(["agent:*"]), false),
        ("by-handoff", json!(["transfer_to_child"]), false),
        ("by-task", json!(["agent:middle", "file_ops"]), false),
        ("by-task", json!(["agent:*", "file_*"]), true),
        ("by-handoff", json!(["transfer_*", "file_ops"]), true),
        ("by-handoff", Value::Null, true),
    ];
    for (by, tools, may_write) in table {
        let body = json!({"model": format!("scripted/{by}"), "tools": tools});
        let run = service.run("lead", &body).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        assert_eq!(written(), may_write, "{body}: {run:#}");
        assert_eq!(run["warnings"], json!([]), "the names may be meant for others: {run:#}");
        if may_write {
            std::fs::remove_file(service.dir.path().join("workspace/default/new.txt")).unwrap();
        }
    }
}

async fn overrides_beyond_the_agents_limits_are_warned_of(db: Db) {
    let agent = "model: scripted/bounded\ntools: [file_ops]\nenable_double_confirmation: false\nlimits: {max_iterations: 5}\n\
                 governance: {budget: {max_tool_calls: 7, max_total_tokens: 100000}}\n";
    let service = Setup::new()
        .agent("bounded", agent)
        .scenario("bounded", "steps: [{text: fine}]")
        .start(db)
        .await;
    let body = json!({"max_iterations": 999, "max_attempts": 2, "error_threshold": 4, "tool_call_timeout_seconds": 90,
        "budget": {"max_tool_calls": 9999, "max_total_tokens": 200_000, "max_lines_changed": 10}});
    let told = json!([
        "max_iterations: the agent allows 5, which holds, and not 999.",
        "tool_call_timeout_seconds: the agent allows 60, which holds, and not 90.",
        "error_threshold: the agent allows 3, which holds, and not 4.",
        "budget.max_tool_calls: the agent allows 7, which holds, and not 9999.",
        "budget.max_total_tokens: the agent allows 100000, which holds, and not 200000.",
    ]);
    let run = service.run("bounded", &body).await;
    assert_eq!(run["warnings"], told, "{run:#}");
    let shown = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(shown["warnings"], told);
    let limits = json!({"max_attempts": 2, "max_iterations": 5, "max_iterations_per_attempt": 15,
        "max_tool_calls_per_iteration": 5, "tool_call_timeout_seconds": 60, "error_threshold": 3});
    assert_eq!(shown["limits"], limits, "{shown:#}");
    assert_eq!(shown["budget"]["limits"]["max_tool_calls"], 7);
    let mut dry = body.clone();
    dry["dry_run"] = json!(true);
    let dry = service.post("/v1/agents/bounded/invoke-iterative", &dry).await.body;
    assert_eq!(dry["warnings"], told, "{dry:#}");
}

async fn stop_conditions_see_the_tree(db: Db) {
    let stopped = |when: &str, model: &str| {
        parent(&format!(
            "tools: ['agent:child']\ngovernance: {{budget: {{stop_conditions: [{{when: \"{when}\", action: stop}}]}}}}\n"
        ))
        .replace("scripted/parent", &format!("scripted/{model}"))
    };
    let ask = json!({"tool_calls": [{"tool": "agent:child", "arguments": {}}],
        "usage": {"input_tokens": 5, "output_tokens": 5}});
    let all = [ask.clone(), ask, text("done")];
    let conditions = [
        ("tokens", "usage.total_tokens > 1000"),
        ("calls", "counters.tool_calls > 3"),
        ("files", "counters.files_modified > 1 && counters.lines_changed > 3"),
        ("read", "counters.files_read > 0 && counters.iterations > 2"),
    ];
    let mut setup = Setup::new().agent("child", CHILD).scenario(
        "child",
        &steps(&[
            calls("file_ops", &[file("write", "a"), file("write", "b"), file("list", ".")]),
            json!({"text": "fine", "usage": {"input_tokens": 1500, "output_tokens": 10}}),
        ]),
    );
    for (name, when) in conditions {
        setup = setup.agent(name, &stopped(when, name)).scenario(name, &steps(&all));
    }
    let service = setup.start(db).await;
    for (name, when) in conditions {
        let run = service.run(name, &json!({})).await;
        assert_eq!(run["error"]["code"], "STOP_CONDITION", "{when}: {run:#}");
        assert_eq!(run["iterations"], 1, "{when}: {run:#}");
        assert!(run["tokens_used"].as_u64().unwrap() < 100, "its own: {run:#}");
    }
}

async fn an_answer_shows_the_usage_of_the_tree(db: Db) {
    let said = |text: &str, tokens: u64| json!({"text": text, "usage": {"input_tokens": tokens, "output_tokens": 1}});
    let asks = |agent: &str, tokens: u64| {
        json!({"tool_calls": [{"tool": format!("agent:{agent}"), "arguments": {}}],
            "usage": {"input_tokens": tokens, "output_tokens": 1}})
    };
    let service = Setup::new()
        .agent("lead", &parent("tools: ['agent:middle', 'agent:child']\n"))
        .scenario("parent", &steps(&[asks("middle", 10), asks("child", 20), said("done", 30)]))
        .agent(
            "middle",
            &parent("tools: ['agent:child']\n").replace("scripted/parent", "scripted/middle"),
        )
        .scenario("middle", &steps(&[asks("child", 100), said("done", 200)]))
        .agent("child", CHILD)
        .scenario("child", &steps(&[said("fine", 1000)]))
        .start(db)
        .await;
    let tokens = |run: &Value, field: &str| {
        (run[field]["input_tokens"].clone(), run[field]["output_tokens"].clone())
    };
    let run = service.run("lead", &json!({})).await;
    assert_eq!(tokens(&run, "usage"), (json!(60), json!(3)), "{run:#}");
    assert_eq!(tokens(&run, "tree_usage"), (json!(2360), json!(7)), "{run:#}");
    assert_eq!(run["tree_usage"]["total_tokens"], 2367);
    let shown = detail(&service, &run).await;
    assert_eq!(shown["tree_usage"], run["tree_usage"]);
    assert_eq!(shown["budget"]["tree"]["total_tokens"], 2367, "{shown:#}");
    let listed = service.get("/v1/runs?agent=lead").await.body["data"][0].clone();
    assert_eq!(listed["tree_usage"], run["tree_usage"]);
    let events = part(&service, &run, "events").await;
    assert!(events.last().unwrap()["data"].get("run").is_none(), "the journal has what happened");
    let path = format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap());
    let stream = service.request(reqwest::Method::GET, &path).header("Accept", "text/event-stream");
    let stream = stream.send().await.unwrap().text().await.unwrap();
    let last = stream.lines().rfind(|line| line.starts_with("data: ")).unwrap();
    let last: Value = serde_json::from_str(last.trim_start_matches("data: ")).unwrap();
    assert_eq!(last["data"]["run"], run, "the stream's last event is the answer");
    let children = children(&service, &run).await;
    let middle = children.iter().find(|run| run["agent"] == "middle").unwrap();
    assert_eq!(tokens(middle, "tree_usage"), (json!(1300), json!(3)), "{middle:#}");
    let child = children.iter().find(|run| run["agent"] == "child").unwrap();
    assert_eq!(child["tree_usage"], Value::Null, "it delegated nothing: {child:#}");
}

async fn agents_that_can_only_read_work_at_the_same_time(db: Db) {
    let lead = |autonomy: &str, agent: &str| {
        parent(&format!(
            "tools: ['agent:{agent}']\nparallel_tool_calls: true\ngovernance: {{autonomy: {autonomy}}}\n"
        ))
        .replace("scripted/parent", &format!("scripted/{agent}"))
    };
    let asks = |agent: &str| {
        steps(&[
            calls(&format!("agent:{agent}"), &[json!({"n": 1}), json!({"n": 2})]),
            text("done"),
        ])
    };
    // Those that may work at the same time take so long that even a slow machine begins both.
    let slow = CHILD.replace("scripted/child", "scripted/lasting");
    let reader = slow.replace("autonomy: full", "autonomy: read-only");
    let works = |delay: u32| {
        steps(&[
            calls("file_ops", &[file("list", "."), file("write", "new.txt")]),
            json!({"text": "fine", "delay_ms": delay}),
        ])
    };
    let service = Setup::new()
        .agent("of-readers", &lead("full", "reader"))
        .scenario("reader", &asks("reader"))
        .agent("of-writers", &lead("full", "writer"))
        .agent("read-only", &lead("read-only", "slow"))
        .scenario("slow", &asks("slow"))
        .scenario("writer", &asks("writer"))
        .agent("reader", &reader)
        .agent("writer", CHILD)
        .agent("slow", &slow)
        .scenario("child", &works(700))
        .scenario("lasting", &works(5000))
        .start(db)
        .await;
    let table =
        [("of-readers", true, false), ("of-writers", false, true), ("read-only", true, false)];
    for (agent, at_once, writes) in table {
        let run = service.run(agent, &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        let children = children(&service, &run).await;
        let time = |run: &Value, field: &str| run[field].as_str().unwrap().to_owned();
        let mut spans: Vec<_> = children
            .iter()
            .map(|run| (time(run, "started_at"), time(run, "finished_at")))
            .collect();
        spans.sort_unstable();
        assert_eq!(spans[1].0 < spans[0].1, at_once, "{agent}: {spans:?}");
        let new = service.dir.path().join("workspace/default/new.txt");
        assert_eq!(std::fs::remove_file(new).is_ok(), writes, "{agent}");
    }
}

async fn the_autonomy_of_a_parent_that_observes_is_observed_in_children(db: Db) {
    let governance = |autonomy: &str, mode: &str| {
        format!("governance: {{autonomy: {autonomy}, mode: {mode}, paths: {{write: ['./**']}}}}\n")
    };
    let agent = |model: &str, tools: &str, governance: String| {
        format!(
            "model: scripted/{model}\ntools: {tools}\nenable_double_confirmation: false\n{governance}"
        )
    };
    let delegates = |to: &str| steps(&[calls(&format!("agent:{to}"), &[json!({})]), text("done")]);
    let service = Setup::new()
        .agent("careful", &agent("middle", "['agent:between']", governance("read-only", "observe")))
        .agent("asking", &agent("above", "['agent:writer']", governance("supervised", "observe")))
        .agent("between", &agent("above", "['agent:writer']", governance("full", "enforce")))
        .agent("writer", &agent("writer", "[file_ops]", governance("full", "enforce")))
        .scenario("middle", &delegates("between"))
        .scenario("above", &delegates("writer"))
        .scenario(
            "writer",
            &steps(&[
                calls(
                    "file_ops",
                    &[file("write", "new.txt"), file("delete", "new.txt"), file("stat", "a.txt")],
                ),
                text("done"),
            ]),
        )
        .file("a.txt", "a\n")
        .start(db)
        .await;
    let decisions = async |run: &Value| {
        let path = format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap());
        let calls = service.get(&path).await.body["data"].as_array().unwrap().clone();
        calls.iter().map(|call| call["decision"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let run = service.run("asking", &json!({})).await;
    let writer = children(&service, &run).await.remove(0);
    assert_eq!(decisions(&writer).await, ["allowed", "warned", "allowed"]);
    let run = service.run("careful", &json!({})).await;
    let between = children(&service, &run).await.remove(0);
    let writer = children(&service, &between).await.remove(0);
    assert_eq!(decisions(&writer).await, ["warned", "warned", "allowed"], "two levels below");
    let path = format!("/v1/audit?run_id={}", writer["run_id"].as_str().unwrap());
    let audit = service.get(&path).await.body;
    let records = audit["data"].as_array().unwrap().iter();
    let warned: Vec<&Value> = records.filter(|it| it["decision"] == "warned").collect();
    assert!(warned.len() >= 2, "{audit:#}");
    for record in warned {
        assert_eq!(record["rule"], "autonomy", "{record:#}");
        assert!(record["reason"].as_str().unwrap().contains("which only observes"), "{record:#}");
    }
}
