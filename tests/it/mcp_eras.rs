//! Servers of either era of the protocol, and of both: what is spoken is found out, at the start and
//! after every restart. On both stores.
//!
//! | together with | test |
//! |---|---|
//! | program: new, both, either and slow, both and late, old, old and strict, old and silent, old and mute once asked early, silent | `programs_are_asked_in_the_era_that_they_speak` |
//! | program: another era after a restart, changes of its list | `a_program_of_another_era_is_found_out_again` |
//! | address: new, both, either and slow, both and late, old, none that is known | `addresses_are_asked_in_the_era_that_they_speak` |
//! | both, prompt: nothing of the old era | `servers_that_answer_at_once_are_asked_in_one_era` |
//! | address: headers of requests, arguments in headers, broken streams, cancel | `requests_repeat_their_method_and_arguments_in_headers` |
//! | address: another era while it is asked | `an_address_of_another_era_is_found_out_again` |
//! | a person is asked: children, approvals, limits, crashes, replicas | `mcp_input.rs` |
//! | tenants, sessions, streaming, console, command line | as of every tool, see `mcp_crossings.rs` |

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::mcp::{directory, results, until_up};
use crate::mock_mcp::{Mock, Speaks};
use crate::script_tools::with;
use crate::service::{Db, Service, Setup, on_one_store};

on_one_store! {
    programs_are_asked_in_the_era_that_they_speak,
    servers_that_answer_at_once_are_asked_in_one_era,
    a_program_of_another_era_is_found_out_again,
    addresses_are_asked_in_the_era_that_they_speak,
    requests_repeat_their_method_and_arguments_in_headers,
    an_address_of_another_era_is_found_out_again,
}

const SERVER: &str = include_str!("mcp/eras.py");
const FULL: &str = "{autonomy: full}";

/// `[mcp.<name>]` with a program that speaks so.
pub fn program(name: &str, arguments: &[&str], more: &str) -> String {
    let arguments: Vec<String> = arguments.iter().map(|word| format!("\"{word}\"")).collect();
    let arguments = arguments.join(", ");
    format!(
        "[mcp.{name}]\ncommand = \"python3\"\nargs = [\"-c\", '''{SERVER}''', {arguments}]\n{more}\n"
    )
}

