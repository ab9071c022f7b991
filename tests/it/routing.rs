//! Models that fail, that cannot do what is wished, and that cost money, as a caller sees them.

use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_fallback_stays_for_the_rest_of_the_run_and_over_a_crash,
    a_bad_request_is_not_tried_elsewhere,
    a_dead_model_is_left_alone,
    bursts_of_failures_are_outlived,
    a_choice_that_cannot_be_sent_is_asked_for_in_words,
    a_strict_choice_is_refused_where_it_cannot_be_sent,
    a_model_that_ignores_a_strict_choice_fails,
    a_run_has_a_cost,
    a_budget_in_dollars_is_kept,
    a_budget_in_dollars_needs_a_price,
}

const AGENT: &str = "
tools: [file_ops]
enable_double_confirmation: false
";

fn agent(first_lines: &str) -> String {
    format!("{first_lines}{AGENT}")
}

const READ: &str =
    "{tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]}";

async fn run(service: &Service, agent: &str, body: Value) -> Value {
    service.run(agent, &body).await
}

async fn iterations(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/iterations", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn refusal(service: &Service, agent: &str, body: Value) -> (u16, Value) {
    let answer = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &body).await;
    (answer.status.as_u16(), answer.body)
}

async fn a_fallback_stays_for_the_rest_of_the_run_and_over_a_crash(db: Db) {
    let broken = "steps: [{error: {status: 503, retry_after: 0.001}}]";
    let good = |delay_ms: u32| {
        format!(
            "steps: [{READ}, {READ}, {READ}, {READ}, {READ}, {{text: slow, delay_ms: {delay_ms}}}, {{text: done}}]"
        )
    };
    let mut service = Setup::new()
        .agent(
            "reader",
            &agent("model: scripted/broken\nfallback_models: [scripted/missing, scripted/good]"),
        )
        .scenario("broken", broken)
        .scenario("good", &good(600_000))
        .file("notes.txt", "x\n")
        .start(db)
        .await;
    let id = "0197aaaa-0000-7000-8000-000000000001";
    let start = service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative");
    let start = start.header("Prefer", "respond-async").json(&json!({"run_id": id}));
    assert_eq!(start.send().await.unwrap().status(), 202);
    let path = format!("/v1/runs/{id}");
    service
        .until(&format!("{path}/iterations"), |page| !page["data"].as_array().unwrap().is_empty())
        .await;
    service.kill().await;
    service.write("scenarios/good.yaml", &good(0));
    service.restart().await;
    let run = service.until(&path, |run| run["status"] == "completed").await;
    assert_eq!(run["model"], "scripted/good", "{run:#}");
    let iterations = iterations(&service, &run).await;
    assert!(iterations.len() > 1, "some behind the crash: {iterations:#?}");
    for iteration in &iterations {
        let answered_by = (&iteration["provider"], &iteration["model"], &iteration["fallback"]);
        assert_eq!(answered_by, (&json!("scripted"), &json!("good"), &json!(true)));
    }
    assert_eq!(iterations[0]["retries"], 4, "three tries of one model, one of the other");
    assert!(
        iterations[1..].iter().all(|iteration| iteration["retries"] == 0),
        "it stayed: {iterations:#?}"
    );
}

async fn a_bad_request_is_not_tried_elsewhere(db: Db) {
    let service = Setup::new()
        .agent("asker", &agent("model: scripted/refusing\nfallback_models: [scripted/good]"))
        .scenario(
            "refusing",
            "steps: [{error: {status: 400, message: no such parameter, code: bad_parameter}}]",
        )
        .scenario("good", "steps: [{text: done}]")
        .start(db)
        .await;
    let run = run(&service, "asker", json!({})).await;
    assert_eq!((&run["status"], &run["error"]["code"]), (&json!("failed"), &json!("MODEL_ERROR")));
    let context = &run["error"]["context"];
    assert_eq!(
        (&context["status"], &context["attempts"], &context["provider_code"]),
        (&json!(400), &json!(1), &json!("bad_parameter"))
    );
    assert_eq!(context["provider_message"], "no such parameter");
}

