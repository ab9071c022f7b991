//! Webhooks: receivers are told what becomes of runs, whatever receivers, replicas and crashes do.
//!
//! | together with | test |
//! |---|---|
//! | signature, ids, metrics, command line (starts the same runs) | `receivers_are_told_how_a_run_goes` |
//! | retries, a lying receiver, `callback_errors` | `failed_deliveries_are_retried` |
//! | hanging and dripping receivers, other tenants' bounds | `a_receiver_that_hangs_delays_no_other` |
//! | a lane that cannot be claimed | `a_lane_that_cannot_be_claimed_holds_back_no_other` |
//! | 410, redelivery | `a_receiver_that_wants_no_more_is_left_alone` |
//! | redirects inward, private addresses | `nothing_is_sent_where_it_must_not_be` |
//! | refusals, dry run, single shot | `addresses_are_judged_before_the_run` |
//! | approvals, child runs, parked runs, cancel | `people_are_asked_and_children_ask_through_their_parents` |
//! | tenants, scopes | `deliveries_are_their_tenants` |
//! | crash between event and delivery, and in a delivery | `a_crash_loses_nothing` |
//! | another replica | `another_replica_delivers` |
//! | shutdown | `deliveries_under_way_at_a_shutdown_are_sent_after_it` |
//! | retention | `a_run_is_kept_until_its_webhooks_are_delivered` |
//! | console, streams, sessions, budgets, skills | nothing of a webhook differs there |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use parking_lot::Mutex;
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::claims::change;
use crate::fault_rounds::rounds;
use crate::postgres_cluster;
use crate::service::{Answer, Db, Service, Setup, Signal, answer, on_both_stores};

on_both_stores! {
    receivers_are_told_how_a_run_goes,
    failed_deliveries_are_retried,
    a_receiver_that_hangs_delays_no_other,
    many_receivers_that_hang_delay_no_other_for_long,
    an_event_that_cannot_be_read_stays_due,
    a_lane_that_cannot_be_claimed_holds_back_no_other,
    a_receiver_that_wants_no_more_is_left_alone,
    nothing_is_sent_where_it_must_not_be,
    addresses_are_judged_before_the_run,
    people_are_asked_and_children_ask_through_their_parents,
    deliveries_are_their_tenants,
    a_crash_loses_nothing,
    deliveries_under_way_at_a_shutdown_are_sent_after_it,
    a_run_is_kept_until_its_webhooks_are_delivered,
}

const KEY: [u8; 32] = [42; 32];

const ANSWERER: &str = "
model: scripted/answerer
instructions: Answer.
enable_double_confirmation: false
";

const WRITER: &str = "
model: scripted/writer
instructions: Write.
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";

const WRITES: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]
  - text: written
";

const PARENT: &str = "
model: scripted/parent
instructions: Delegate.
tools: ['agent:writer']
enable_double_confirmation: false
";

const DELEGATES: &str = r#"
steps:
  - tool_calls: [{tool: "agent:writer", arguments: {}}]
  - text: told
"#;

fn setup() -> Setup {
    Setup::new()
        .agent("answerer", ANSWERER)
        .scenario("answerer", "steps: [{text: done}]")
        .agent("writer", WRITER)
        .scenario("writer", WRITES)
        .agent("parent", PARENT)
        .scenario("parent", DELEGATES)
        .variable("HOOK_SECRET", &format!("whsec_{}", BASE64_STANDARD.encode(KEY)))
}

/// With receivers on this machine.
pub(crate) fn local() -> Setup {
    setup().config("[webhooks]\nsecret_env = \"HOOK_SECRET\"\nallow = [\"127.0.0.0/8\"]")
}

/// What a receiver does with a request.
#[derive(Debug, Clone)]
pub(crate) enum Does {
    Answers(u16),
    Redirects(String),
    /// Takes the request and never answers.
    Hangs,
}

#[derive(Debug, Clone)]
pub(crate) struct Told {
    headers: BTreeMap<String, String>,
    body: Bytes,
    at: Instant,
}

impl Told {
    pub(crate) fn event(&self) -> Value {
        serde_json::from_slice::<Value>(&self.body).unwrap()["data"].clone()
    }

    /// HMAC-SHA256 by its definition (RFC 2104), with nothing of the service's.
    fn has_signature(&self) -> bool {
        let mut padded = [0; 64];
        padded[..KEY.len()].copy_from_slice(&KEY);
        let hash = |pad: u8, text: &[u8]| {
            let pad = padded.map(|byte: u8| byte ^ pad);
            Sha256::new().chain_update(pad).chain_update(text).finalize().to_vec()
        };
        let (id, at) = (&self.headers["webhook-id"], &self.headers["webhook-timestamp"]);
        let signed = [format!("{id}.{at}.").as_bytes(), &self.body].concat();
        let expected = BASE64_STANDARD.encode(hash(0x5c, &hash(0x36, &signed)));
        self.headers["webhook-signature"] == format!("v1,{expected}")
    }
}