/// What a program has noted in a file of its directory.
pub fn noted(service: &Service, server: &str, file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(directory(service, server).join(file)).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn methods(said: &[Value]) -> Vec<&str> {
    said.iter().map(|it| it["method"].as_str().unwrap()).collect()
}

/// Waits until something is true.
pub async fn until(what: impl Fn() -> bool) {
    let since = Instant::now();
    while !what() {
        assert!(since.elapsed() < Duration::from_mins(5));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn agent(model: &str, tools: &str) -> String {
    format!(
        "model: scripted/{model}\ntools: {tools}\nenable_double_confirmation: false\ngovernance: {FULL}\n"
    )
}

/// An agent that calls one tool.
fn calls(setup: Setup, name: &str, tool: &str, arguments: &Value) -> Setup {
    let call = json!({"tool_calls": [{"tool": tool, "arguments": arguments}]});
    setup
        .agent(name, &agent(name, &format!("['{tool}']")))
        .scenario(name, &format!("steps: [{call}, {{text: done}}]"))
}

async fn echoed(service: &Service, agent: &str) -> Value {
    let run = service.run(agent, &json!({})).await;
    let told = results(service, &run).await[0].clone();
    serde_json::from_str(&told).unwrap_or_else(|_| panic!("{told}\n{}", service.log()))
}

const UNANSWERED: &str = "does not answer initialize within 10 s";

/// Milliseconds between the first question to the program that hangs and the end of the wait for it.
async fn given_up_after(service: &Service) -> i64 {
    service.until_logged(UNANSWERED).await;
    let log = service.log();
    let told = log.lines().find(|line| line.contains(UNANSWERED)).unwrap();
    let told: Value = serde_json::from_str(told).unwrap();
    let told = chrono::DateTime::parse_from_rfc3339(told["timestamp"].as_str().unwrap()).unwrap();
    told.timestamp_millis() - noted(service, "hangs", "asked_at.txt")[0].as_i64().unwrap()
}

async fn programs_are_asked_in_the_era_that_they_speak(db: Db) {
    let modes =
        ["new", "both", "slow-new", "slow-both", "late-both", "old", "dies", "silent", "mute"];
    let names: Vec<String> = modes.iter().map(|mode| format!("mcp:{mode}/echo")).collect();
    let all: Vec<(&str, Value)> = names.iter().map(|name| (name.as_str(), json!({}))).collect();
    let mut setup = Setup::new();
    for mode in modes.iter().chain(&["hangs"]) {
        setup = setup.config(&program(mode, &[mode], ""));
    }
    let setup = with(setup, "['mcp:*/echo']", FULL, &all);
    let setup = calls(setup, "stuck", "mcp:hangs/echo", &json!({}));
    let setup = calls(setup, "odd", "mcp:new/odd", &json!({}));
    let started = Instant::now();
    let service = setup.start(db).await;
    assert!(started.elapsed() < Duration::from_mins(2), "a silent server stops no start");
    let only_hangs = |ready: &Value| {
        let servers = ready["mcp_servers"].as_array().unwrap();
        servers.len() == 1 && servers[0]["server"] == "hangs"
    };
    let is_told = |ready: &Value| {
        let servers = ready["mcp_servers"].as_array().unwrap();
        let hangs = servers.iter().find(|it| it["server"] == "hangs");
        hangs.is_some_and(|it| it.to_string().contains(UNANSWERED))
    };
    let was_told = is_told(&service.get("/readyz").await.body);
    let since = Instant::now();
    let run = service.run("stuck", &json!({})).await;
    let took = since.elapsed();
    let told = &results(&service, &run).await[0];
    assert!(told.contains("The MCP server hangs"), "{told}");
    // On a busy machine its start has failed by now.
    let is_at_once = told.contains("is starting") || was_told || took < Duration::from_secs(5);
    assert!(is_at_once, "nor a run: {took:?}");
    service.until("/readyz", is_told).await;
    assert!(started.elapsed() >= Duration::from_secs(10), "{:?}", started.elapsed());
    let took = given_up_after(&service).await;
    assert!(took < 18_000, "half a second and ten, and not ten more: {took} ms");
    service.until("/readyz", only_hangs).await;

    let run = service.run("worker", &json!({})).await;
    let told = results(&service, &run).await;
    for (mode, told) in modes.iter().zip(&told) {
        let told: Value = serde_json::from_str(told).unwrap_or_else(|_| panic!("{mode}: {told}"));
        let is_new = mode.ends_with("new") || mode.ends_with("both");
        assert_eq!(told["new"], json!(is_new), "{mode}: {told:#}");
        let said = noted(&service, mode, "said.txt");
        assert_eq!(methods(&said)[0], "server/discover", "{mode}");
        let says = |method: &str| methods(&said).contains(&method);
        let is_prompt = matches!(*mode, "new" | "both");
        assert!(is_prompt || says("initialize"), "{mode}: {said:#?}");
        assert_eq!(says("notifications/initialized"), !is_new, "{mode}: {said:#?}");
        assert!(!says("notifications/cancelled"), "{mode}: {said:#?}");
    }
    // It has had the time to be taken for hanging, since it ignores `ping` too.
    let of_silent = noted(&service, "silent", "said.txt");
    let expected =
        ["server/discover", "initialize", "notifications/initialized", "tools/list", "tools/call"];
    assert!(methods(&of_silent).ends_with(&expected), "{of_silent:#?}");
    let of_new = noted(&service, "new", "said.txt");
    let mut asked = methods(&of_new);
    asked.retain(|method| *method != "initialize");
    assert_eq!(
        asked[..3],
        ["server/discover", "subscriptions/listen", "tools/list"],
        "{of_new:#?}"
    );
    let run = service.run("odd", &json!({})).await;
    let told = &results(&service, &run).await[0];
    assert!(told.contains("a result of the type \"task\", which is not supported"), "{told}");
    assert!(told.contains("unknown whether the call took effect"), "{told}");
    // The list may be used for no time at all, and is not asked for all the time.
    let (listed, most) =
        (noted(&service, "new", "listed.txt").len(), 1 + started.elapsed().as_secs() / 30);
    assert!((1..=most).contains(&(listed as u64)), "{listed} lists");
}

async fn a_program_of_another_era_is_found_out_again(db: Db) {
    let setup = Setup::new().config(&program("odd", &["file", "old"], ""));
    let setup = calls(setup, "echo", "mcp:odd/echo", &json!({}));
    let setup = calls(setup, "renew", "mcp:odd/become", &json!({"mode": "new"}));
    let setup = calls(setup, "age", "mcp:odd/become", &json!({"mode": "dies"}));
    let setup = calls(setup, "change", "mcp:odd/change", &json!({}));
    let service = setup.start(db).await;
    until_up(&service).await;
    assert_eq!(echoed(&service, "echo").await["new"], false);
    for (ended, (agent, is_new)) in
        [("renew", true), ("age", false), ("renew", true)].into_iter().enumerate()
    {
        service.run(agent, &json!({})).await;
        let times = |what: &str| service.log().matches(what).count();
        until(|| times("it ended with exit code 0") > ended).await;
        until(|| times("an MCP server is available") > ended + 1).await;
        let now = echoed(&service, "echo").await;
        assert_eq!(now["new"], is_new, "{agent}");
    }
    // It was asked to tell changes, since in this era it does not by itself.
    service.run("change", &json!({})).await;
    service.until("/v1/tools/mcp%3Aodd%2Fnew", |tool| tool["name"] == "mcp:odd/new").await;
}

fn address(name: &str, url: &str, more: &str) -> String {
    format!("[mcp.{name}]\nurl = \"{url}\"\n{more}\n")
}

async fn addresses_are_asked_in_the_era_that_they_speak(db: Db) {
    let mut mocks = Vec::new();
    let mut setup = Setup::new();
    let first: &[&str] = &["server/discover", "initialize"];
    for (name, speaks, slow) in [
        ("new", Speaks::New, &first[..0]),
        ("both", Speaks::Both, &[]),
        ("slow-new", Speaks::New, first),
        ("late-new", Speaks::New, &first[..1]),
        ("slow-both", Speaks::Both, first),
        ("late-both", Speaks::Both, &first[..1]),
        ("old", Speaks::Old, &[]),
        ("slow-old", Speaks::Old, first),
        ("stateless", Speaks::OldWithoutSessions, &[]),
    ] {
        let mock = Mock::slow(0, speaks, slow).await;
        setup = calls(setup, name, &format!("mcp:{name}/echo"), &json!({"a": name}));
        setup = setup.config(&address(name, &mock.url, ""));
        mocks.push((name, mock));
    }
    let later = Mock::start(0, Speaks::Version("2099-01-01")).await;
    let silent = Mock::start(0, Speaks::Nothing).await;
    let setup = setup.config(&address("later", &later.url, ""));
    let setup = setup.config(&address("silent", &silent.url, ""));
    let service = setup.start(db).await;
    let down = |ready: &Value, name: &str, why: &str| {
        let all = ready["mcp_servers"].as_array().unwrap();
        let down = all.iter().find(|it| it["server"] == name);
        down.is_some_and(|it| it.to_string().contains(why))
    };
    let are_others_up = |ready: &Value| ready["mcp_servers"].as_array().unwrap().len() == 2;
    service
        .until("/readyz", |it| {
            down(it, "later", "none of which is supported")
                && down(it, "silent", "initialize")
                && are_others_up(it)
        })
        .await;
    for (name, mock) in &mocks {
        let told = echoed(&service, name).await;
        let is_new = name.ends_with("new") || name.ends_with("both");
        assert_eq!((&told["new"], &told["arguments"]["a"]), (&json!(is_new), &json!(name)));
        let introduced = mock.messages("initialize").len();
        let is_prompt = matches!(*name, "new" | "both");
        assert!(introduced == 1 || (is_prompt && introduced == 0), "{name}: {introduced}");
        let told = mock.messages("notifications/initialized").len();
        assert_eq!(told, usize::from(!is_new), "{name}");
        assert!(mock.messages("notifications/cancelled").is_empty(), "{name}");
        let mut refused = mock.refused();
        refused.retain(|why| !(introduced > 0 && why.starts_with("initialize: ")));
        assert_eq!(refused, Vec::<String>::new(), "{name}");
    }
    assert!(later.messages("initialize").is_empty(), "it has said that it speaks another version");
}

/// On a busy machine they may begin to answer too late for that, so there are some tries.
async fn servers_that_answer_at_once_are_asked_in_one_era(db: Db) {
    let (new, both) = (Mock::start(0, Speaks::New).await, Mock::start(0, Speaks::Both).await);
    let programs = ["new", "both"];
    let mut service = Setup::new()
        .config(&program("new", &["new"], ""))
        .config(&program("both", &["both"], ""))
        .config(&address("far-new", &new.url, ""))
        .config(&address("far-both", &both.url, ""))
        .start(db)
        .await;
    let mut before = 0;
    for _ in 0..30 {
        until_up(&service).await;
        let is_asked =
            |name: &&str| methods(&noted(&service, name, "said.txt")).contains(&"initialize");
        let addresses = new.messages("initialize").len() + both.messages("initialize").len();
        if !programs.iter().any(is_asked) && addresses == before {
            return;
        }
        before = addresses;
        service.kill().await;
        for name in programs {
            std::fs::remove_file(directory(&service, name).join("said.txt")).unwrap();
        }
        service.restart().await;
    }
    panic!("servers that answer at once are asked in both eras");
}

async fn requests_repeat_their_method_and_arguments_in_headers(db: Db) {
    let mock = Mock::start(0, Speaks::New).await;
    let calls = [
        ("mcp:far/echo", json!({"region": "us-west1", "note": "Hello, 世界", "in": {"dry": true}})),
        ("mcp:far/stream", json!({})),
        ("mcp:far/breaks", json!({})),
        ("mcp:far/fails", json!({})),
        ("mcp:far/hangs", json!({})),
        ("mcp:far/echo", json!({"region": null})),
    ];
    let effects = "[mcp.far.effects]\necho = \"read\"\nbreaks = \"once\"";
    let setup = with(
        Setup::new().config(&address("far", &mock.url, effects)),
        "['mcp:far/*']",
        FULL,
        &calls,
    )
    .agent(
        "patient",
        "model: scripted/worker\ntools: ['mcp:far/*']\nenable_double_confirmation: false\n\
         limits: {error_threshold: 50, max_iterations: 20, max_iterations_per_attempt: 20}\n\
         tool_options: {'mcp:far/hangs': {timeout_seconds: 1}}\ngovernance: {autonomy: full}\n",
    );
    let service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("patient", &json!({})).await;
    let told = results(&service, &run).await;
    assert_eq!(told.len(), 6, "{run:#}");
    let (headers, body) = mock.messages("tools/call")[0].clone();
    for (name, value) in [
        ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", "tools/call"),
        ("mcp-name", "echo"),
        ("mcp-param-region", "us-west1"),
        ("mcp-param-note", "=?base64?SGVsbG8sIOS4lueVjA==?="),
        ("mcp-param-dry", "true"),
        ("accept", "application/json, text/event-stream"),
    ] {
        assert_eq!(headers[name], value, "{name}");
    }
    assert!(!headers.contains_key("mcp-session-id"));
    assert_eq!(body["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"], "2026-07-28");
    assert!(body["params"]["_meta"]["toolloop/effect-key"].is_string());
    assert_eq!(told[1], "streamed");
    assert!(told[2].contains("the stream ends before it"), "{}", told[2]);
    assert!(told[2].ends_with("It is unknown whether the call took effect."), "{}", told[2]);
    assert_eq!(
        told[3],
        "Error: The MCP server far did not execute the call: the server refuses it: no (code -32021)."
    );
    assert!(told[4].contains("did not finish within 1 seconds"), "{}", told[4]);
    // The end of the connection says that a call is given up.
    until(|| mock.client_disconnected()).await;
    for method in ["notifications/cancelled", "ping"] {
        assert!(mock.messages(method).is_empty(), "{method}");
    }
    assert!(mock.messages("tools/call")[5].0.get("mcp-param-region").is_none());
    // On a busy machine it may be asked in the old era, too.
    let mut refused = mock.refused();
    refused.retain(|why| !why.starts_with("initialize: "));
    assert_eq!(refused, Vec::<String>::new());
    service.until_logged("misplaced is left out: its input schema has x-mcp-header").await;
    assert_eq!(mock.messages("tools/list").len(), 1, "the list is fresh for an hour");
}

async fn an_address_of_another_era_is_found_out_again(db: Db) {
    let mock = Mock::start(0, Speaks::Old).await;
    let setup = Setup::new().config(&address("far", &mock.url, ""));
    let service = calls(setup, "echo", "mcp:far/echo", &json!({})).start(db).await;
    until_up(&service).await;
    assert_eq!(echoed(&service, "echo").await["new"], false);
    for (speaks, is_new) in [(Speaks::New, true), (Speaks::Old, false), (Speaks::New, true)] {
        mock.speak(speaks);
        let since = Instant::now();
        loop {
            let run = service.run("echo", &json!({})).await;
            let told = results(&service, &run).await[0].clone();
            let told = serde_json::from_str::<Value>(&told).unwrap_or(Value::String(told));
            if told["new"] == is_new {
                break;
            }
            assert!(since.elapsed() < Duration::from_mins(5), "{told}\n{}", service.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