fn mock_config(mock: &MockModel, more: &str) -> String {
    format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n{more}", mock.base_url())
}

async fn a_dead_model_is_left_alone(db: Db) {
    let mock = MockModel::start().await;
    mock.always(Reply::error(503, "overloaded", None));
    let config = mock_config(&mock, "max_retries = 0");
    let service =
        Setup::new().agent("asker", &agent("model: mock/dead")).config(&config).start(db).await;
    for called in 1..=9 {
        let run = run(&service, "asker", json!({})).await;
        let context = &run["error"]["context"];
        assert_eq!(
            (&run["error"]["code"], &run["iterations"]),
            (&json!("MODEL_ERROR"), &json!(0)),
            "{run:#}"
        );
        let said = [&context["status"], &context["provider_code"], &context["provider_message"]];
        // What the provider said to another run is not told to this one.
        let (expected, why) = match called {
            1..=6 => {
                ([json!(503), json!("overloaded"), json!("overloaded happened")], "overloaded")
            }
            _ => ([Value::Null, Value::Null, Value::Null], "its last calls failed"),
        };
        assert_eq!(said, expected.each_ref(), "{run:#}");
        assert!(run["error"]["message"].as_str().unwrap().contains(why), "{run:#}");
        assert_eq!(context["attempts"], i32::from(called <= 6), "{run:#}");
    }
    service.until_logged("breaker opened").await;
    let opened = service.log();
    let opened = opened.lines().find(|line| line.contains("breaker opened")).unwrap();
    for word in ["mock", "dead", "503", "30"] {
        assert!(opened.contains(word), "{word}: {opened}");
    }
    let metrics = service.http.get(service.url("/metrics")).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(metrics.contains("toolloop_breakers_open{provider=\"mock\"} 1\n"), "{metrics}");
    assert_eq!(mock.requests().len(), 6);
}

async fn bursts_of_failures_are_outlived(db: Db) {
    const RUNS: usize = 200;
    let mock = MockModel::start().await;
    mock.always(Reply::Unsteady {
        seed: 17,
        percent: 30,
        otherwise: Box::new(Reply::text("done")),
    });
    let config = mock_config(&mock, "");
    let service =
        Setup::new().agent("asker", &agent("model: mock/shaky")).config(&config).start(db).await;
    let body = json!({});
    let runs = futures::future::join_all((0..RUNS).map(|_| service.run("asker", &body))).await;
    let completed = runs.iter().filter(|run| run["status"] == "completed").count();
    assert!(completed * 100 >= RUNS * 99, "{completed} of {RUNS} completed");
    let calls = mock.requests().len();
    assert!(calls > RUNS && calls * 10 < RUNS * 16, "{calls} calls for {RUNS} answers");
    let seldom = "the breaker stayed closed";
    assert!(!service.log().contains("breaker opened"), "{seldom}");
}

/// A scripted model that takes no forced choice.
fn weak(yaml: &str, steps: &str) -> Setup {
    Setup::new()
        .agent("reader", &agent(yaml))
        .scenario("weak", steps)
        .file("notes.txt", "x\n")
        .config("[capabilities.\"scripted/we*\"]\nforced_tool_choice = false\n")
}