#[derive(Default)]
struct Shared {
    told: Mutex<Vec<Told>>,
    /// One after the other; the last for ever.
    script: Mutex<Vec<Does>>,
}

pub(crate) struct Receiver {
    pub(crate) url: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Receiver {
    pub(crate) async fn start(script: impl IntoIterator<Item = Does>) -> Self {
        let shared = Arc::new(Shared {
            told: Mutex::default(),
            script: Mutex::new(script.into_iter().collect()),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let app = Router::new().fallback(receive).with_state(Arc::clone(&shared));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, shared, server }
    }

    pub(crate) fn told(&self) -> Vec<Told> {
        self.shared.told.lock().clone()
    }

    pub(crate) fn now_does(&self, script: impl IntoIterator<Item = Does>) {
        *self.shared.script.lock() = script.into_iter().collect();
    }

    /// Waits until it was told so.
    pub(crate) async fn until(&self, what: impl Fn(&[Told]) -> bool) -> Vec<Told> {
        for _ in 0..6000 {
            let told = self.told();
            if what(&told) {
                return told;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it was told only {:#?}", self.told());
    }

    /// Waits until it was told of the end of so many runs.
    async fn until_ended(&self, runs: usize) -> Vec<Told> {
        let is_end = |told: &Told| told.event()["type"] == "run.completed";
        let ended = |told: &[Told]| told.iter().filter(|told| is_end(told)).map(run_of).collect();
        self.until(|told| BTreeSet::len(&ended(told)) >= runs).await
    }
}

pub(crate) fn run_of(told: &Told) -> String {
    told.event()["run_id"].as_str().unwrap().to_owned()
}

async fn receive(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let text = |(name, value): (&axum::http::HeaderName, &axum::http::HeaderValue)| {
        (name.to_string(), value.to_str().unwrap().to_owned())
    };
    let headers = headers.iter().map(text).collect();
    shared.told.lock().push(Told { headers, body, at: Instant::now() });
    let does = {
        let mut script = shared.script.lock();
        if script.len() > 1 { script.remove(0) } else { script[0].clone() }
    };
    match does {
        Does::Answers(status) => StatusCode::from_u16(status).unwrap().into_response(),
        Does::Redirects(to) => {
            (StatusCode::TEMPORARY_REDIRECT, [("location", to)], Body::empty()).into_response()
        }
        Does::Hangs => std::future::pending().await,
    }
}

async fn run(service: &Service, agent: &str, url: &str) -> Value {
    let run = service.run(agent, &json!({"webhook": {"url": url}})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    run
}

pub(crate) async fn enqueue(service: &Service, agent: &str, url: &str) -> String {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    let request = service.request(Method::POST, &path).header("prefer", "respond-async");
    let accepted = answer(request.json(&json!({"webhook": {"url": url}}))).await;
    assert_eq!(accepted.status, 202, "{:#}", accepted.body);
    accepted.body["run_id"].as_str().unwrap().to_owned()
}

/// The events of a run that its receiver is told of.
async fn telling(service: &Service, run: &str) -> Vec<Value> {
    let events = service.get(&format!("/v1/runs/{run}/events")).await.body;
    let is_told = |event: &&Value| {
        let kind = event["type"].as_str().unwrap();
        kind.starts_with("run.") || kind == "approval.requested"
    };
    events["data"].as_array().unwrap().iter().filter(is_told).cloned().collect()
}

/// Everything is told, each with one id, whatever comes twice.
async fn assert_all_told(service: &Service, run: &str, receiver: &Receiver) {
    let expected = telling(service, run).await;
    let of_run = |told: &[Told]| {
        let of_run = told.iter().filter(|told| run_of(told) == run);
        of_run.map(|told| told.event()["seq"].as_i64()).collect::<BTreeSet<_>>().len()
    };
    let told = receiver.until(|told| of_run(told) >= expected.len()).await;
    let mut by_seq = BTreeMap::<i64, (String, Value)>::new();
    for told in told.iter().filter(|told| run_of(told) == run) {
        assert!(told.has_signature(), "{told:?}");
        let event = told.event();
        let first = (told.headers["webhook-id"].clone(), event.clone());
        let known = by_seq.entry(event["seq"].as_i64().unwrap()).or_insert(first.clone());
        assert_eq!(*known, first, "the same event has the same id and the same body");
    }
    let told: Vec<Value> = by_seq.into_values().map(|(_, event)| event).collect();
    assert_eq!(told, expected);
}

async fn deliveries(service: &Service, query: &str) -> Vec<Value> {
    let list = service.get(&format!("/v1/webhooks/deliveries{query}")).await;
    assert_eq!(list.status, 200, "{:#}", list.body);
    list.body["data"].as_array().unwrap().clone()
}

async fn receivers_are_told_how_a_run_goes(db: Db) {
    let baker = ANSWERER.replace("answerer", "baker");
    let service = local()
        .agent(
            "baker",
            &format!("{baker}output: {{schema: {{type: object, required: [token]}}}}\n"),
        )
        .scenario(
            "baker",
            "steps: [{tool_calls: [{tool: output, arguments: {cookies: [oat], token: abc123}}]}]",
        )
        .start(db)
        .await;
    let receiver = Receiver::start([Does::Answers(204)]).await;
    let answer = run(&service, "answerer", &format!("{}?token=hidden", receiver.url)).await;
    let id = answer["run_id"].as_str().unwrap();
    receiver.until_ended(1).await;
    assert_all_told(&service, id, &receiver).await;
    let told = receiver.told();
    assert_eq!(told.len(), telling(&service, id).await.len(), "nothing came twice");
    let ids: BTreeSet<&String> = told.iter().map(|told| &told.headers["webhook-id"]).collect();
    assert_eq!(ids.len(), told.len());
    let body: Value = serde_json::from_slice(&told[0].body).unwrap();
    assert_eq!(body["type"], body["data"]["type"]);
    assert_eq!(body["timestamp"], body["data"]["at"]);
    assert_eq!(told[0].headers["content-type"], "application/json");

    let path = format!("/v1/webhooks/deliveries?run_id={id}&limit=1");
    let is_done = |list: &Value| list["data"][0]["status"] == "delivered";
    let newest = service.until(&path, is_done).await;
    let row = &newest["data"][0];
    assert_eq!((&row["event"], &row["url"]), (&json!("run.completed"), &json!(receiver.url)));
    assert_eq!((&row["attempts"], &row["response_status"]), (&json!(1), &json!(204)));
    assert!(newest["next_cursor"].is_string());
    let of_other = uuid::Uuid::now_v7();
    assert!(deliveries(&service, &format!("?run_id={of_other}")).await.is_empty());
    assert!(deliveries(&service, "?status=failed").await.is_empty());
    let shown = service.get(&format!("/v1/runs/{id}")).await.body;
    assert_eq!(shown["callback_errors"], json!([]));
    let metrics = service.get("/metrics").await.body;
    let count =
        format!("toolloop_webhook_deliveries_total{{outcome=\"delivered\"}} {}", told.len());
    assert!(metrics.as_str().unwrap().contains(&count), "{metrics}");

    // Without a webhook nothing is kept.
    service.run("answerer", &json!({})).await;
    assert_eq!(deliveries(&service, "").await.len(), told.len());

    // The output is that of the answer, whatever its fields are named.
    let ended = run(&service, "baker", &receiver.url).await;
    assert_eq!(ended["output"], json!({"cookies": ["oat"], "token": "abc123"}));
    receiver.until_ended(2).await;
    assert_all_told(&service, ended["run_id"].as_str().unwrap(), &receiver).await;
}

async fn failed_deliveries_are_retried(db: Db) {
    let service = local().start(db).await;
    let receiver = Receiver::start([Does::Answers(500)]).await;
    let id = enqueue(&service, "answerer", &receiver.url).await;
    let path = format!("/v1/runs/{id}");
    let failing = service
        .until(&path, |run| run["callback_errors"].as_array().is_some_and(|e| !e.is_empty()))
        .await;
    let error = &failing["callback_errors"][0];
    assert_eq!(
        (&error["status"], &error["message"]),
        (&json!(500), &json!("the receiver answered 500"))
    );
    assert_eq!(error["url"], json!(receiver.url));
    assert!(error["delivery_id"].is_string() && error["next_attempt_at"].is_string(), "{error:#}");
    receiver.now_does([Does::Answers(301), Does::Answers(200)]);
    service.until(&path, |run| run["status"] == "completed").await;
    service.until(&path, |run| run["callback_errors"] == json!([])).await;
    receiver.until_ended(1).await;
    assert_all_told(&service, &id, &receiver).await;
    let told = receiver.told();
    assert!(told.len() > telling(&service, &id).await.len(), "some came twice");
    let mut tries = BTreeMap::<&String, Vec<Instant>>::new();
    for told in &told {
        tries.entry(&told.headers["webhook-id"]).or_default().push(told.at);
    }
    for at in tries.values().filter(|at| at.len() > 1) {
        assert!(at[1] - at[0] >= Duration::from_millis(1500), "not at once");
    }
}

/// Takes connections and sends a byte of an answer's head now and then.
async fn dripping() -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 64]).await;
                for byte in b"HTTP/1.1 200 OK\r\nx-long: ".iter().chain([b'x'; 1000].iter()) {
                    if stream.write_all(&[*byte]).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            });
        }
    });
    (url, server)
}

