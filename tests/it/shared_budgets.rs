//! What a run may consume, it may consume once, however many others it starts.

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection, SqliteConnection};

use crate::fault_rounds::rounds;
use crate::service::{Db, Service, Setup, on_both_stores, pause};

on_both_stores! {
    sixty_four_children_share_ten_model_calls,
    calls_of_tools_are_shared,
    calls_that_others_decide_on_or_execute_are_shared,
    calls_of_the_same_response_that_have_ended_are_told_as_used,
    a_limit_ends_the_run_whose_call_would_exceed_it,
    tokens_are_shared_and_balance,
    a_child_without_tokens_left_of_the_tree_is_no_failure,
    children_that_use_it_up_together_end_their_parent_for_that,
    a_call_waits_for_reservations_of_others,
    a_last_answer_is_reserved_although_it_is_not_left,
    a_child_without_a_price_is_not_started_where_costs_are_weighed,
    a_childs_own_tokens_bound_the_runs_below_it,
    a_childs_own_tokens_bound_runs_that_work_together_below_it,
    a_price_is_required_of_the_child_of_a_child_that_waited,
    a_child_ends_with_the_time_of_its_parent,
    a_crash_leaves_the_budget_balanced,
    a_call_of_unknown_outcome_is_spent,
    every_route_answers_the_same_budget_of_a_run,
    lists_of_runs_carry_no_payloads,
}

const CHILD: &str = "model: scripted/child\nenable_double_confirmation: false\n";

async fn whole_tree(service: &Service, root: &str) -> Vec<Value> {
    let mut tree = vec![service.get(&format!("/v1/runs/{root}")).await.body];
    let children = service.get(&format!("/v1/runs?parent_run_id={root}&limit=200")).await.body;
    tree.extend(children["data"].as_array().unwrap().iter().cloned());
    tree
}

fn sum(tree: &[Value], field: &str) -> u64 {
    tree.iter().map(|run| run[field].as_u64().unwrap()).sum()
}

/// The root says what all of them say together.
fn assert_balanced(tree: &[Value]) {
    let used = &tree[0]["budget"]["tree"];
    let consumed = |field: &str| -> u64 {
        tree.iter().map(|run| run["budget"]["used"][field].as_u64().unwrap()).sum()
    };
    let expected = json!({
        "iterations": sum(tree, "iterations"), "tool_calls": sum(tree, "tool_calls_made"),
        "total_tokens": sum(tree, "tokens_used"), "cost_usd": null,
        "files_modified": consumed("files_modified"), "lines_changed": consumed("lines_changed"),
    });
    assert_eq!(*used, expected, "{:#}", tree[0]);
}

fn refused(run: &Value, limit: &str) -> bool {
    let error = &run["error"];
    run["termination_reason"] == "budget_exceeded"
        && error["code"] == "BUDGET_EXCEEDED"
        && error["context"]["limit"] == limit
        && error["context"]["shared"] == true
}

async fn sixty_four_children_share_ten_model_calls(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
parallel_tool_calls: true
limits: {max_tool_calls_per_iteration: 128, error_threshold: 1000}
governance: {budget: {max_iterations: 10}}
";
    let call = |number| format!("{{tool: \"agent:child\", arguments: {{number: {number}}}}}");
    let calls = (0..64).map(call).collect::<Vec<_>>().join(", ");
    let service = Setup::new()
        .agent("parent", parent)
        .scenario("parent", &format!("steps: [{{tool_calls: [{calls}]}}, {{text: done}}]"))
        .agent("child", CHILD)
        .scenario("child", "steps: [{delay_ms: 20, text: fine}]")
        .start(db)
        .await;
    for _ in 0..rounds(1) {
        let run = service.run("parent", &json!({})).await;
        assert!(refused(&run, "max_iterations"), "nothing is left for the parent: {run:#}");
        let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
        assert_eq!((tree.len(), sum(&tree, "iterations")), (65, 10), "overspend 0");
        let completed = tree.iter().filter(|run| run["status"] == "completed").count();
        assert_eq!(completed, 9);
        assert!(
            tree[1..]
                .iter()
                .all(|run| run["status"] == "completed" || refused(run, "max_iterations")),
            "{tree:#?}"
        );
        assert_balanced(&tree);
    }
}

