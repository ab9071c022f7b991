//! Tools that ask a person in the middle of a call (`input_required` of MCP): the run is parked for its
//! client, and the call is made again with the answer. On both stores.
//!
//! | together with | test |
//! |---|---|
//! | pending, forms, answers, rounds, journal, audit, counts | `a_tool_asks_and_is_answered` |
//! | over HTTP | `a_tool_at_an_address_asks` |
//! | what is not offered, too much, to be asked again later | `a_request_for_input_that_is_not_offered_fails_the_call` |
//! | timeout, cancel, `throw_on_tool_failure` | `waiting_for_an_answer_ends` |
//! | approvals with other arguments, rate limits, replay of policies, dry run | `rules_decide_once` |
//! | children, calls side by side | `children_and_neighbours_ask_as_well` |
//! | crash while parked, and between rounds of a `once` call | `answers_survive_crashes` |
//! | another replica | `another_replica_makes_the_call_again`, `a_replica_that_lost_a_run_does_not_make_its_call_again` |
//! | console | `console_input` |
//! | streaming, sessions, webhooks | as of client tools |

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::{ended, paths, types};
use crate::mcp::{directory, results, until_up};
use crate::mcp_eras::{noted, program, until};
use crate::mock_mcp::{Mock, Speaks};
use crate::postgres_cluster;
use crate::script_tools::events;
use crate::service::{Answer, Db, Service, Setup, Signal, answer, on_both_stores};

on_both_stores! {
    a_tool_asks_and_is_answered,
    a_tool_at_an_address_asks,
    a_request_for_input_that_is_not_offered_fails_the_call,
    waiting_for_an_answer_ends,
    rules_decide_once,
    children_and_neighbours_ask_as_well,
    answers_survive_crashes,
}

const FULL: &str = "governance: {autonomy: full}";

/// An agent that makes these calls of `book`, each of which asks in these steps, one a turn.
pub fn booking(setup: Setup, name: &str, more: &str, calls: &[Value]) -> Setup {
    let call = |steps: &Value| {
        json!({"tool_calls": [{"tool": "mcp:odd/book", "arguments": {"steps": steps}}]}).to_string()
    };
    let calls: Vec<String> = calls.iter().map(call).collect();
    let definition = format!(
        "model: scripted/{name}\ntools: ['mcp:odd/*']\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 50}}\n{more}\n"
    );
    setup
        .agent(name, &definition)
        .scenario(name, &format!("steps: [{}, {{text: '{{{{ results[0] }}}}'}}]", calls.join(", ")))
}

pub fn asks(forms: &Value) -> Value {
    let forms = forms.as_object().unwrap().iter().map(|(name, params)| {
        (name.clone(), json!({"method": "elicitation/create", "params": params}))
    });
    json!({"inputRequests": forms.collect::<serde_json::Map<_, _>>()})
}