async fn a_choice_that_cannot_be_sent_is_asked_for_in_words(db: Db) {
    let yaml = "model: scripted/weak\ntool_choice: first_required";
    let service =
        weak(yaml, &format!("steps: [{{text: guess}}, {READ}, {{text: done}}]")).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["status"], &run["output"]),
        (&json!("completed"), &json!({"result": "done"})),
        "{run:#}"
    );
    assert_eq!(
        (&run["iterations"], &run["tool_calls_made"], &run["attempts"]),
        (&json!(3), &json!(1), &json!(1))
    );
    let warnings = run["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 1, "told once: {warnings:?}");
    assert!(
        warnings[0]
            .as_str()
            .unwrap()
            .starts_with("scripted/weak cannot be made to answer with a tool call")
    );
    let events =
        service.get(&format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap())).await.body;
    let unmet: Vec<&Value> = events["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["type"] == "tool_choice.unmet")
        .collect();
    assert_eq!(unmet.len(), 1);
    let messages =
        service.get(&format!("/v1/runs/{}/messages", run["run_id"].as_str().unwrap())).await.body;
    let prompt = unmet[0]["data"]["prompt"].as_str().unwrap();
    assert!(
        messages["data"].as_array().unwrap().iter().any(|message| message["content"] == prompt),
        "{messages:#}"
    );

    service.write("scenarios/weak.yaml", "steps: [{text: guess}]");
    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(2)), "{run:#}");
    assert_eq!(run["warnings"].as_array().unwrap().len(), 2, "{run:#}");
}

async fn a_strict_choice_is_refused_where_it_cannot_be_sent(db: Db) {
    let yaml = "model: scripted/weak\ntool_choice: {tool: file_ops}";
    let service = weak(yaml, "steps: [{text: x}]")
        .agent("strict", &agent("model: scripted/weak\ntool_choice: first_required\nstrict_tool_choice: true"))
        .agent(
            "fallen",
            &agent("model: scripted/strong\nfallback_models: [scripted/weak]\ntool_choice: first_required"),
        )
        .scenario("strong", "steps: [{text: x}]")
        .start(db)
        .await;
    let ready = service.get("/readyz").await.body;
    let problems = ready["definitions"].as_array().unwrap();
    assert_eq!(problems.len(), 1, "{ready:#}");
    let problem = problems[0]["error"].as_str().unwrap();
    assert!(
        problem.contains("strict_tool_choice: scripted/weak cannot be made to call a tool"),
        "{problem}"
    );
    assert_eq!(refusal(&service, "strict", json!({})).await.0, 404);
    for agent in ["reader", "fallen"] {
        let (status, body) = refusal(&service, agent, json!({"strict_tool_choice": true})).await;
        assert_eq!((status, &body["code"]), (422, &json!("INVALID_OVERRIDE")), "{body:#}");
        assert_eq!(body["errors"][0]["pointer"], "/strict_tool_choice", "{body:#}");
    }
    let run =
        service.run("reader", &json!({"strict_tool_choice": true, "tool_choice": "auto"})).await;
    assert_eq!(run["status"], "completed", "nothing is demanded: {run:#}");
}

async fn a_model_that_ignores_a_strict_choice_fails(db: Db) {
    let mock = MockModel::start().await;
    mock.always(Reply::text("from memory"));
    let config = mock_config(&mock, "max_retries = 0");
    let asker = agent("model: mock/deaf\ntool_choice: first_required\nlimits: {max_attempts: 2}");
    let service = Setup::new().agent("asker", &asker).config(&config).start(db).await;
    let run = service.run("asker", &json!({"strict_tool_choice": true})).await;
    assert_eq!(
        (&run["status"], &run["error"]["code"]),
        (&json!("failed"), &json!("INVALID_RESPONSE")),
        "{run:#}"
    );
    assert_eq!((&run["attempts"], &run["iterations"]), (&json!(2), &json!(2)));
    assert!(mock.requests().iter().all(|seen| seen.body["tool_choice"] == "required"));
    assert_eq!(mock.refusals(), Vec::<String>::new());
}

const PRICES: &str = "[prices.\"scripted/pri*\"]\ninput = 2.0\ncached_input = 0.5\noutput = 10.0\n";
const USAGE: &str = "usage: {input_tokens: 1000, output_tokens: 100, cached_input_tokens: 400}";