async fn calls_of_tools_are_shared(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
governance: {budget: {max_tool_calls: 3}}
";
    let service = Setup::new()
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:child\"}]}, {text: '{{ results[0] }}'}]",
        )
        .agent("child", &format!("{CHILD}tools: [file_ops]\n"))
        .scenario(
            "child",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]}]",
        )
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert!(run["output"]["result"].as_str().unwrap().contains("BUDGET_EXCEEDED"), "{run:#}");
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    assert!(refused(&tree[1], "max_tool_calls"), "{:#}", tree[1]);
    assert_eq!(sum(&tree, "tool_calls_made"), 3);
    assert_balanced(&tree);
}

async fn calls_that_others_decide_on_or_execute_are_shared(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child', file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}, tool_policies: {file_ops: ask}, budget: {max_tool_calls: 3}}
";
    let write = |path: &str| {
        format!("{{tool: file_ops, arguments: {{operation: write, path: {path}, content: x}}}}")
    };
    let asking = [
        ("deny", [write("a"), write("b")]),
        (
            "result",
            ["{tool: mine, arguments: {n: 1}}", "{tool: mine, arguments: {n: 2}}"]
                .map(String::from),
        ),
    ];
    for (answer, calls) in asking {
        let steps = format!(
            "steps: [{{tool_calls: [{{tool: \"agent:child\"}}]}}, {{tool_calls: [{}]}}, {{text: done}}]",
            calls.join(", ")
        );
        let service = Setup::new()
            .agent("parent", parent)
            .scenario("parent", &steps)
            .agent("child", &format!("{CHILD}tools: ['agent:grandchild']\n"))
            .scenario("child", "steps: [{tool_calls: [{tool: \"agent:grandchild\"}]}, {text: x}]")
            .agent("grandchild", "model: scripted/grandchild\n")
            .scenario("grandchild", "steps: [{text: x}]")
            .start(db)
            .await;
        let mine = json!({"name": "mine", "description": "x", "input_schema": {"type": "object"}});
        let body = json!({"client_tools": [mine]});
        let parked = service.post("/v1/agents/parent/invoke-iterative", &body).await;
        assert_eq!(parked.status, 202, "{answer}: {:#}", parked.body);
        let pending = parked.body["pending"].as_array().unwrap();
        assert_eq!(pending.len(), 1, "{answer}: there is no call left for the second");
        let run = format!("/v1/runs/{}", parked.body["run_id"].as_str().unwrap());
        let call = pending[0]["call_id"].as_str().unwrap();
        let given = if answer == "result" { json!({"content": "x"}) } else { json!({}) };
        let given = service.post(&format!("{run}/tool-calls/{call}/{answer}"), &given).await;
        assert!(given.status.is_success(), "{answer}: {:#}", given.body);
        let ended = service.until(&run, |run| run["status"] == "failed").await;
        assert!(refused(&ended, "max_tool_calls"), "{answer}: {ended:#}");
        assert_eq!(ended["budget"]["tree"]["tool_calls"], 3, "{answer}: {ended:#}");
    }
}

async fn calls_of_the_same_response_that_have_ended_are_told_as_used(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
governance: {budget: {max_tool_calls: 4}}
";
    let write = |path: &str| {
        format!("{{tool: file_ops, arguments: {{operation: write, path: {path}, content: x}}}}")
    };
    let writes = ["a", "b", "c", "d"].map(write).join(", ");
    let service = Setup::new()
        .agent("parent", parent)
        .scenario("parent", "steps: [{tool_calls: [{tool: \"agent:child\"}]}, {text: done}]")
        .agent(
            "child",
            &format!("{CHILD}tools: [file_ops]\ngovernance: {{paths: {{write: ['./**']}}}}\n"),
        )
        .scenario("child", &format!("steps: [{{tool_calls: [{writes}]}}, {{text: done}}]"))
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    assert!(refused(&tree[1], "max_tool_calls"), "{:#}", tree[1]);
    let error = &tree[1]["error"];
    assert_eq!(
        (&error["context"]["used"], &error["context"]["max"]),
        (&json!(4), &json!(4)),
        "{error:#}"
    );
    assert!(!error["message"].as_str().unwrap().contains("under way"), "{error:#}");
    assert_balanced(&tree);
}