/// How long it takes to tell a prompt receiver of so many runs, which are started one after another.
async fn delivered_in(service: &Service, runs: usize) -> Duration {
    let prompt = Receiver::start([Does::Answers(200)]).await;
    let begun = Instant::now();
    for _ in 0..runs {
        run(service, "answerer", &prompt.url).await;
    }
    prompt.until_ended(runs).await;
    begun.elapsed()
}

async fn a_receiver_that_hangs_delays_no_other(db: Db) {
    let service = local().start(db).await;
    let alone = delivered_in(&service, 20).await;
    let hanging = Receiver::start([Does::Hangs]).await;
    let (drip, dripping) = dripping().await;
    for _ in 0..12 {
        run(&service, "answerer", &hanging.url).await;
        run(&service, "answerer", &drip).await;
    }
    hanging.until(|told| told.len() >= 8).await;
    let prompt = Receiver::start([Does::Answers(200)]).await;
    for _ in 0..20 {
        run(&service, "answerer", &prompt.url).await;
    }
    let begun = Instant::now();
    prompt.until_ended(20).await;
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(8).max(3 * alone), "{took:?}, and alone {alone:?}");
    // Each hangs for fifteen seconds.
    let told = hanging.told();
    let soon = |one: &Told, other: &Told| other.at.duration_since(one.at) < Duration::from_secs(5);
    let at_once = (0..told.len())
        .map(|first| told[first..].iter().filter(|other| soon(&told[first], other)).count());
    let most = at_once.max();
    assert!(most.is_some_and(|most| most <= 8), "{most:?} of 8 at once");
    // A drop now and then is no answer.
    let is_late = |list: &Value| {
        let rows = list["data"].as_array().unwrap();
        let late = |row: &&Value| {
            row["error"].as_str().is_some_and(|error| error.contains("within 15 seconds"))
        };
        rows.iter().filter(late).map(|row| row["url"].to_string()).collect::<BTreeSet<_>>().len()
            == 2
    };
    service.until("/v1/webhooks/deliveries?status=pending&limit=200", is_late).await;
    dripping.abort();
}