fn priced(more: &str) -> Setup {
    let reading = READ.replace("]}", &format!("], {USAGE}}}"));
    assert!(reading.contains("usage"));
    let steps = format!("steps: [{reading}, {{text: done, {USAGE}}}]");
    Setup::new()
        .agent("reader", &agent(&format!("model: scripted/priced{more}")))
        .agent("free", &agent("model: scripted/unpriced"))
        .scenario("priced", &steps)
        .scenario("unpriced", &steps)
        .file("notes.txt", "x\n")
        .config(PRICES)
}

async fn a_run_has_a_cost(db: Db) {
    let service = priced("").start(db).await;
    let run = service.run("reader", &json!({})).await;
    // 600 x 2 + 400 x 0.5 + 100 x 10 = 2400 millionths a call
    assert_eq!(run["usage"]["cost_usd"], 0.0048, "{run:#}");
    let costs: Vec<Value> = iterations(&service, &run)
        .await
        .into_iter()
        .map(|row| row["usage"]["cost_usd"].clone())
        .collect();
    assert_eq!(costs, [0.0024, 0.0024]);
    let detail = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(detail["budget"]["used"]["cost_usd"], 0.0048);
    let run = service.run("free", &json!({})).await;
    assert_eq!(run["usage"]["cost_usd"], Value::Null);
}

async fn a_budget_in_dollars_is_kept(db: Db) {
    let service = priced("\ngovernance: {budget: {max_cost_usd: 0.02}}").start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    // A second call may cost 1101 x 2 for its input, the result of the first one included, and 256 x
    // 10 for its output: not with 0.0046 left.
    let run = service.run("reader", &json!({"budget": {"max_cost_usd": 0.007}})).await;
    assert_eq!(
        (&run["status"], &run["error"]["code"]),
        (&json!("failed"), &json!("BUDGET_EXCEEDED")),
        "{run:#}"
    );
    assert_eq!(
        run["error"]["context"],
        json!({"limit": "max_cost_usd", "used": 0.0024, "max": 0.007, "needs": 0.004_762})
    );
    assert_eq!(run["iterations"], 1);
    let detail = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(detail["budget"]["limits"]["max_cost_usd"], 0.007);
    let run = service.run("reader", &json!({"budget": {"max_cost_usd": 0.001}})).await;
    assert_eq!(
        (&run["error"]["code"], &run["iterations"]),
        (&json!("BUDGET_EXCEEDED"), &json!(0)),
        "{run:#}"
    );
    assert_eq!(run["usage"]["cost_usd"], 0.0, "there is a price, and nothing to pay: {run:#}");
    let detail = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(detail["usage"]["cost_usd"], 0.0, "{detail:#}");
    assert_eq!(detail["budget"]["used"]["cost_usd"], 0.0, "{detail:#}");
    let wider = service.run("reader", &json!({"budget": {"max_cost_usd": 100}})).await;
    let detail = service.get(&format!("/v1/runs/{}", wider["run_id"].as_str().unwrap())).await.body;
    assert_eq!(detail["budget"]["limits"]["max_cost_usd"], 0.02, "a request only narrows");
}

async fn a_budget_in_dollars_needs_a_price(db: Db) {
    let service = priced("")
        .agent("poor", &agent("model: scripted/unpriced\ngovernance: {budget: {max_cost_usd: 1}}"))
        .start(db)
        .await;
    let ready = service.get("/readyz").await.body;
    let problem = ready["definitions"][0]["error"].as_str().unwrap();
    assert!(problem.contains("max_cost_usd: scripted/unpriced has no price"), "{problem}");
    for budget in
        [json!({"max_cost_usd": 1}), json!({"max_cost_usd": 0}), json!({"max_cost_usd": -1})]
    {
        let agent = if budget["max_cost_usd"] == 1 { "free" } else { "reader" };
        let (status, body) = refusal(&service, agent, json!({ "budget": budget })).await;
        assert_eq!((status, &body["code"]), (422, &json!("INVALID_OVERRIDE")), "{body:#}");
        assert_eq!(body["errors"][0]["pointer"], "/budget/max_cost_usd", "{body:#}");
    }
}