/// Whichever run has used it up, and however much of it a child was refused: a run that needs no more of it
/// goes on.
async fn a_limit_ends_the_run_whose_call_would_exceed_it(db: Db) {
    let write = |path: &str| {
        format!(
            "{{tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: '{path}', content: x}}}}]}}"
        )
    };
    let (first, second, third) = (write("one-{{ inputs.n }}"), write("two"), write("three"));
    let delegate = "{tool_calls: [{tool: \"agent:child\", arguments: {n: 1}}]}";
    let (answer, told) = ("{text: done}", "{text: '{{ results[0] }}'}");
    // Of each limit there is enough for the call of the child and two files.
    for limit in ["max_tool_calls: 3", "max_files_modified: 2", "max_lines_changed: 2"] {
        let name = limit.split(':').next().unwrap();
        let rules = format!(
            "limits: {{error_threshold: 1}}\ngovernance: {{paths: {{write: ['**']}}, budget: {{{limit}}}}}\n"
        );
        let alone = rules.replace("max_tool_calls: 3", "max_tool_calls: 2");
        let files = "tools: [file_ops]\ngovernance: {paths: {write: ['**']}}\n";
        for (case, parent, child, ends) in [
            ("its own, used up", format!("{first}, {second}, {answer}"), "", false),
            ("its own, exceeded", format!("{first}, {second}, {third}, {answer}"), "", true),
            ("used up by the child", format!("{delegate}, {told}"), "", false),
            ("exceeded by the child", format!("{delegate}, {told}"), &*third, false),
            (
                "used up by the child, exceeded by itself",
                format!("{delegate}, {third}, {answer}"),
                "",
                true,
            ),
            ("exceeded by both", format!("{delegate}, {third}, {answer}"), &*third, true),
        ] {
            let is_alone = !parent.contains("agent:child");
            let tools = if is_alone { "[file_ops]" } else { "[file_ops, 'agent:child']" };
            let rules = if is_alone { &alone } else { &rules };
            let child =
                if child.is_empty() { answer.to_owned() } else { format!("{child}, {answer}") };
            let service = Setup::new()
                .agent("parent", &format!("model: scripted/parent\ntools: {tools}\nenable_double_confirmation: false\n{rules}"))
                .scenario("parent", &format!("steps: [{parent}]"))
                .agent("child", &format!("{CHILD}{files}"))
                .scenario("child", &format!("steps: [{first}, {second}, {child}]"))
                .start(db)
                .await;
            let run = service.run("parent", &json!({"inputs": {"n": 1}})).await;
            let what = format!("{limit}, {case}: {run:#}");
            if ends {
                assert_eq!(run["error"]["context"]["limit"], name, "{what}");
                assert_eq!(refused(&run, name), !is_alone, "{what}");
                assert_eq!(run["termination_reason"], "budget_exceeded", "{what}");
            } else {
                assert_eq!(run["status"], "completed", "{what}");
            }
            if case == "exceeded by the child" {
                let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
                assert!(refused(&tree[1], name), "{:#}", tree[1]);
                assert!(run["output"]["result"].as_str().unwrap().contains(name), "{what}");
            }
        }
    }
}

async fn tokens_are_shared_and_balance(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
limits: {error_threshold: 10}
governance: {budget: {max_total_tokens: 3000}}
";
    let call =
        "tool_calls: [{tool: \"agent:child\"}], usage: {input_tokens: 50, output_tokens: 50}";
    let service = Setup::new()
        .agent("parent", parent)
        .scenario("parent", &format!("steps: [{{{call}}}, {{{call}}}, {{{call}}}, {{text: done}}]"))
        .agent("child", CHILD)
        .scenario("child", "steps: [{text: fine, usage: {input_tokens: 60, output_tokens: 1340}}]")
        .agent("alone", CHILD)
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    let done = tree[1..].iter().filter(|run| run["status"] == "completed").count();
    assert_eq!(done, 2, "{tree:#?}");
    assert!(tree.iter().any(|run| refused(run, "max_total_tokens")), "{tree:#?}");
    assert!(sum(&tree, "tokens_used") <= 3000, "{tree:#?}");
    assert_balanced(&tree);
    let alone = service.run("alone", &json!({})).await;
    let alone = service.get(&format!("/v1/runs/{}", alone["run_id"].as_str().unwrap())).await.body;
    assert_eq!(alone["budget"]["tree"], Value::Null, "a run without children shares nothing");
}

