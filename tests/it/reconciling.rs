//! Calls that must not be repeated and that a crash interrupted, of tools that can be asked what became of
//! them.
//!
//! | together with | what holds | where |
//! |---|---|---|
//! | kill -9 and restart, both stores | 2xx: its body is the result; 404: executed now, with the same key; else `on_unknown_outcome` | `the_answer_decides`; `process_faults` for many rounds |
//! | takeover by another replica | the same | `another_replica_asks` |
//! | cancel while the tool is asked | the run ends, the outcome stays unknown, nothing is executed | `a_cancel_ends_the_question` |
//! | death while the tool is asked | it is asked again | `a_death_during_the_question_repeats_it` |
//! | a review that stands | is not asked about again; `did_not_happen` executes the call | `the_answer_decides` |
//! | limits reached, time up, too many crashes | a person is asked before the run ends | `a_run_at_its_limit_is_reviewed`, `machine/crashes.rs` |
//! | children | a child's call is asked about like any other | `the_answer_decides` |
//! | dry run | makes no calls, so it asks nothing | |
//! | approval before the crash | the approved arguments are asked about, and executed | `approved_arguments_are_asked_about` |
//! | several calls of one response | those with a result are not repeated, later ones follow | `the_answer_decides` |
//! | tool removed or changed | a person is asked, and the tool is not | `a_tool_that_has_changed_is_not_asked` |
//! | `report`, `retry` | hold where the tool does not know | `the_answer_decides` |
//! | secrets, 16 MiB, a redirect | removed as from any result; an error result of a call that took effect; no answer | `the_answer_decides` |
//! | programs | the same | `programs_are_asked_by_programs` |
//! | sessions, streams, skills, memory | see a result like any other | |

mod shop;

use serde_json::{Value, json};

use crate::approvals::{ended, paths, text, types};
use crate::service::{Db, Service, Setup, Signal, on_both_stores};
use shop::{SECRET, Shop, tools};

on_both_stores! {
    the_answer_decides,
    a_cancel_ends_the_question,
    a_death_during_the_question_repeats_it,
    approved_arguments_are_asked_about,
    a_run_at_its_limit_is_reviewed,
    a_tool_that_has_changed_is_not_asked,
    programs_are_asked_by_programs,
}

const LEASE: &str = "[runtime]\nlease = \"2s\"";

/// An agent that makes these calls and says what came of the last one.
fn agent(setup: Setup, name: &str, more: &str, calls: &str) -> Setup {
    let tools = match calls {
        _ if calls.contains("agent:") => "agent:orders",
        _ if calls.contains("script:") => "script:programs/*",
        _ => "http:shop/*",
    };
    let definition = format!(
        "model: scripted/{name}\ntools: ['{tools}']\n\
         enable_double_confirmation: false\ninputs: {{type: object}}\n{more}"
    );
    let governance = "governance: {autonomy: full, paths: {write: ['./**']}}\n";
    let definition =
        if more.contains("governance:") { definition } else { format!("{definition}{governance}") };
    setup.agent(name, &definition).scenario(
        name,
        &format!("steps: [{{tool_calls: [{calls}]}}, {{text: '{{{{ results | last }}}}'}}]"),
    )
}

const ORDER: &str = "{tool: 'http:shop/order', arguments: {name: '{{ inputs.name }}', count: 1}}";

fn orders(setup: Setup) -> Setup {
    let option = |what: &str| {
        format!("tool_options: {{'http:shop/order': {{on_unknown_outcome: {what}}}}}\n")
    };
    let around = format!(
        "{{tool: 'http:shop/look', arguments: {{name: first}}}}, {ORDER}, {{tool: 'http:shop/plain', \
         arguments: {{name: 'never {{{{ inputs.name }}}}'}}}}"
    );
    let child = "{tool: 'agent:orders', arguments: {name: '{{ inputs.name }}'}}";
    let setup = agent(setup, "orders", "", ORDER);
    let setup = agent(setup, "reports", &option("report"), ORDER);
    let setup = agent(setup, "repeats", &option("retry"), ORDER);
    let setup = agent(setup, "several", "", &around);
    agent(setup, "parent", "", child)
}

async fn start(shop: &Shop, db: Db, more: impl Fn(Setup) -> Setup) -> Service {
    let setup = orders(Setup::new().config(LEASE).tools("shop", &tools(&shop.url)));
    more(setup).start(db).await
}