/// A step that asks for a number.
fn asks_n() -> Value {
    let form = json!({"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}});
    asks(&json!({"how many": {"message": "How many?", "requestedSchema": form}}))
}

fn accept(n: u32) -> Value {
    json!({"responses": {"how many": {"action": "accept", "content": {"n": n}}}})
}

pub fn setup() -> Setup {
    Setup::new().config(&program("odd", &["new"], ""))
}

pub async fn parked(service: &Service, agent: &str) -> Value {
    until_up(service).await;
    let parked = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}\n{}", parked.body, service.log());
    assert_eq!(parked.body["status"], "awaiting_tool_results", "{:#}", parked.body);
    parked.body
}

/// Answers what is asked now, unless the body says another round.
async fn give(service: &Service, call: &str, body: &Value) -> Answer {
    let mut body = body.clone();
    if body.get("responses").is_some() && body.get("round").is_none() {
        let (run, id) = call.split_once("/tool-calls/").unwrap();
        let run = service.get(run).await.body;
        let asked = run["pending"].as_array().unwrap().iter().find(|asked| asked["call_id"] == id);
        body["round"] = asked.map_or(json!(1), |asked| asked["input"]["round"].clone());
    }
    service.post(&format!("{call}/result"), &body).await
}

fn rounds(result: &str) -> Value {
    serde_json::from_str::<Value>(result).unwrap_or_else(|_| panic!("{result}"))["rounds"].clone()
}

fn of_first_round(given: &Value) -> Value {
    json!({"round": 1, "responses": given["responses"]})
}

/// Answers that are none of what is asked, and one of whom nothing was asked.
async fn wrong_answers_are_refused(service: &Service, call: &str, filled: &Value) {
    for (body, pointer) in [
        (json!({}), "/content"),
        (json!({"content": "Ada"}), "/content"),
        (json!({"content": "Ada", "responses": {}}), "/content"),
        (json!({"responses": {}}), "/responses/a~1b"),
        (json!({"responses": {"a/b": {"action": "accept"}}}), "/responses/a~1b/content"),
        (
            json!({"responses": {"a/b": {"action": "accept", "content": {"who": "x"}}}}),
            "/responses/a~1b/content/who",
        ),
    ] {
        let refused = give(service, call, &body).await;
        assert_eq!(refused.status, 422, "{body}");
        assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{body}: {:#}", refused.body);
    }
    let maybe = json!({"responses": {"a/b": {"action": "maybe"}}});
    assert_eq!(give(service, call, &maybe).await.status, 422);
    let of_no_round = service.post(&format!("{call}/result"), filled).await;
    assert_eq!(of_no_round.body["errors"][0]["pointer"], "/round", "{:#}", of_no_round.body);
    let key = json!({"name": "other", "scopes": ["agents:invoke"]});
    let key = service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned();
    let request = service.http.request(Method::POST, service.url(&format!("{call}/result")));
    let foreign = answer(request.bearer_auth(&key).json(&of_first_round(filled))).await;
    assert_eq!(foreign.status, 403, "{:#}", foreign.body);
}

async fn a_tool_asks_and_is_answered(db: Db) {
    let colours = json!([{"const": "#f00", "title": "Red", "x": 1}]);
    let form = json!({"type": "object", "required": ["who"], "$ref": "https://evil.example/", "properties": {
        "who": {"type": "string", "minLength": 2, "pattern": "("},
        "colour": {"type": "string", "oneOf": colours},
    }});
    let message = "Who? \u{202e}txet password: hunter2hunter2";
    let first =
        asks(&json!({"a/b": {"mode": "form", "message": message, "requestedSchema": form}}));
    let service = booking(setup(), "asker", FULL, &[json!([first, asks_n()])]).start(db).await;
    let run = parked(&service, "asker").await;
    let pending = run["pending"][0].clone();
    assert_eq!((&pending["kind"], &pending["tool"]), (&json!("client"), &json!("mcp:odd/book")));
    let input = &pending["input"];
    assert_eq!((&input["server"], &input["round"]), (&json!("odd"), &json!(1)), "{pending:#}");
    let shown = &input["requests"]["a/b"];
    let told = shown["message"].as_str().unwrap();
    assert!(told.contains("\\u{202e}") && !told.contains("hunter2"), "{told}");
    let kept = json!({"type": "object", "required": ["who"], "properties": {
        "who": {"type": "string", "minLength": 2},
        "colour": {"type": "string", "oneOf": [{"const": "#f00", "title": "Red"}]},
    }});
    assert_eq!(shown["requested_schema"], kept, "{shown:#}");
    assert_eq!(serde_json::from_str::<Value>(shown["display"].as_str().unwrap()).unwrap(), kept);
    let (path, calls) = paths(&run);
    assert_eq!(types(&service, &path).await.last().unwrap(), "tool_call.awaiting_client");
    let listed = service.get("/v1/approvals").await.body["data"][0].clone();
    assert_eq!((&listed["kind"], &listed["input"]), (&json!("client"), input));
    let state = service.get(&format!("{path}/tool-calls")).await.body["data"][0]["state"].clone();
    assert_eq!(state, "awaiting_client");

    let filled = json!({"responses": {"a/b": {"action": "accept", "content": {"who": "Ada", "colour": "#f00"}}}});
    wrong_answers_are_refused(&service, &calls[0], &filled).await;
    let taken = give(&service, &calls[0], &filled).await;
    assert_eq!(taken.status, 200, "{:#}", taken.body);
    service.until(&path, |run| run["pending"][0]["input"]["round"] == 2).await;
    let declined = json!({"responses": {"how many": {"action": "decline"}}});
    let again = give(&service, &calls[0], &of_first_round(&declined)).await;
    assert_eq!(again.status, 409, "an answer to what was asked before: {:#}", again.body);
    assert_eq!(give(&service, &calls[0], &declined).await.status, 200);
    let done = ended(&service, &path).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(give(&service, &calls[0], &declined).await.status, 409);
    assert_eq!((&done["tool_calls_made"], &done["labels"]), (&json!(1), &json!(["untrusted"])));
    assert_eq!(rounds(&results(&service, &done).await[0]), 2);
    assert_eq!(events(&service, &done, "tool_call.started").await.len(), 3);

    // The server has its state back as it was, with the answers, in requests of their own.
    let asked = noted(&service, "odd", "book.txt");
    let state = |n: u32| format!("{{\"n\": {n}, \"odd\": \"ä \u{2603} \\\" \\\\ /\"}}");
    assert_eq!(
        asked.iter().map(|it| it["state"].clone()).collect::<Vec<_>>(),
        [Value::Null, json!(state(1)), json!(state(2))]
    );
    assert_eq!(asked[1]["responses"], filled["responses"]);
    assert_eq!(asked[2]["responses"], declined["responses"]);
    assert!(asked[0]["id"] != asked[1]["id"] && asked[1]["id"] != asked[2]["id"]);
    let keys: Vec<Value> = noted(&service, "odd", "said.txt")
        .iter()
        .filter(|it| it["method"] == "tools/call")
        .map(|it| it["params"]["_meta"]["toolloop/effect-key"].clone())
        .collect();
    assert!(keys.len() == 3 && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    let all = service.get(&format!("{path}/events?limit=200")).await.body.to_string();
    assert!(!all.contains("requestState") && !all.contains("request_state"), "{all}");
    let audit = service.get("/v1/audit?limit=100").await.body;
    let of_client = |it: &&Value| it["rule"] == "client";
    let decided: Vec<&Value> = audit["data"].as_array().unwrap().iter().filter(of_client).collect();
    assert_eq!(decided.len(), 2, "{audit:#}");
    assert!(decided[1]["reason"].as_str().unwrap().contains("\"a/b\" accept"), "{decided:#?}");
}

async fn a_tool_at_an_address_asks(db: Db) {
    let mock = Mock::start(0, Speaks::New).await;
    let config = format!("[mcp.far]\nurl = \"{}\"\n", mock.url);
    let agent = "model: scripted/far\ntools: ['mcp:far/asks']\nenable_double_confirmation: false\n\
                 governance: {autonomy: full}\n";
    let service = Setup::new()
        .config(&config)
        .agent("far", agent)
        .scenario(
            "far",
            "steps: [{tool_calls: [{tool: 'mcp:far/asks', arguments: {}}]}, {text: done}]",
        )
        .start(db)
        .await;
    let run = parked(&service, "far").await;
    let (path, calls) = paths(&run);
    let given = json!({"responses": {"where": {"action": "accept", "content": {"city": "Ulm"}}}});
    assert_eq!(give(&service, &calls[0], &given).await.status, 200);
    let done = ended(&service, &path).await;
    let told = &results(&service, &done).await[0];
    assert_eq!(serde_json::from_str::<Value>(told).unwrap(), given["responses"], "{told}");
    assert_eq!(mock.refused(), Vec::<String>::new());
    // Each time it is sent is a request.
    assert_eq!(done["budget"]["used"]["network_requests"], 2, "{:#}", done["budget"]);
    assert_eq!(done["tool_calls_made"], 1);
}

async fn a_request_for_input_that_is_not_offered_fails_the_call(db: Db) {
    let sampling = json!({"a": {"method": "sampling/createMessage", "params": {"messages": []}}});
    let url = json!({"mode": "url", "message": "m", "url": "https://evil.example/"});
    let nested = json!({"message": "m", "requestedSchema": {"type": "object", "properties":
        {"a": {"type": "object", "properties": {}}}}});
    let later = json!({});
    let calls = [
        (json!([{"inputRequests": sampling}]), "asks for \"sampling/createMessage\", which is not"),
        (json!([asks(&json!({"a": url}))]), "asks in the mode \"url\", which is not offered"),
        (json!([asks(&json!({"a": nested}))]), "a field \"a\" that is not a string"),
        (json!([{"requestState": "x".repeat(70_000)}]), "more than 64 KiB"),
        (json!([later, later]), "\"rounds\": 2"),
        (json!([later, later, later, later, later, later, later, later]), "again and again"),
    ];
    let steps: Vec<Value> = calls.iter().map(|(steps, _)| steps.clone()).collect();
    let setup = booking(setup(), "asker", FULL, &steps);
    let many: Vec<Value> = (0..12).map(|_| asks_n()).collect();
    let service = booking(setup, "endless", FULL, &[json!(many)]).start(db).await;
    until_up(&service).await;
    let run = service.run("asker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let told = results(&service, &run).await;
    assert_eq!(told.len(), calls.len(), "{told:#?}");
    for ((_, why), told) in calls.iter().zip(&told) {
        assert!(told.contains(why), "{why}: {told}");
        if !told.contains("rounds") {
            assert!(
                told.starts_with("Error: The MCP server odd did not complete the call"),
                "{told}"
            );
            assert!(told.ends_with("It is unknown whether the call took effect."), "{told}");
        }
    }
    let run = parked(&service, "endless").await;
    let (path, calls) = paths(&run);
    for round in 1..=8 {
        service.until(&path, |run| run["pending"][0]["input"]["round"] == round).await;
        assert_eq!(give(&service, &calls[0], &accept(1)).await.status, 200);
    }
    let done = ended(&service, &path).await;
    let told = &results(&service, &done).await[0];
    assert!(told.contains("asks for input for more than 8 times"), "{told}");
}

async fn waiting_for_an_answer_ends(db: Db) {
    let hasty = format!("{FULL}\nclient_tool_timeout: 4s");
    let strict = format!("{hasty}\nthrow_on_tool_failure: true");
    let setup = booking(setup(), "hasty", &hasty, &[json!([asks_n()])]);
    let setup = booking(setup, "strict", &strict, &[json!([asks_n()])]);
    let service = booking(setup, "asker", FULL, &[json!([asks_n()])]).start(db).await;
    let (path, calls) = paths(&parked(&service, "hasty").await);
    let done = ended(&service, &path).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    let part = "It did not complete the call, and it is unknown whether it took effect in part.";
    assert_eq!(
        results(&service, &done).await[0],
        format!("Error: the tool asked for input, and no answer came in time. {part}")
    );
    assert_eq!(give(&service, &calls[0], &accept(1)).await.status, 409);
    let (path, _) = paths(&parked(&service, "strict").await);
    let done = ended(&service, &path).await;
    assert_eq!(done["error"]["code"], "TOOL_FAILURE", "{done:#}");

    let (path, calls) = paths(&parked(&service, "asker").await);
    service.post(&format!("{path}/cancel"), &json!({})).await;
    let done = service.until(&path, |run| run["status"] == "cancelled").await;
    assert_eq!(done["pending"], json!([]));
    let told = &results(&service, &done).await[0];
    assert!(told.contains("the tool asked for input") && told.contains(part), "{told}");
    assert_eq!(give(&service, &calls[0], &accept(1)).await.status, 409);
    let void = service.get("/v1/approvals?status=void").await.body;
    assert_eq!(void["data"].as_array().unwrap().len(), 1, "{void:#}");
    assert_eq!(noted(&service, "odd", "book.txt").len(), 3, "no call was made again");
}

async fn rules_decide_once(db: Db) {
    let asked = "governance: {autonomy: full, tool_policies: {'mcp:odd/book': ask}}\n\
                 tool_options: {'mcp:odd/book': {rate_limit_per_minute: 1}}";
    let service = booking(setup(), "asker", asked, &[json!([{"sleep": 60}])]).start(db).await;
    until_up(&service).await;
    let run = service.post("/v1/agents/asker/invoke-iterative", &json!({})).await.body;
    assert_eq!(run["status"], "awaiting_approval", "{run:#}");
    let (path, calls) = paths(&run);
    let edited = json!({"arguments": {"steps": [asks_n(), asks_n()]}});
    let approved = service.post(&format!("{}/approve", calls[0]), &edited).await;
    assert_eq!(approved.status, 200, "{:#}", approved.body);
    for round in 1..=2 {
        let run = service.until(&path, |run| run["pending"][0]["input"]["round"] == round).await;
        assert_eq!(run["pending"][0]["arguments"], edited["arguments"]);
        assert_eq!(give(&service, &calls[0], &accept(round)).await.status, 200);
    }
    let done = ended(&service, &path).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(rounds(&results(&service, &done).await[0]), 2, "{done:#}");
    assert_eq!(events(&service, &done, "approval.requested").await.len(), 1);
    assert_eq!(events(&service, &done, "tool_call.blocked").await, [] as [Value; 0]);
    let started = events(&service, &done, "tool_call.started").await;
    assert_eq!(started.len(), 3, "{started:#?}");
    assert_eq!(done["tool_calls_made"], 1);
    let replay = service.post("/v1/agents/asker/policy/replay", &json!({})).await;
    assert_eq!(replay.status, 200, "{:#}", replay.body);
    let dry = service.post("/v1/agents/asker/dry-run", &json!({})).await;
    assert_eq!(dry.status, 200, "{:#}", dry.body);
    assert_eq!(noted(&service, "odd", "book.txt").len(), 3, "neither has asked the server");
}

async fn children_and_neighbours_ask_as_well(db: Db) {
    let read = "[mcp.odd.effects]\nbook = \"read\"\necho = \"read\"";
    let setup = Setup::new().config(&program("odd", &["new"], read));
    let setup = booking(setup, "child", FULL, &[json!([asks_n()])]);
    let parent =
        "model: scripted/parent\ntools: ['agent:child']\nenable_double_confirmation: false\n";
    let book = json!({"tool": "mcp:odd/book", "arguments": {"steps": [asks_n()]}});
    let side = json!([book, {"tool": "mcp:odd/echo", "arguments": {"a": 1}}, book]);
    let service = setup
        .agent("parent", parent)
        .scenario("parent", "steps: [{tool_calls: [{tool: 'agent:child', arguments: {}}]}, {text: '{{ results[0] }}'}]")
        .agent("side", &format!("model: scripted/side\ntools: ['mcp:odd/*']\nparallel_tool_calls: true\nenable_double_confirmation: false\n{FULL}\n"))
        .scenario("side", &format!("steps: [{{tool_calls: {side}}}, {{text: done}}]"))
        .start(db)
        .await;
    let run = parked(&service, "parent").await;
    let pending = &run["pending"][0];
    assert_ne!(pending["run_id"], run["run_id"]);
    assert_eq!(pending["input"]["server"], "odd", "{pending:#}");
    let of_child = |id: &Value, call: &Value| {
        format!("/v1/runs/{}/tool-calls/{}", id.as_str().unwrap(), call.as_str().unwrap())
    };
    let call = of_child(&pending["run_id"], &pending["call_id"]);
    assert_eq!(give(&service, &call, &accept(3)).await.status, 200);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let done = ended(&service, &path).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert!(done["output"].to_string().contains("how many"), "{done:#}");

    let run = parked(&service, "side").await;
    let (path, calls) = paths(&run);
    assert_eq!(run["pending"].as_array().unwrap().len(), 2, "{run:#}");
    for (call, n) in calls.iter().zip(1..) {
        assert_eq!(give(&service, call, &accept(n)).await.status, 200);
    }
    let done = ended(&service, &path).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    let told = events(&service, &done, "tool_call.completed").await;
    assert_eq!(told.len(), 3);
    assert_eq!(done["tool_calls_made"], 3);
    for n in 1..=2 {
        let given = format!("\"n\": {n}");
        assert!(
            told.iter().any(|it| it["content"].as_str().unwrap().contains(&given)),
            "{told:#?}"
        );
    }
}

async fn answers_survive_crashes(db: Db) {
    let once = "[mcp.odd.effects]\nbook = \"once\"";
    let setup =
        Setup::new().config(&program("odd", &["new"], once)).config("[runtime]\nlease = \"2s\"");
    let slow = json!([asks_n(), {"sleep": 600}]);
    let setup = booking(setup, "slow", FULL, &[slow]);
    let mut service = booking(setup, "asker", FULL, &[json!([asks_n(), asks_n()])]).start(db).await;
    let (path, calls) = paths(&parked(&service, "asker").await);
    for round in 1..=2 {
        service.kill().await;
        service.restart().await;
        let run = service.until(&path, |run| run["pending"][0]["input"]["round"] == round).await;
        assert_eq!(run["status"], "awaiting_tool_results");
        service.until("/readyz", |ready| ready["mcp_servers"] == json!([])).await;
        assert_eq!(give(&service, &calls[0], &accept(round)).await.status, 200);
        if round == 1 {
            service.until(&path, |run| run["pending"][0]["input"]["round"] == 2).await;
        }
    }
    let done = ended(&service, &path).await;
    assert_eq!(rounds(&results(&service, &done).await[0]), 2, "{done:#}");
    assert_eq!(noted(&service, "odd", "book.txt").len(), 3, "each round once");

    let (path, calls) = paths(&parked(&service, "slow").await);
    assert_eq!(give(&service, &calls[0], &accept(1)).await.status, 200);
    for _ in 0..6000 {
        if noted(&service, "odd", "book.txt").len() == 5 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    service.kill().await;
    service.expect_reclaims();
    service.restart().await;
    let run = service.until(&path, |run| run["status"] == "needs_review").await;
    assert_eq!(run["pending"][0]["kind"], "review", "{run:#}");
    let happened = json!({"outcome": "happened", "result": "booked"});
    assert_eq!(service.post(&format!("{}/resolve", calls[0]), &happened).await.status, 200);
    let done = ended(&service, &path).await;
    assert!(results(&service, &done).await[0].ends_with("It returned: booked"), "{done:#}");
    assert_eq!(noted(&service, "odd", "book.txt").len(), 5, "it is not made again");
}

#[tokio::test]
async fn another_replica_makes_the_call_again() {
    let made = || booking(setup(), "asker", FULL, &[json!([asks_n()])]);
    let url = postgres_cluster::fresh_database().await;
    let mut first = made().start_on(url.clone()).await;
    let (path, calls) = paths(&parked(&first, "asker").await);
    let second = made().start_on(url).await;
    until_up(&second).await;
    first.kill().await;
    let shown = second.get(&path).await.body;
    assert_eq!(shown["pending"][0]["input"]["round"], 1, "{shown:#}");
    assert_eq!(give(&second, &calls[0], &accept(7)).await.status, 200);
    let done = ended(&second, &path).await;
    assert_eq!(rounds(&results(&second, &done).await[0]), 1, "{done:#}");
    let asked = noted(&second, "odd", "book.txt");
    assert_eq!((asked.len(), &asked[0]["n"]), (1, &json!(1)), "{asked:#?}");
    assert_eq!(noted(&first, "odd", "book.txt").len(), 1);
}

/// Suspends a service while a call waits for four seconds until it is made again: the run of the call.
async fn suspended_while_a_call_waits(service: &Service) -> String {
    let book = directory(service, "odd").join("book.txt");
    for _ in 0..20 {
        let before = noted(service, "odd", "book.txt").len();
        let run = service.enqueue("asker").await;
        until(|| noted(service, "odd", "book.txt").len() >= before + 5).await;
        service.signal(Signal::STOP);
        let last = book.metadata().unwrap().modified().unwrap();
        let waits = last.elapsed().unwrap_or_default() < Duration::from_secs(3);
        if waits && noted(service, "odd", "book.txt").len() == before + 5 {
            return run;
        }
        // A busy machine was too late.
        service.signal(Signal::CONT);
        ended(service, &run).await;
    }
    panic!("no call was suspended in time");
}

#[tokio::test]
async fn a_replica_that_lost_a_run_does_not_make_its_call_again() {
    let once = "[mcp.odd.effects]\nbook = \"once\"";
    let later = json!({});
    let steps = [json!([later, later, later, later, later])];
    let made = || {
        let setup = Setup::new().config(&program("odd", &["new"], once));
        booking(setup.config("[runtime]\nlease = \"8s\""), "asker", FULL, &steps)
    };
    let url = postgres_cluster::fresh_database().await;
    let mut first = made().start_on(url.clone()).await;
    until_up(&first).await;
    let run = suspended_while_a_call_waits(&first).await;
    let calls = noted(&first, "odd", "book.txt").len();
    let mut second = made().start_on(url).await;
    second.until(&run, |run| run["status"] == "needs_review").await;
    first.signal(Signal::CONT);
    first.until_logged("run stopped").await;
    assert_eq!(noted(&first, "odd", "book.txt").len(), calls);
    first.expect_reclaims();
    second.expect_reclaims();
}