async fn a_child_without_tokens_left_of_the_tree_is_no_failure(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
throw_on_tool_failure: true
governance: {budget: {max_total_tokens: 20000}}
";
    let list = "{tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}], \
                usage: {input_tokens: 4900, output_tokens: 100}}";
    let service = Setup::new()
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:child\"}], usage: {input_tokens: 900, output_tokens: 100}}, \
             {text: '{{ results[0] }}'}]",
        )
        .agent("child", &format!("{CHILD}tools: [file_ops]\n"))
        .scenario("child", &format!("steps: [{list}, {list}, {list}, {list}, {{text: done}}]"))
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    assert!(refused(&tree[1], "max_total_tokens"), "{:#}", tree[1]);
    assert_eq!(run["status"], "completed", "{run:#}");
    assert!(run["output"]["result"].as_str().unwrap().contains("max_total_tokens"), "{run:#}");
    assert_balanced(&tree);
}

const PARENT_OF_FOUR: &str = "
model: scripted/parent
tools: ['agent:reader']
enable_double_confirmation: false
parallel_tool_calls: true
";

/// A parent that uses so much and asks so many children at once, each of which answers after half a
/// second.
fn parallel(children: usize, budget: &str, used: &str, usage: &str) -> Setup {
    let call = |number| format!("{{tool: \"agent:reader\", arguments: {{number: {number}}}}}");
    let calls = (0..children).map(call).collect::<Vec<_>>().join(", ");
    Setup::new()
        .agent("parent", &format!("{PARENT_OF_FOUR}governance: {{budget: {{{budget}}}}}\n"))
        .scenario(
            "parent",
            &format!("steps: [{{tool_calls: [{calls}], {used}}}, {{text: done, {used}}}]"),
        )
        .agent("reader", "model: scripted/reader\nenable_double_confirmation: false\ngovernance: {autonomy: read-only}\n")
        .scenario("reader", &format!("steps: [{{delay_ms: 500, text: fine, {usage}}}]"))
}

async fn children_that_use_it_up_together_end_their_parent_for_that(db: Db) {
    let (used, usage) = ("usage: {input_tokens: 50, output_tokens: 2800}", "usage: {}");
    let service = parallel(3, "max_total_tokens: 3000", used, usage).start(db).await;
    let run = service.run("parent", &json!({})).await;
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    assert_eq!(tree.len(), 4);
    assert!(tree[1..].iter().all(|run| refused(run, "max_total_tokens")), "{tree:#?}");
    assert_eq!(run["termination_reason"], "budget_exceeded", "{run:#}");
    assert_eq!(run["error"]["context"]["limit"], "max_total_tokens", "{run:#}");
    assert_balanced(&tree);
}

async fn a_call_waits_for_reservations_of_others(db: Db) {
    let (used, usage) = (
        "usage: {input_tokens: 50, output_tokens: 50}",
        "usage: {input_tokens: 300, output_tokens: 20}",
    );
    let prices = "[prices.\"scripted/*\"]\ninput = 1.0\noutput = 1.0\n";
    let service =
        parallel(4, "max_total_tokens: 12000", used, usage).config(prices).start(db).await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    assert_eq!(tree.len(), 5);
    for run in &tree {
        assert_eq!(run["status"], "completed", "320 of 12000 tokens are used by each: {run:#}");
    }
    // Six thousandths of a dollar are what one call may cost, and a little.
    let body = json!({"budget": {"max_cost_usd": 0.006}});
    let run = service.run("parent", &body).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    assert!(tree.iter().all(|run| run["status"] == "completed"), "{tree:#?}");

    // One that waits is cancelled like any other.
    let late = format!("steps: [{{delay_ms: 600000, text: fine, {usage}}}]");
    service.write("scenarios/reader.yaml", &late);
    let id = uuid::Uuid::now_v7().to_string();
    let request = service
        .request(Method::POST, "/v1/agents/parent/invoke-iterative")
        .json(&json!({"run_id": id, "budget": {"max_total_tokens": 5200}}));
    let asked = tokio::spawn(async move { request.send().await });
    let children = format!("/v1/runs?parent_run_id={id}");
    service.until(&children, |runs| runs["data"].as_array().unwrap().len() == 4).await;
    service.post(&format!("/v1/runs/{id}/cancel"), &json!({})).await;
    service.until(&format!("/v1/runs/{id}"), |run| run["status"] == "cancelled").await;
    let has_ended = |run: &Value| run["finished_at"].is_string();
    service.until(&children, |runs| runs["data"].as_array().unwrap().iter().all(has_ended)).await;
    assert!(asked.await.unwrap().is_ok());
}