async fn many_receivers_that_hang_delay_no_other_for_long(db: Db) {
    let service = local().start(db).await;
    let alone = delivered_in(&service, 1).await;
    let mut receivers = Vec::new();
    for _ in 0..9 {
        receivers.push(Receiver::start([Does::Hangs]).await);
    }
    // Lanes are looked at in the order of their names.
    receivers.sort_by(|one, other| one.url.cmp(&other.url));
    let prompt = receivers.pop().unwrap();
    prompt.now_does([Does::Answers(200)]);
    for _ in 0..12 {
        for hanging in &receivers {
            enqueue(&service, "answerer", &hanging.url).await;
        }
    }
    for hanging in &receivers {
        hanging.until(|told| told.len() >= 8).await;
    }
    let begun = Instant::now();
    run(&service, "answerer", &prompt.url).await;
    prompt.until_ended(1).await;
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(35) + 5 * alone, "{took:?}, and alone {alone:?}");
}

async fn an_event_that_cannot_be_read_stays_due(db: Db) {
    let service = local().start(db).await;
    let receiver = Receiver::start([Does::Answers(200)]).await;
    let answer = run(&service, "answerer", &receiver.url).await;
    let id = answer["run_id"].as_str().unwrap();
    receiver.until_ended(1).await;
    let list = format!("/v1/webhooks/deliveries?run_id={id}");
    let is_sent = |list: &Value| {
        list["data"].as_array().unwrap().iter().all(|row| row["status"] == "delivered")
    };
    let sent = service.until(&list, is_sent).await;
    let rows = sent["data"].as_array().unwrap();
    let end = rows.iter().find(|row| row["event"] == "run.completed").unwrap();
    let rename = async |from: &str, to: &str| {
        let renamed = format!("SET events = replace(events, '{from}', '{to}')");
        change(&service, &format!("UPDATE run_events {renamed} WHERE run_id = '{id}'")).await;
    };
    rename("run.completed", "run.of_the_future").await;
    let again = format!("/v1/webhooks/deliveries/{}/redeliver", end["id"].as_str().unwrap());
    let before = receiver.told().len();
    service.post(&again, &json!({})).await;
    let is_unread = |list: &Value| {
        let mut rows = list["data"].as_array().unwrap().iter();
        rows.any(|row| row["error"] == "the event cannot be read" && row["status"] == "pending")
    };
    service.until(&list, is_unread).await;
    assert_eq!(receiver.told().len(), before);
    rename("run.of_the_future", "run.completed").await;
    service.until(&list, is_sent).await;
    assert_eq!(receiver.told().len(), before + 1);
}