/// Queues a run; its path.
async fn enqueue(service: &Service, agent: &str, name: &str) -> String {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    let request = service.request(reqwest::Method::POST, &path);
    let request =
        request.header("prefer", "respond-async").json(&json!({"inputs": {"name": name}}));
    let accepted = crate::service::answer(request).await;
    assert_eq!(accepted.status, 202, "{:#}", accepted.body);
    format!("/v1/runs/{}", text(&accepted.body, "run_id"))
}

async fn dies(service: &mut Service) {
    service.signal(Signal::KILL);
    service.exit_code().await;
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy)]
enum Then {
    /// Its result is that of the answer.
    Happened(&'static str),
    /// The same, which is an error.
    Failed(&'static str),
    /// It is executed now.
    Executed,
    /// It is executed although the tool does not know.
    Repeated,
    /// The model learns that it is not known.
    Reported,
    /// A person is asked, for this reason.
    Reviewed(&'static str),
}
use Then::{Executed, Failed, Happened, Repeated, Reported, Reviewed};

const CASES: [(&str, &str, Then); 13] = [
    ("orders", "after truth", Happened("order of after truth")),
    ("orders", "before truth", Executed),
    ("orders", "after 500", Reviewed("the service answered 500 Internal Server Error.")),
    ("orders", "after 302", Reviewed("the service answered 302 Found.")),
    ("orders", "after large", Failed("which is too large")),
    ("orders", "after odd", Failed("nothing at /order")),
    ("orders", "after secret", Happened("seen with [redacted]")),
    ("reports", "after, reported 500", Reported),
    ("reports", "before, reported truth", Executed),
    ("repeats", "after, repeated 500", Repeated),
    ("repeats", "after, repeated truth", Happened("order of after, repeated truth")),
    ("several", "after several truth", Happened("order of never after several truth")),
    ("parent", "before child truth", Executed),
];

async fn the_answer_decides(db: Db) {
    let shop = Shop::start().await;
    let mut service = start(&shop, db, |setup| setup).await;
    let mut runs = Vec::new();
    for (agent, name, _) in CASES {
        runs.push(enqueue(&service, agent, name).await);
    }
    shop.until_held(CASES.len()).await;
    dies(&mut service).await;
    service.restart().await;
    for ((agent, name, then), run) in CASES.iter().zip(&runs) {
        let run = if *agent == "parent" { &child_of(&service, run).await } else { run };
        follow(&shop, &service, run, name, *then).await;
    }
    // A review that stands is not asked about again.
    dies(&mut service).await;
    service.restart().await;
    for ((_, name, then), run) in CASES.iter().zip(&runs) {
        let Reviewed(_) = then else { continue };
        let parked = service.until(run, |run| run["status"] == "needs_review").await;
        let resolve = format!("{}/resolve", paths(&parked).1[0]);
        let outcome = json!({"outcome": "did_not_happen"});
        assert_eq!(service.post(&resolve, &outcome).await.status, 200);
        let done = ended(&service, run).await;
        assert_eq!(done["output"]["result"], format!("order of {name}"), "{done:#}");
        assert_eq!(shop.asked_of(name).len(), 1, "{name}");
    }
    assert!(!service.log().contains("hunter2"), "{}", service.log());
}

async fn follow(shop: &Shop, service: &Service, run: &str, name: &str, then: Then) {
    let order = shop.orders_of(name).remove(0);
    if let Reviewed(why) = then {
        let parked = service.until(run, |run| run["status"] == "needs_review").await;
        let pending = &parked["pending"][0];
        assert_eq!(pending["arguments"], json!({"name": name, "count": 1}), "{pending:#}");
        let reason = text(pending, "reason");
        assert!(reason.ends_with(why) && reason.contains("gave no answer"), "{reason}");
        assert!(!reason.contains("hunter2"), "{reason}");
    } else {
        let done = ended(service, run).await;
        assert_eq!(done["status"], "completed", "{name}: {done:#}");
        let output = &done["output"];
        let told = output["order"].as_str().unwrap_or_else(|| text(output, "result"));
        match then {
            Happened(result) => assert_eq!(told, result, "{name}"),
            Failed(why) => {
                assert!(told.contains("took effect") && told.contains(why), "{name}: {told}");
            }
            Executed | Repeated => assert_eq!(told, format!("order of {name}")),
            Reported => assert!(told.contains("whether it took effect is unknown"), "{told}"),
            Reviewed(_) => {}
        }
    }
    let is_repeated = matches!(then, Executed | Repeated);
    let made = shop.orders_of(name);
    assert_eq!(made.len(), 1 + usize::from(is_repeated), "{name}: {made:?}");
    assert!(made.iter().all(|made| made.key == order.key && !made.key.is_empty()), "{made:?}");
    let asked = shop.asked_of(name);
    assert_eq!(asked.len(), 1, "{name}: {asked:?}");
    assert_eq!((&asked[0].key, &asked[0].count), (&order.key, &"1".to_owned()), "{asked:?}");
    on_record(service, run, &asked[0].id, then).await;
}

/// The run that a run which has ended has started.
async fn child_of(service: &Service, run: &str) -> String {
    let done = ended(service, run).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    format!("/v1/runs/{}", text(&calls["data"][0], "child_run_id"))
}

/// What the journal, the rows and the audit log say.
async fn on_record(service: &Service, run: &str, call: &str, then: Then) {
    let reconciled = match then {
        Happened(_) | Failed(_) => json!("happened"),
        Executed => json!("did_not_happen"),
        Repeated | Reported | Reviewed(_) => Value::Null,
    };
    let events = service.get(&format!("{run}/events?limit=200")).await.body;
    let events = events["data"].as_array().unwrap();
    let of_call = |kind: &str| {
        let of = events.iter().filter(|it| it["type"] == kind && it["data"]["call_id"] == call);
        of.cloned().collect::<Vec<_>>()
    };
    let started = of_call("tool_call.started");
    assert_eq!(started.len(), 2, "{events:#?}");
    assert_eq!(text(&started[0]["data"], "reconcilable_by").len(), 64);
    let completed = of_call("tool_call.completed");
    let is_reviewed = matches!(then, Reviewed(_));
    assert_eq!(completed.len(), usize::from(!is_reviewed), "{events:#?}");
    let rows = service.get(&format!("{run}/tool-calls")).await.body;
    let row = rows["data"].as_array().unwrap().iter().find(|row| row["id"] == call).unwrap();
    if !is_reviewed {
        assert_eq!(completed[0]["data"]["reconciled"], reconciled, "{completed:#?}");
        assert_eq!(row["reconciled"], reconciled, "{row:#}");
    }
    let id = run.rsplit('/').next().unwrap();
    let audit = service.get(&format!("/v1/audit?action=tool_call&run_id={id}&limit=200")).await;
    let records = audit.body["data"].as_array().unwrap().clone();
    let tool = &row["tool"];
    let mut outcomes: Vec<(String, String)> = records
        .iter()
        .filter(|record| record["tool"] == *tool)
        .map(|record| (text(record, "rule").to_owned(), text(record, "outcome").to_owned()))
        .filter(|(rule, _)| rule == "recovery" || rule == "reconcile")
        .collect();
    outcomes.sort();
    let answer = match then {
        Happened(_) => "succeeded",
        Failed(_) => "failed",
        Executed => "not_executed",
        Repeated | Reported | Reviewed(_) => "unknown",
    };
    let expected = [("reconcile", answer), ("recovery", "unknown")];
    let expected = expected.map(|(rule, outcome)| (rule.to_owned(), outcome.to_owned()));
    assert_eq!(outcomes, expected, "{records:#?}");
    let secret = std::env::var(SECRET).unwrap();
    assert!(!audit.body.to_string().contains(&secret));
}

async fn a_cancel_ends_the_question(db: Db) {
    let shop = Shop::start().await;
    let mut service = start(&shop, db, |setup| setup).await;
    let run = enqueue(&service, "orders", "before truth").await;
    shop.until_held(1).await;
    dies(&mut service).await;
    shop.hold_questions(true);
    service.restart().await;
    shop.until_held(2).await;
    assert_eq!(service.post(&format!("{run}/cancel"), &json!({})).await.status, 202);
    let done = ended(&service, &run).await;
    assert_eq!(done["status"], "cancelled", "{done:#}");
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    assert_eq!(calls["data"][0]["state"], "unknown", "{calls:#}");
    assert!(text(&calls["data"][0], "result").contains("found out"), "{calls:#}");
    let audit = service.get("/v1/audit?tool=http:shop/order").await.body;
    let outcomes: Vec<_> =
        audit["data"].as_array().unwrap().iter().map(|r| &r["outcome"]).collect();
    assert_eq!(outcomes, ["unknown", "unknown"], "of the crash, and of the cancel: {audit:#}");
    shop.hold_questions(false);
    assert_eq!((shop.effects_of("before truth"), shop.asked_of("before truth").len()), (0, 1));
}

async fn a_death_during_the_question_repeats_it(db: Db) {
    let shop = Shop::start().await;
    let mut service = start(&shop, db, |setup| setup).await;
    let names = ["before truth", "after truth"];
    let mut runs = Vec::new();
    for name in names {
        runs.push(enqueue(&service, "orders", name).await);
    }
    shop.until_held(2).await;
    dies(&mut service).await;
    shop.hold_questions(true);
    service.restart().await;
    shop.until_held(4).await;
    dies(&mut service).await;
    shop.hold_questions(false);
    service.restart().await;
    for (name, run) in names.iter().zip(&runs) {
        let done = ended(&service, run).await;
        assert_eq!(done["output"]["result"], format!("order of {name}"), "{done:#}");
        assert_eq!((shop.effects_of(name), shop.asked_of(name).len()), (1, 2), "{name}");
    }
}

async fn approved_arguments_are_asked_about(db: Db) {
    let shop = Shop::start().await;
    let more = "governance: {autonomy: full, tool_policies: {'http:shop/order': ask}}\n";
    let mut service = start(&shop, db, |setup| agent(setup, "asks", more, ORDER)).await;
    let names = ["before truth", "after truth"];
    let mut runs = Vec::new();
    for name in names {
        let run = enqueue(&service, "asks", name).await;
        let parked = service.until(&run, |run| run["status"] == "awaiting_approval").await;
        let approve = format!("{}/approve", paths(&parked).1[0]);
        let edited = json!({"arguments": {"name": name, "count": 2}});
        assert_eq!(service.post(&approve, &edited).await.status, 200);
        runs.push(run);
    }
    shop.until_held(2).await;
    dies(&mut service).await;
    service.restart().await;
    for (name, run) in names.iter().zip(&runs) {
        let done = ended(&service, run).await;
        assert_eq!(done["output"]["result"], format!("order of {name}"), "{done:#}");
        let (made, asked) = (shop.orders_of(name), shop.asked_of(name));
        assert!(made.iter().all(|made| made.count == json!(2)), "{made:?}");
        assert_eq!((asked.len(), asked[0].count.as_str()), (1, "2"));
        assert_eq!(shop.effects_of(name), 1);
        let asked = types(&service, run).await;
        assert_eq!(asked.iter().filter(|it| *it == "approval.requested").count(), 1, "{asked:?}");
    }
}

async fn a_run_at_its_limit_is_reviewed(db: Db) {
    let shop = Shop::start().await;
    let requests = "governance: {autonomy: full, network: {max_requests: 1}}\n";
    let time = "governance: {autonomy: full, budget: {max_duration_seconds: 10}}\n";
    let mut service =
        start(&shop, db, |setup| agent(agent(setup, "one", requests, ORDER), "brief", time, ORDER))
            .await;
    let names = [("one", "after one truth"), ("brief", "after brief truth")];
    let mut runs = Vec::new();
    for (agent, name) in names {
        runs.push(enqueue(&service, agent, name).await);
    }
    shop.until_held(2).await;
    dies(&mut service).await;
    tokio::time::sleep(std::time::Duration::from_secs(10)).await; // the time of the other is up
    service.restart().await;
    for ((_, name), run) in names.iter().zip(&runs) {
        let parked = service.until(run, |run| run["status"] == "needs_review").await;
        assert!(shop.asked_of(name).is_empty(), "{name}");
        let resolve = format!("{}/resolve", paths(&parked).1[0]);
        let outcome = json!({"outcome": "happened", "result": "so it is"});
        assert_eq!(service.post(&resolve, &outcome).await.status, 200);
        let done = ended(&service, run).await;
        let calls = service.get(&format!("{run}/tool-calls")).await.body;
        assert!(text(&calls["data"][0], "result").contains("so it is"), "{done:#} {calls:#}");
        assert_eq!(shop.effects_of(name), 1);
    }
}

async fn a_tool_that_has_changed_is_not_asked(db: Db) {
    let shop = Shop::start().await;
    let mut service = start(&shop, db, |setup| setup).await;
    let name = "after truth";
    let run = enqueue(&service, "orders", name).await;
    shop.until_held(1).await;
    dies(&mut service).await;
    let changed = tools(&shop.url).replace("/orders/{{ call.key }}", "/looks/{{ call.key }}");
    service.write("tools/shop.yaml", &changed);
    service.restart().await;
    let parked = service.until(&run, |run| run["status"] == "needs_review").await;
    let reason = text(&parked["pending"][0], "reason").to_owned();
    assert!(reason.contains("declaration has changed"), "{reason}");
    assert!(shop.asked_of(name).is_empty());
    assert_eq!(shop.orders_of(name).len(), 1);

    let gone = enqueue(&service, "orders", "after gone").await;
    shop.until_held(2).await;
    dies(&mut service).await;
    service.write("tools/shop.yaml", "tools: []");
    service.restart().await;
    let parked = service.until(&gone, |run| run["status"] == "needs_review").await;
    let pending = &parked["pending"][0];
    assert_eq!(pending["arguments"], json!({"name": "after gone", "count": 1}), "{pending:#}");
    assert_eq!(shop.orders_of("after gone").len(), 1);
}

/// A program that holds the first time, before its effect or after it, and one that is asked about it.
const PROGRAMS: &str = r#"
tools:
  - name: keep
    description: Keeps.
    output_schema: {type: object, required: [kept], properties: {kept: {type: string}}}
    command:
      - sh
      - -c
      - |
        read -r line; cd "$TOOLLOOP_WORKSPACE"
        case "$line" in *after*) echo x >> "done-$TOOLLOOP_EFFECT_KEY";; esac
        if [ ! -e "held-$TOOLLOOP_EFFECT_KEY" ]; then : > "held-$TOOLLOOP_EFFECT_KEY"; sleep 600; fi
        echo x >> "done-$TOOLLOOP_EFFECT_KEY"
        echo '{"kept": "now"}'
    reconcile:
      - sh
      - -c
      - |
        read -r line; cd "$TOOLLOOP_WORKSPACE"
        echo x > asked 2> /dev/null
        case "$line" in
          *call_id*exit*) echo '{"outcome": "did_not_happen"}'; exit 3;;
          *call_id*odd*) echo '{"outcome": "happened", "result": {"kept": 1}}';;
          *call_id*mumble*) echo 'it did not happen';;
          *call_id*after*) echo '{"outcome": "happened", "result": {"kept": "then"}}';;
          *call_id*) echo '{"outcome": "did_not_happen"}';;
        esac