/// Otherwise other runs could take in the meantime what is needed for it.
async fn a_last_answer_is_reserved_although_it_is_not_left(db: Db) {
    let list = "{tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]}";
    let service = Setup::new()
        .agent("parent", &format!("{PARENT_OF_ONE}governance: {{budget: {{max_iterations: 2}}}}\n"))
        .scenario("parent", "steps: [{tool_calls: [{tool: \"agent:child\"}]}, {text: done}]")
        .agent("child", &format!("{CHILD}tools: [file_ops]\non_limit: answer\n"))
        .scenario("child", &format!("steps: [{list}, {{delay_ms: 600000, text: fine}}]"))
        .start(db)
        .await;
    let run = service.enqueue("parent").await;
    until_held(
        &service,
        "SELECT count(*) FROM budgets WHERE spent_iterations = 2 AND reserved_iterations = 1 \
         AND reserved_tokens > 1024",
    )
    .await;
    service.post(&format!("{run}/cancel"), &json!({})).await;
    service.until(&run, |run| run["status"] == "cancelled").await;
    until_held(
        &service,
        "SELECT count(*) FROM budgets WHERE spent_iterations = 2 AND reserved_iterations = 0 \
         AND reserved_tokens = 0",
    )
    .await;
}

/// Waits until one budget is as this statement counts them.
async fn until_held(service: &Service, count: &'static str) {
    for looks in 0..3000 {
        let counted: i64 = if service.database_url.starts_with("postgres") {
            let mut database = PgConnection::connect(&service.database_url).await.unwrap();
            sqlx::query_scalar(count).fetch_one(&mut database).await.unwrap()
        } else {
            let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
            sqlx::query_scalar(count).fetch_one(&mut database).await.unwrap()
        };
        if counted == 1 {
            return;
        }
        pause(looks).await;
    }
    panic!("no budget is so: {count}\n{}", service.log());
}

async fn a_child_without_a_price_is_not_started_where_costs_are_weighed(db: Db) {
    let weighs =
        "governance: {budget: {stop_conditions: [{when: usage.cost_usd > 1.0, action: stop}]}}\n";
    let parent = |name: &str, tools: &str| {
        format!("model: scripted/{name}\ntools: {tools}\nenable_double_confirmation: false\n")
    };
    let prices = ["parent", "middle"]
        .map(|model| format!("[prices.\"scripted/{model}\"]\ninput = 1.0\noutput = 1.0\n"));
    let asks_child = r#"{tool: "agent:child", arguments: {}}"#;
    let asks_both = format!(r#"{asks_child}, {{tool: "agent:middle", arguments: {{}}}}"#);
    let service = Setup::new()
        .config(&prices.concat())
        .agent("parent", &(parent("parent", "['agent:child', 'agent:middle']") + weighs))
        .scenario(
            "parent",
            &format!("steps: [{{tool_calls: [{asks_both}]}}, {{text: \"{{{{ results }}}}\"}}]"),
        )
        .agent("middle", &parent("middle", "['agent:child']"))
        .scenario(
            "middle",
            &format!("steps: [{{tool_calls: [{asks_child}]}}, {{text: \"{{{{ results[0] }}}}\"}}]"),
        )
        .agent("child", CHILD)
        .scenario("child", "steps: [{text: done}]")
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    let told = run["output"].to_string();
    assert_eq!(told.matches("scripted/child has no price").count(), 2, "{run:#}");
    let all = service.get("/v1/runs").await.body;
    assert_eq!(all["data"].as_array().unwrap().len(), 2, "{all:#}");
}

/// What the runs below it have taken counts, while it works and when it starts another one.
async fn a_childs_own_tokens_bound_the_runs_below_it(db: Db) {
    let agent = |name: &str, tools: &str| {
        format!("model: scripted/{name}\ntools: ['{tools}']\nenable_double_confirmation: false\n")
    };
    let budget = "governance: {budget: {max_total_tokens: 50000}}\n";
    let asks_child =
        r#"{tool_calls: [{tool: "agent:child"}], usage: {input_tokens: 200, output_tokens: 10}}"#;
    let service = Setup::new()
        .agent("parent", &agent("parent", "agent:middle"))
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:middle\"}]}, {text: '{{ results[0] }}'}]",
        )
        .agent("middle", &(agent("middle", "agent:child") + budget))
        .scenario("middle", &format!("steps: [{asks_child}, {asks_child}, {{text: done}}]"))
        .agent("child", CHILD)
        .scenario(
            "child",
            "steps: [{text: fine, usage: {input_tokens: 29900, output_tokens: 100}}]",
        )
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert!(run["output"]["result"].as_str().unwrap().contains("BUDGET_EXCEEDED"), "{run:#}");
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    let middle = whole_tree(&service, tree[1]["run_id"].as_str().unwrap()).await;
    let context = &middle[0]["error"]["context"];
    assert_eq!(
        (&context["limit"], &context["used"], &context["max"], &context["shared"]),
        (&json!("max_total_tokens"), &json!(60_420), &json!(50_000), &Value::Null),
        "{:#}",
        middle[0]
    );
    let mut left = Vec::new();
    for child in &middle[1..] {
        let path = format!("/v1/runs/{}", child["run_id"].as_str().unwrap());
        let child = service.get(&path).await.body;
        left.push(child["budget"]["limits"]["max_total_tokens"].as_u64().unwrap());
    }
    left.sort_unstable();
    assert_eq!(left, [19_580, 49_790]);
}