async fn a_lane_that_cannot_be_claimed_holds_back_no_other(db: Db) {
    let service = local().start(db).await;
    let mut first = Receiver::start([Does::Answers(200)]).await;
    let mut other = Receiver::start([Does::Answers(200)]).await;
    let lane = |receiver: &Receiver| {
        let host = receiver.url.trim_start_matches("http://").trim_end_matches("/hook");
        format!("default {host}")
    };
    if lane(&other) < lane(&first) {
        std::mem::swap(&mut first, &mut other);
    }
    let lane = lane(&first);
    let (refuse, allow) = if service.database_url.starts_with("postgres") {
        (
            format!(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 RAISE EXCEPTION 'refused'; END $$; \
                 CREATE TRIGGER refuse BEFORE UPDATE ON webhook_outbox FOR EACH ROW \
                 WHEN (OLD.lane = '{lane}') EXECUTE FUNCTION refuse()"
            ),
            "DROP TRIGGER refuse ON webhook_outbox",
        )
    } else {
        (
            format!(
                "CREATE TRIGGER refuse BEFORE UPDATE ON webhook_outbox \
                 WHEN OLD.lane = '{lane}' BEGIN SELECT RAISE(ABORT, 'refused'); END"
            ),
            "DROP TRIGGER refuse",
        )
    };
    change(&service, &refuse).await;
    run(&service, "answerer", &first.url).await;
    run(&service, "answerer", &other.url).await;
    other.until_ended(1).await;
    assert!(first.told().is_empty());
    change(&service, allow).await;
    first.until_ended(1).await;
}

async fn a_receiver_that_wants_no_more_is_left_alone(db: Db) {
    let service = local().start(db).await;
    let receiver = Receiver::start([Does::Answers(410)]).await;
    let id = enqueue(&service, "writer", &receiver.url).await;
    let run = id.clone();
    let path = format!("/v1/runs/{id}");
    service.until(&path, |run| run["status"] == "awaiting_approval").await;
    let list = format!("/v1/webhooks/deliveries?run_id={id}");
    let settled = |list: &Value| {
        let rows = list["data"].as_array().unwrap();
        rows.len() >= 3 && rows.iter().all(|row| row["status"] != "pending")
    };
    service.until(&list, settled).await;
    let failed = deliveries(&service, &format!("?run_id={id}&status=failed")).await;
    let before = receiver.told().len();
    assert_eq!(failed.len(), before, "each that was sent at all was answered 410");
    // What happens later is not sent.
    assert_eq!(service.post(&format!("{path}/cancel"), &json!({})).await.status, 202);
    service.until(&path, |run| run["status"] == "cancelled").await;
    let names_the_end = |list: &Value| {
        list["data"].as_array().unwrap().iter().any(|row| row["event"] == "run.cancelled")
    };
    service.until(&list, |list| names_the_end(list) && settled(list)).await;
    let disabled = deliveries(&service, "?status=disabled").await;
    assert!(disabled.iter().any(|row| row["event"] == "run.cancelled"), "{disabled:#?}");
    for row in disabled.iter().filter(|row| row["event"] == "run.cancelled") {
        assert_eq!((&row["attempts"], &row["attempted_at"]), (&json!(0), &Value::Null), "{row:#}");
    }
    assert_eq!(receiver.told().len(), before);
    let shown = service.get(&path).await.body;
    assert!(shown["callback_errors"].as_array().unwrap().len() >= 2, "{shown:#}");

    // A person can ask for it all the same, and first for what was never sent.
    receiver.now_does([Does::Answers(200)]);
    let mut all = deliveries(&service, &format!("?run_id={id}")).await;
    all.reverse();
    all.sort_by_key(|delivery| delivery["status"] != "disabled");
    assert_eq!(all[0]["status"], "disabled", "{all:#?}");
    let refused = all.iter().filter(|row| row["status"] == "failed").count();
    for delivery in &all {
        let id = delivery["id"].as_str().unwrap();
        let again =
            service.post(&format!("/v1/webhooks/deliveries/{id}/redeliver"), &json!({})).await;
        assert_eq!((again.status.as_u16(), &again.body["status"]), (202, &json!("pending")));
        let is_delivered = |list: &Value| {
            let rows = list["data"].as_array().unwrap();
            rows.iter().any(|row| row["id"] == id && row["status"] == "delivered")
        };
        if delivery["status"] == "failed" || delivery == &all[0] {
            service.until(&list, is_delivered).await;
        }
        if delivery == &all[0] {
            // What was answered 410 itself stays what it was.
            let failed = deliveries(&service, &format!("?run_id={run}&status=failed")).await;
            assert_eq!(failed.len(), refused, "{failed:#?}");
        }
    }
    let all_delivered = |list: &Value| {
        list["data"].as_array().unwrap().iter().all(|row| row["status"] == "delivered")
    };
    service.until(&list, all_delivered).await;
    assert_all_told(&service, &id, &receiver).await;
}