"#;

async fn programs_are_asked_by_programs(db: Db) {
    let keep = "{tool: 'script:programs/keep', arguments: {name: '{{ inputs.name }}'}}";
    let setup = Setup::new().config(LEASE).tools("programs", PROGRAMS);
    let mut service = agent(setup, "keeps", "", keep).start(db).await;
    let names = ["before", "after", "before exit", "after odd", "after mumble"];
    let mut runs = Vec::new();
    for name in names {
        runs.push(enqueue(&service, "keeps", name).await);
    }
    let workspace = service.dir.path().join("workspace/default");
    let files = |prefix: &str| {
        let entries = std::fs::read_dir(&workspace).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| name.starts_with(prefix)).count()
    };
    let held = async {
        while files("held-") < names.len() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(3), held).await.unwrap();
    dies(&mut service).await;
    service.restart().await;
    for (name, run) in names.iter().zip(&runs) {
        let why = match *name {
            "before exit" => "the program failed with exit code 3.",
            "after mumble" => "nor {\"outcome\": \"did_not_happen\"}.",
            _ => {
                let done = ended(&service, run).await;
                let output = &done["output"];
                match *name {
                    "before" => assert_eq!(output, &json!({"kept": "now"})),
                    "after" => assert_eq!(output, &json!({"kept": "then"})),
                    _ => {
                        let told = text(output, "result");
                        assert!(told.contains("took effect") && told.contains("/kept"), "{told}");
                    }
                }
                continue;
            }
        };
        let parked = service.until(run, |run| run["status"] == "needs_review").await;
        let reason = text(&parked["pending"][0], "reason").to_owned();
        assert!(reason.ends_with(why), "{reason}");
    }
    assert_eq!(files("done-"), 4, "before, and the three after");
    assert_eq!(files("asked"), 0, "a program that is asked only reads");
}

#[tokio::test]
async fn another_replica_asks() {
    let shop = Shop::start().await;
    let mut first = start(&shop, Db::Postgres, |setup| setup).await;
    let run = enqueue(&first, "orders", "after truth").await;
    let other = enqueue(&first, "orders", "before truth").await;
    shop.until_held(2).await;
    let setup = orders(Setup::new().config(LEASE).tools("shop", &tools(&shop.url)));
    let second = setup.start_on(first.database_url.clone()).await;
    dies(&mut first).await;
    for (run, name) in [(&run, "after truth"), (&other, "before truth")] {
        let done = ended(&second, run).await;
        assert_eq!(done["output"]["result"], format!("order of {name}"), "{done:#}");
        assert_eq!((shop.effects_of(name), shop.asked_of(name).len()), (1, 1));
    }
}