/// Each reserves what it may take in the budget of the run that started them, not only in that of the tree.
async fn a_childs_own_tokens_bound_runs_that_work_together_below_it(db: Db) {
    let agent = |name: &str, tools: &str| {
        format!(
            "model: scripted/{name}\ntools: ['{tools}']\nenable_double_confirmation: false\n\
             parallel_tool_calls: true\nlimits: {{max_tool_calls_per_iteration: 8}}\n"
        )
    };
    // Enough for two of the four calls, which reserve a little more than they take.
    let budget = "governance: {budget: {max_total_tokens: 8450}}\n";
    let call = |number| format!("{{tool: \"agent:child\", arguments: {{number: {number}}}}}");
    let calls = (0..4).map(call).collect::<Vec<_>>().join(", ");
    let service = Setup::new()
        .agent("parent", &agent("parent", "agent:middle"))
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:middle\"}]}, {text: '{{ results[0] }}'}]",
        )
        .agent("middle", &(agent("middle", "agent:child") + budget))
        .scenario(
            "middle",
            &format!(
                "steps: [{{tool_calls: [{calls}], usage: {{input_tokens: 200, output_tokens: 10}}}}, \
                 {{text: done}}]"
            ),
        )
        .agent("child", CHILD)
        .scenario(
            "child",
            // All of them have begun when the first one ends.
            "steps: [{delay_ms: 4000, text: fine, usage: {input_tokens: 20, output_tokens: 4000}}]",
        )
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert!(run["output"]["result"].as_str().unwrap().contains("BUDGET_EXCEEDED"), "{run:#}");
    let tree = whole_tree(&service, run["run_id"].as_str().unwrap()).await;
    let middle = whole_tree(&service, tree[1]["run_id"].as_str().unwrap()).await;
    assert_eq!((middle.len(), sum(&middle, "tokens_used")), (5, 8250), "{middle:#?}");
    let context = &middle[0]["error"]["context"];
    assert_eq!((&context["used"], &context["max"]), (&json!(8250), &json!(8450)), "{middle:#?}");
    let (done, over): (Vec<Value>, Vec<Value>) =
        middle[1..].iter().cloned().partition(|run| run["status"] == "completed");
    assert_eq!(done.len(), 2, "{middle:#?}");
    assert!(over.iter().all(|run| refused(run, "max_total_tokens")), "{over:#?}");
}