async fn nothing_is_sent_where_it_must_not_be(db: Db) {
    let sink = Receiver::start([Does::Answers(200)]).await;
    let redirecting = Receiver::start([Does::Redirects(sink.url.clone())]).await;
    let service = local().start(db).await;
    let answer = run(&service, "answerer", &redirecting.url).await;
    let path = format!("/v1/runs/{}", answer["run_id"].as_str().unwrap());
    let refused = |run: &Value| run["callback_errors"][0]["status"] == 307;
    service.until(&path, refused).await;
    assert!(sink.told().is_empty());

    // A name that stands for an address which is not public.
    let strict = setup().config("[webhooks]\nsecret_env = \"HOOK_SECRET\"").start(db).await;
    let port = sink.url.rsplit(':').next().unwrap();
    let answer = run(&strict, "answerer", &format!("http://localhost:{port}")).await;
    let path = format!("/v1/runs/{}", answer["run_id"].as_str().unwrap());
    let shown = strict
        .until(&path, |run| run["callback_errors"].as_array().is_some_and(|e| !e.is_empty()))
        .await;
    let error = &shown["callback_errors"][0];
    assert!(error["message"].as_str().unwrap().contains("not public"), "{error:#}");
    assert!(sink.told().is_empty());
}

async fn addresses_are_judged_before_the_run(db: Db) {
    let invoke = async |service: &Service, webhook: Value| -> Answer {
        service.post("/v1/agents/answerer/invoke-iterative", &json!({"webhook": webhook})).await
    };
    let service = setup().config("[webhooks]\nsecret_env = \"HOOK_SECRET\"").start(db).await;
    let urls = [
        "http://127.0.0.1:9/",
        "http://0x7f.1/",
        "http://[::ffff:10.0.0.1]/",
        "http://169.254.169.254/latest/meta-data",
        "https://user:secret@example.com/",
        "ftp://example.com/",
        "example.com",
        &format!("https://example.com/{}", "a".repeat(2048)),
    ];
    for url in urls {
        let answer = invoke(&service, json!({"url": url})).await;
        assert_eq!(answer.status, 422, "{url}: {:#}", answer.body);
        assert_eq!(answer.body["errors"][0]["pointer"], "/webhook/url", "{:#}", answer.body);
        assert!(!answer.body.to_string().contains("secret@"), "{:#}", answer.body);
    }
    for (webhook, pointer) in [
        (json!({}), "/webhook/url"),
        (json!("https://example.com"), "/webhook"),
        (json!({"url": 7}), "/webhook/url"),
        (json!({"url": "https://example.com", "secret": "x"}), "/webhook/secret"),
    ] {
        let answer = invoke(&service, webhook.clone()).await;
        assert_eq!(answer.status, 422, "{webhook}: {:#}", answer.body);
        assert_eq!(answer.body["errors"][0]["pointer"], pointer, "{webhook}: {:#}", answer.body);
    }
    let single = service
        .post("/v1/agents/answerer/invoke", &json!({"webhook": {"url": "https://example.com"}}))
        .await;
    assert_eq!(single.status, 422, "{:#}", single.body);
    assert_eq!(invoke(&service, Value::Null).await.status, 200, "null is absence");

    let disabled = Setup::new()
        .agent("answerer", ANSWERER)
        .scenario("answerer", "steps: [{text: done}]")
        .start(db)
        .await;
    for dry_run in [false, true] {
        let body = json!({"webhook": {"url": "https://example.com"}, "dry_run": dry_run});
        let answer = disabled.post("/v1/agents/answerer/invoke-iterative", &body).await;
        let told = (answer.status.as_u16(), &answer.body["code"]);
        assert_eq!(told, (422, &json!("WEBHOOKS_DISABLED")), "{:#}", answer.body);
    }
    assert!(disabled.get("/v1/runs").await.body["data"].as_array().unwrap().is_empty());
    let id = uuid::Uuid::now_v7();
    let again = format!("/v1/webhooks/deliveries/{id}/redeliver");
    assert_eq!(disabled.post(&again, &json!({})).await.body["code"], "WEBHOOKS_DISABLED");
    for id in [id.to_string(), "7".into()] {
        let again = format!("/v1/webhooks/deliveries/{id}/redeliver");
        assert_eq!(service.post(&again, &json!({})).await.status, 404);
    }
}