/// Its parent is parked then, and not driven.
async fn a_price_is_required_of_the_child_of_a_child_that_waited(db: Db) {
    let agent = |name: &str, tools: &str| {
        format!("model: scripted/{name}\ntools: {tools}\nenable_double_confirmation: false\n")
    };
    let weighs =
        "governance: {budget: {stop_conditions: [{when: usage.cost_usd > 1.0, action: stop}]}}\n";
    let asks = "governance: {paths: {write: ['**']}, tool_policies: {file_ops: ask}}\n";
    let writes = "{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}";
    let prices = ["parent", "middle"]
        .map(|model| format!("[prices.\"scripted/{model}\"]\ninput = 1.0\noutput = 1.0\n"));
    let service = Setup::new()
        .config(&prices.concat())
        .agent("parent", &(agent("parent", "['agent:middle']") + weighs))
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:middle\"}]}, {text: '{{ results[0] }}'}]",
        )
        .agent("middle", &(agent("middle", "['agent:child', file_ops]") + asks))
        .scenario(
            "middle",
            &format!(
                "steps: [{{tool_calls: [{writes}]}}, {{tool_calls: [{{tool: \"agent:child\"}}]}}, \
                 {{text: '{{{{ results[0] }}}}'}}]"
            ),
        )
        .agent("child", CHILD)
        .scenario("child", "steps: [{text: done}]")
        .start(db)
        .await;
    let parked = service.post("/v1/agents/parent/invoke-iterative", &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let pending = &parked.body["pending"][0];
    let approve = format!(
        "/v1/runs/{}/tool-calls/{}/approve",
        pending["run_id"].as_str().unwrap(),
        pending["call_id"].as_str().unwrap()
    );
    let approved = service.post(&approve, &json!({})).await;
    assert!(approved.status.is_success(), "{:#}", approved.body);
    let run = format!("/v1/runs/{}", parked.body["run_id"].as_str().unwrap());
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert!(ended["output"].to_string().contains("scripted/child has no price"), "{ended:#}");
}

async fn a_child_ends_with_the_time_of_its_parent(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
governance: {budget: {max_duration_seconds: 15}}
";
    let scenario = |delay| format!("steps: [{{delay_ms: {delay}, text: fine}}]");
    let service = Setup::new()
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:child\"}]}, {text: '{{ results[0] }}'}]",
        )
        .agent("child", CHILD)
        .scenario("child", &scenario(3000))
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "fine"}), "{run:#}");
    service.write("scenarios/child.yaml", &scenario(60_000));
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["error"]["code"], "DURATION_EXCEEDED", "{run:#}");
    let latency = run["latency_ms"].as_u64().unwrap();
    assert!((15_000..50_000).contains(&latency), "{run:#}");
    let children = format!("/v1/runs?parent_run_id={}", run["run_id"].as_str().unwrap());
    service.until(&children, |runs| runs["data"][0]["finished_at"].is_string()).await;
}

async fn a_crash_leaves_the_budget_balanced(db: Db) {
    let parent = "
model: scripted/parent
tools: ['agent:child']
enable_double_confirmation: false
governance: {budget: {max_iterations: 4}}
";
    let list = "{tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]}";
    let scenario = |delay: u32| format!("steps: [{list}, {{delay_ms: {delay}, text: fine}}]");
    let mut service = Setup::new()
        .config("[runtime]\nlease = \"2s\"")
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: \"agent:child\"}]}, {text: '{{ results[0] }}'}]",
        )
        .agent("child", &format!("{CHILD}tools: [file_ops]\n"))
        .scenario("child", &scenario(600_000))
        .start(db)
        .await;
    let root = uuid::Uuid::now_v7().to_string();
    let request = service
        .request(Method::POST, "/v1/agents/parent/invoke-iterative")
        .json(&json!({"run_id": root}));
    tokio::spawn(async move { request.send().await });
    let path = format!("/v1/runs?parent_run_id={root}");
    service.until(&path, |runs| runs["data"][0]["tool_calls_made"] == 1).await;
    service.kill().await; // while the child's second model call is reserved
    service.write("scenarios/child.yaml", &scenario(0));
    service.restart().await;
    let run =
        service.until(&format!("/v1/runs/{root}"), |run| run["finished_at"].is_string()).await;
    assert_eq!(
        run["output"],
        json!({"result": "fine"}),
        "four model calls are enough, also after a crash: {run:#}"
    );
    assert_balanced(&whole_tree(&service, &root).await);
}