async fn people_are_asked_and_children_ask_through_their_parents(db: Db) {
    let service = local().start(db).await;
    let receiver = Receiver::start([Does::Answers(200)]).await;
    let id = enqueue(&service, "parent", &receiver.url).await;
    let asked = |told: &[Told]| {
        told.iter().map(Told::event).find(|event| event["type"] == "approval.requested")
    };
    let told = receiver.until(|told| asked(told).is_some()).await;
    let asked = asked(&told).unwrap();
    let child = asked["run_id"].as_str().unwrap();
    assert_ne!(child, id, "the child asks");
    let call = asked["data"]["call_id"].as_str().unwrap();
    let path = format!("/v1/runs/{id}");
    service.until(&path, |run| run["status"] == "awaiting_approval").await;
    let approve = format!("/v1/runs/{child}/tool-calls/{call}/approve");
    assert_eq!(service.post(&approve, &json!({})).await.status, 200);
    service.until(&path, |run| run["status"] == "completed").await;
    receiver.until_ended(1).await;
    assert_all_told(&service, &id, &receiver).await;
    let told = receiver.told();
    let of_child: Vec<Value> =
        told.iter().filter(|told| run_of(told) == child).map(Told::event).collect();
    assert_eq!(of_child.len(), 1, "of the child only what it asks: {of_child:#?}");

    // A run that is cancelled while it waits.
    let id = enqueue(&service, "writer", &receiver.url).await;
    let path = format!("/v1/runs/{id}");
    service.until(&path, |run| run["status"] == "awaiting_approval").await;
    service.post(&format!("{path}/cancel"), &json!({})).await;
    service.until(&path, |run| run["status"] == "cancelled").await;
    assert_all_told(&service, &id, &receiver).await;
    let told = telling(&service, &id).await;
    let kinds: Vec<&str> = told.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert!(kinds.contains(&"approval.requested") && kinds.contains(&"run.cancelled"), "{kinds:?}");
}

async fn deliveries_are_their_tenants(db: Db) {
    let mut service = local().start(db).await;
    let receiver = Receiver::start([Does::Answers(200)]).await;
    run(&service, "answerer", &receiver.url).await;
    receiver.until_ended(1).await;
    let mine = deliveries(&service, "").await;
    let key = async |tenant: &str, scopes: &[&str]| {
        let body = json!({"name": "k", "tenant": tenant, "scopes": scopes});
        let made = service.post("/v1/keys", &body).await;
        assert_eq!(made.status, 201, "{:#}", made.body);
        made.body["key"].as_str().unwrap().to_owned()
    };
    let foreign = key("other", &["runs:read", "agents:invoke", "tools:execute"]).await;
    let reader = key("default", &["runs:read"]).await;
    let invoker = key("default", &["agents:invoke"]).await;
    let again = format!("/v1/webhooks/deliveries/{}/redeliver", mine[0]["id"].as_str().unwrap());
    let of_run = format!("?run_id={}", mine[0]["run_id"].as_str().unwrap());
    service.key = foreign;
    for query in ["", "?status=delivered", &of_run] {
        assert!(deliveries(&service, query).await.is_empty(), "{query}");
    }
    assert_eq!(service.post(&again, &json!({})).await.status, 404);
    service.key = reader;
    assert_eq!(deliveries(&service, "").await.len(), mine.len());
    assert_eq!(service.post(&again, &json!({})).await.status, 403);
    service.key = invoker;
    assert_eq!(service.get("/v1/webhooks/deliveries").await.status, 403);
    let before = receiver.told().len();
    assert_eq!(service.post(&again, &json!({})).await.status, 202);
    receiver.until(|told| told.len() > before).await;
}

async fn a_crash_loses_nothing(db: Db) {
    let mut service = local().config("[runtime]\nlease = \"2s\"").start(db).await;
    let receiver = Receiver::start([Does::Answers(200)]).await;
    // Between an event and its delivery, at each commit of a run in turn.
    for round in 0..rounds(1) {
        for nth in 1..=2 {
            service.kill().await;
            service.restart_to_crash(&format!("after_commit:{nth}")).await;
            let id = uuid::Uuid::now_v7().to_string();
            let body = json!({"run_id": id, "webhook": {"url": receiver.url}});
            let path = "/v1/agents/answerer/invoke-iterative";
            let request = service.request(Method::POST, path).header("prefer", "respond-async");
            let _ = request.json(&body).send().await;
            service.exit_code().await;
            service.restart().await;
            let path = format!("/v1/runs/{id}");
            service.until(&path, |run| run["status"] == "completed").await;
            receiver.until_ended(2 * round + nth).await;
            assert_all_told(&service, &id, &receiver).await;
        }
    }
    // While the receiver has it and has not answered.
    receiver.now_does([Does::Hangs]);
    let before = receiver.told().len();
    let id = enqueue(&service, "answerer", &receiver.url).await;
    receiver.until(|told| told.len() > before).await;
    service.until(&format!("/v1/runs/{id}"), |run| run["status"] == "completed").await;
    service.kill().await;
    receiver.now_does([Does::Answers(200)]);
    service.restart().await;
    receiver
        .until(|told| told[before..].iter().filter(|told| run_of(told) == id).count() > 3)
        .await;
    service.until("/v1/webhooks/deliveries?status=pending", |list| list["data"] == json!([])).await;
    assert_all_told(&service, &id, &receiver).await;
}

#[tokio::test]
async fn another_replica_delivers() {
    let url = postgres_cluster::fresh_database().await;
    let receiver = Receiver::start([Does::Hangs]).await;
    let mut one = local().start_on(url.clone()).await;
    let answer = run(&one, "answerer", &receiver.url).await;
    let id = answer["run_id"].as_str().unwrap();
    receiver.until(|told| !told.is_empty()).await;
    let other = local().start_on(url).await;
    one.kill().await;
    receiver.now_does([Does::Answers(200)]);
    let is_empty = |list: &Value| list["data"] == json!([]);
    other.until("/v1/webhooks/deliveries?status=pending", is_empty).await;
    assert_all_told(&other, id, &receiver).await;
    // Both at once send nothing twice.
    let (mut one, before) = (one, receiver.told().len());
    one.restart().await;
    let mut runs = 0;
    for _ in 0..20 {
        for service in [&one, &other] {
            run(service, "answerer", &receiver.url).await;
            runs += 1;
        }
    }
    receiver.until_ended(runs).await;
    other.until("/v1/webhooks/deliveries?status=pending", is_empty).await;
    let told = receiver.told();
    let ids: BTreeSet<&String> =
        told[before..].iter().map(|told| &told.headers["webhook-id"]).collect();
    assert_eq!(ids.len(), told.len() - before);
}

async fn deliveries_under_way_at_a_shutdown_are_sent_after_it(db: Db) {
    let mut service = local().start(db).await;
    let receiver = Receiver::start([Does::Hangs]).await;
    let answer = run(&service, "answerer", &receiver.url).await;
    let id = answer["run_id"].as_str().unwrap();
    receiver.until(|told| !told.is_empty()).await;
    service.signal(Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
    receiver.now_does([Does::Answers(200)]);
    service.restart().await;
    let begun = Instant::now();
    let is_empty = |list: &Value| list["data"] == json!([]);
    service.until("/v1/webhooks/deliveries?status=pending", is_empty).await;
    // What is not given back is sent half a minute after it was claimed.
    assert!(begun.elapsed() < Duration::from_secs(25), "it was not given back");
    assert_all_told(&service, id, &receiver).await;
}

async fn a_run_is_kept_until_its_webhooks_are_delivered(db: Db) {
    let service = local().config("[runtime]\nretention = \"1s\"").start(db).await;
    let receiver = Receiver::start([Does::Answers(500)]).await;
    let answer = run(&service, "answerer", &receiver.url).await;
    let id = answer["run_id"].as_str().unwrap();
    let (told, events) = (format!("/v1/runs/{id}"), telling(&service, id).await.len());
    let untold = service.run("answerer", &json!({})).await;
    let untold = format!("/v1/runs/{}", untold["run_id"].as_str().unwrap());
    service.until(&untold, |run| run["code"] == "NOT_FOUND").await;
    assert_eq!(service.get(&told).await.status, 200);
    let refused = receiver.told().len();
    receiver.now_does([Does::Answers(200)]);
    service.until(&told, |run| run["code"] == "NOT_FOUND").await;
    let accepted = receiver.told().split_off(refused);
    let seqs: BTreeSet<_> = accepted.iter().map(|told| told.event()["seq"].as_i64()).collect();
    assert_eq!(seqs.len(), events, "{accepted:?}");
    service.until("/v1/webhooks/deliveries", |list| list["data"] == json!([])).await;
}