async fn a_call_of_unknown_outcome_is_spent(db: Db) {
    let programs = "governance: {autonomy: full, paths: {write: ['./**']}, \
         commands: {allow: [{command: sleep}, {command: touch}]}";
    let shell = |command: &str| {
        format!("{{tool_calls: [{{tool: shell, arguments: {{command: '{command}'}}}}]}}")
    };
    let parent = format!(
        "{CHILD}tools: ['agent:child', shell]\nworkspace: w\n{programs}, budget: {{max_tool_calls: 2}}}}\n"
    );
    let mut service = Setup::new()
        .agent("parent", &parent.replace("scripted/child", "scripted/parent"))
        .scenario(
            "parent",
            &format!(
                "steps: [{{tool_calls: [{{tool: 'agent:child'}}]}}, {}, {{text: done}}]",
                shell("touch more")
            ),
        )
        .agent("child", &format!("{CHILD}tools: [shell]\nworkspace: w\n{programs}}}\n"))
        .scenario("child", &format!("steps: [{}, {{text: fine}}]", shell("sleep 60")))
        .config("[runtime]\nlease = \"2s\"")
        .start(db)
        .await;
    let path = service.enqueue("parent").await;
    let children = format!("/v1/runs?parent_run_id={}", path.rsplit('/').next().unwrap());
    let begun = service.until(&children, |runs| runs["data"][0]["run_id"].is_string()).await;
    let child = format!("/v1/runs/{}", begun["data"][0]["run_id"].as_str().unwrap());
    let is_made = |calls: &Value| calls["data"][0]["state"] == "dispatched";
    service.until(&format!("{child}/tool-calls"), is_made).await;
    service.kill().await;
    service.restart().await;
    let parked = service.until(&path, |run| run["status"] == "needs_review").await;
    assert_eq!(parked["budget"]["tree"]["tool_calls"], 2, "{parked:#}");
    service.post(&format!("{child}/cancel"), &json!({})).await;
    let run = service.until(&path, |run| run["finished_at"].is_string()).await;
    assert!(refused(&run, "max_tool_calls"), "{run:#}");
    assert_eq!(run["budget"]["tree"]["tool_calls"], 2, "{run:#}");
    assert!(!service.dir.path().join("workspace/default/w/more").exists(), "it was made");
}

/// A parent that has delegated, and has ended.
async fn delegated(db: Db) -> (Service, String) {
    let service = Setup::new()
        .agent("parent", PARENT_OF_ONE)
        .scenario("parent", "steps: [{tool_calls: [{tool: \"agent:child\"}]}, {text: done}]")
        .agent("child", CHILD)
        .scenario("child", "steps: [{text: fine}]")
        .start(db)
        .await;
    let body = json!({"inputs": {"task": "t"}, "budget": {"max_tool_calls": 7}});
    let run = service.run("parent", &body).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    (service, run["run_id"].as_str().unwrap().to_owned())
}

const PARENT_OF_ONE: &str =
    "model: scripted/parent\ntools: ['agent:child']\nenable_double_confirmation: false\n";

async fn every_route_answers_the_same_budget_of_a_run(db: Db) {
    let (service, id) = delegated(db).await;
    for definition in ["as at the start", "changed since"] {
        if definition == "changed since" {
            let changed = format!(
                "name: parent\n{PARENT_OF_ONE}governance: {{budget: {{max_tool_calls: 1}}}}\n"
            );
            service.write("agents/parent.yaml", &changed);
            service
                .until("/v1/agents/parent", |agent| {
                    agent["governance"]["budget"]["max_tool_calls"] == 1
                })
                .await;
        }
        let detail = service.get(&format!("/v1/runs/{id}")).await.body;
        let budget = &detail["budget"];
        assert_eq!(budget["limits"]["max_tool_calls"], 7, "{definition}: {detail:#}");
        assert_eq!(budget["tree"]["iterations"], 3, "{definition}: {detail:#}");
        let waited = service.get(&format!("/v1/runs/{id}/wait")).await.body;
        let cancelled = service.post(&format!("/v1/runs/{id}/cancel"), &json!({})).await.body;
        let listed = service.get("/v1/runs?agent=parent").await.body["data"][0].clone();
        for (route, answer) in [("wait", &waited), ("cancel", &cancelled), ("list", &listed)] {
            assert_eq!(answer["budget"], *budget, "{route}, {definition}");
        }
        assert_eq!(waited, detail, "{definition}");
        assert_eq!(cancelled, detail, "{definition}");
    }
}

async fn lists_of_runs_carry_no_payloads(db: Db) {
    let (service, id) = delegated(db).await;
    let detail = service.get(&format!("/v1/runs/{id}")).await.body;
    let listed = service.get("/v1/runs?agent=parent").await.body["data"][0].clone();
    let mut expected = detail.as_object().unwrap().clone();
    for payload in ["inputs", "output", "raw_response", "overrides"] {
        assert!(expected.remove(payload).is_some_and(|value| !value.is_null()), "{payload}");
    }
    assert_eq!(listed, Value::from(expected), "all else is there");
}
