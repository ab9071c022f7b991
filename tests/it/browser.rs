//! The tool `browser`: pages in a Chromium, for agents that are allowed their hosts.
//!
//! | together with | here |
//! |---|---|
//! | journal, budget, audit, files of a run | `a_page_is_opened_read_filled_in_and_pictured` |
//! | cancel, end of a run | `a_page_ends_with_its_call_and_its_run` |
//! | several runs | `runs_have_pages_of_their_own`, `pages_are_limited`, `browser_pool.rs` |
//! | crash of the browser | `a_browser_that_was_killed_is_started_again` |
//! | no browser | `a_missing_browser_is_told` |
//! | crash of the service | `a_killed_service_leaves_no_browser` |
//! | parked runs, another start with the run's id | `a_page_waits_for_its_parked_run` |
//! | downloads | `downloads.rs` |
//! | hostile pages | `hostile_pages.rs` |
//! | sessions, tenants, replicas, streaming | as any tool: a page is known to its run alone |

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::response::{Html, IntoResponse, Response};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::chromium;
use crate::service::{Db, Service, Setup, on_both_stores, on_one_store};

on_both_stores! {
    a_page_ends_with_its_call_and_its_run,
}

on_one_store! {
    a_page_is_opened_read_filled_in_and_pictured,
}

/// A site that notes what it is asked.
pub struct Site {
    pub port: u16,
    asked: Arc<Mutex<Vec<String>>>,
    server: JoinHandle<()>,
}

impl Site {
    pub async fn start() -> Self {
        Self::serving(respond).await
    }

    pub async fn serving<F, A>(respond: F) -> Self
    where
        F: Fn(Request) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response> + Send + 'static,
    {
        let listener = TcpListener::bind(("127.0.0.2", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let noted = Arc::clone(&asked);
        let app = Router::new().fallback(move |request: Request| {
            let (noted, respond) = (Arc::clone(&noted), respond.clone());
            async move {
                let line = format!("{} {}", request.method(), request.uri());
                noted.lock().unwrap().push(line);
                respond(request).await
            }
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { port, asked, server }
    }

    pub fn at(&self, path: &str) -> String {
        format!("http://127.0.0.2:{}{path}", self.port)
    }

    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    /// Waits until it was asked so many times.
    pub async fn until_asked(&self, times: usize) {
        for _ in 0..9000 {
            if self.asked().len() >= times {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("it was asked only {:?}", self.asked());
    }

    pub fn governance(&self) -> String {
        let port = self.port;
        format!(
            "{{autonomy: full, paths: {{write: ['**']}}, network: {{allow: ['127.0.0.2:{port}'], allow_private: [127.0.0.2]}}}}"
        )
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.abort();
    }
}

const FORM: &str = "<html><head><title>Order\n tea</title><script src=/greet.js></script></head><body>
    <h1>Tea</h1><p id=greeting></p><p style='display:none'>not for you</p><img src=/none.png alt='a cup'>
    <form method=post action=/order><label>Kind <input name=kind value=green></label>
    <label>Size <select name=size><option>small</option><option>large</option></select></label>
    <input type=checkbox name=sugar aria-label=Sugar><button>Order</button></form>
    <a href=/more>More</a></body></html>";

async fn respond(request: Request) -> Response {
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/" => ([("set-cookie", "visitor=first; Path=/")], Html(FORM)).into_response(),
        "/greet.js" => (
            [("content-type", "text/javascript")],
            "addEventListener('load', () => { greeting.textContent = 'Hello from a script'; });",
        )
            .into_response(),
        "/order" => {
            let cookie = request.headers().get("cookie").map(|it| it.to_str().unwrap().to_owned());
            let body = to_bytes(request.into_body(), 10_000).await.unwrap();
            let body = String::from_utf8_lossy(&body);
            Html(format!("<title>Ordered</title><p>Got {body} with {cookie:?}")).into_response()
        }
        "/store" => Html(
            "<script>if (!localStorage.name) { localStorage.name = Math.random(); document.cookie = 'own=1'; \
             document.title = 'new'; } else document.title = 'known ' + document.cookie;</script>",
        )
        .into_response(),
        "/slow" => {
            tokio::time::sleep(Duration::from_secs(2)).await;
            Html("<title>Slow</title>A page.").into_response()
        }
        "/hang" => std::future::pending().await,
        "/file" => (
            [("content-type", "application/zip"), ("content-disposition", "attachment")],
            "PK",
        )
            .into_response(),
        "/none.png" | "/favicon.ico" => axum::http::StatusCode::NOT_FOUND.into_response(),
        _ => Html("<title>Other</title>A page.").into_response(),
    }
}

pub fn agent(governance: &str) -> String {
    format!(
        "model: scripted/surfer\ntools: [browser]\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 1000, max_iterations: 300, max_iterations_per_attempt: 300}}\n\
         governance: {governance}\n"
    )
}

/// Calls one after another, and the end.
pub fn scenario(calls: &[Value]) -> String {
    let calls = calls
        .iter()
        .map(|arguments| json!({"tool_calls": [{"tool": "browser", "arguments": arguments}]}));
    json!({"steps": calls.chain([json!({"text": "done"})]).collect::<Vec<_>>()}).to_string()
}

/// The calls of a run, by its id or its path.
pub async fn rows(service: &Service, run: &str) -> Vec<Value> {
    let id = run.rsplit('/').next().unwrap();
    let path = format!("/v1/runs/{id}/tool-calls?limit=200");
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

pub fn result(row: &Value) -> &str {
    row["result"].as_str().unwrap_or_default()
}

/// More time for a call than any machine needs to start a browser.
pub const PATIENT: &str = "[tools.browser]\ntimeout = \"10m\"\n";

async fn started(site: &Site, config: &str, calls: &[Value], db: Db) -> Service {
    chromium::program();
    let patient = if config.contains("[tools.browser]") { "" } else { PATIENT };
    Setup::new()
        .agent("surfer", &agent(&site.governance()))
        .scenario("surfer", &scenario(calls))
        .config(config)
        .config(patient)
        .start(db)
        .await
}

pub fn id(run: &Value) -> &str {
    run["run_id"].as_str().unwrap()
}

async fn a_page_is_opened_read_filled_in_and_pictured(db: Db) {
    let site = Site::start().await;
    let calls = [
        json!({"action": "read"}),
        json!({"action": "open", "url": site.at("/")}),
        json!({"action": "type", "selector": "e1", "text": "black"}),
        json!({"action": "type", "selector": "e2", "text": "large"}),
        json!({"action": "click", "selector": "input[type=checkbox]"}),
        json!({"action": "read"}),
        json!({"action": "screenshot"}),
        json!({"action": "click", "selector": "e4"}),
        json!({"action": "read"}),
        json!({"action": "click", "selector": "e1"}),
        json!({"action": "open", "url": site.at("/file")}),
        json!({"action": "open", "url": "http://example.com/"}),
        json!({"action": "open", "url": "file:///etc/passwd"}),
        json!({"action": "click"}),
        json!({"action": "close"}),
        json!({"action": "click", "selector": "a"}),
    ];
    let service = started(&site, "", &calls, db).await;
    let run = service.run("surfer", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let rows = rows(&service, id(&run)).await;
    let origin = site.at("");
    let expected = [
        "No page is open; open one first.".to_owned(),
        "Title: Order tea\n\n# Tea\nHello from a script\n(image: a cup)\nKind\n[e1] text \"Kind\": \"green\"".to_owned(),
        format!("Typed. The page is {origin}/\n"),
        "Typed. ".to_owned(),
        "Clicked. ".to_owned(),
        "[e1] text \"Kind\": \"black\"\nSize\n[e2] select \"Size".to_owned(),
        "Saved a picture of ".to_owned(),
        format!("Clicked. The page is {origin}/order\nTitle: Ordered"),
        "Got kind=black&size=large&sugar=on with Some(\"visitor=first\")".to_owned(),
        "means no element of the page; read it again".to_owned(),
        "open only reads".to_owned(),
        "Blocked by the network rule".to_owned(),
        "neither http nor https".to_owned(),
        "click needs `selector`".to_owned(),
        "The page is closed.".to_owned(),
        "No page is open; open one first.".to_owned(),
    ];
    assert_eq!(rows.len(), expected.len());
    for ((row, call), expected) in rows.iter().zip(&calls).zip(&expected) {
        assert!(result(row).contains(expected), "{call}\nexpected {expected}\n{row:#}");
        assert!(!result(row).contains("not for you"), "{row:#}");
    }
    assert!(result(&rows[5]).contains("large"), "{}", result(&rows[5]));
    assert!(result(&rows[5]).contains("checkbox \"Sugar\" (checked)"), "{}", result(&rows[5]));
    let effects: Vec<&str> = rows.iter().filter_map(|row| row["effect"].as_str()).collect();
    assert!(effects.contains(&"once") && effects.contains(&"read"), "{effects:?}");

    picture_is_served(&service, id(&run), &rows[6]).await;
    let run = service.get(&format!("/v1/runs/{}", id(&run))).await.body;
    assert_eq!(run["labels"], json!(["untrusted"]), "{run:#}");
    let asked = site.asked();
    assert!(asked.contains(&"POST /order".to_owned()), "{asked:?}");
    requests_are_counted(&service, &run, asked.len()).await;
}

async fn picture_is_served(service: &Service, run: &str, row: &Value) {
    let path = result(row).rsplit(' ').next().unwrap().trim_end_matches('.').to_owned();
    let url = service.url(&format!("/v1/runs/{run}/files/{path}"));
    let answer = service.http.get(url).bearer_auth(&service.key).send().await.unwrap();
    assert_eq!(answer.status(), 200, "{path}");
    assert_eq!(answer.headers()["content-type"], "image/png");
    let picture = answer.bytes().await.unwrap();
    assert_eq!(&picture[..8], b"\x89PNG\r\n\x1a\n");
    // Width and height stand in the first chunk.
    assert_eq!(picture[16..24], [0, 0, 5, 0, 0, 0, 3, 32]);
}

/// What the page asked. A call that is for a request counts as one, and the page's beyond that.
async fn requests_are_counted(service: &Service, run: &Value, asked: usize) {
    let events = service.get(&format!("/v1/runs/{}/events?limit=1000", id(run))).await.body;
    let events = events["data"].as_array().unwrap().clone();
    let sent: u64 =
        events.iter().filter_map(|event| event["data"]["network"]["requests"].as_u64()).sum();
    assert_eq!(usize::try_from(sent).unwrap(), asked, "{events:#?}");
    let used = run["budget"]["used"]["network_requests"].as_u64().unwrap();
    let of_calls = events.iter().filter(|event| {
        event["type"] == "tool_call.started" && event["data"]["actions"][0]["kind"] == "fetch"
    });
    let beyond = |event: &Value| {
        let network = &event["data"]["network"];
        network["requests"].as_u64()?.checked_sub(network["announced"].as_u64().unwrap_or(0))
    };
    let beyond: u64 = events.iter().filter_map(beyond).sum();
    assert_eq!(used, of_calls.count() as u64 + beyond, "{run:#}");
    let audit =
        service.get(&format!("/v1/audit?action=tool_call&run_id={}&limit=200", id(run))).await.body;
    let of_requests = audit["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|record| record["arguments"].to_string().contains("/greet.js"));
    assert_eq!(of_requests.count(), 1, "{audit:#}");
}

async fn a_page_ends_with_its_call_and_its_run(db: Db) {
    let site = Site::start().await;
    let calls = [json!({"action": "open", "url": site.at("/hang")})];
    // The call itself may take ten minutes.
    let service = started(&site, PATIENT, &calls, db).await;
    let run = service.enqueue("surfer").await;
    site.until_asked(1).await;
    // The page that is kept ready may come later, and stays.
    let during = pages_of(&service);
    assert!(!during.is_empty(), "no process has the page");
    let since = tokio::time::Instant::now();
    let cancelled = service.post(&format!("{run}/cancel"), &json!({})).await;
    assert!(cancelled.status.is_success(), "{:#}", cancelled.body);
    service.until(&run, |run| run["status"] == "cancelled").await;
    assert!(since.elapsed() < Duration::from_mins(8), "{:?}", since.elapsed());
    let mut left = pages_of(&service);
    while during.is_subset(&left) {
        assert!(since.elapsed() < Duration::from_mins(9), "no page of {during:?} has ended");
        tokio::time::sleep(Duration::from_millis(100)).await;
        left = pages_of(&service);
    }
}

/// Sends a signal to the browsers of a service, and not to the processes of their pages.
pub fn signal_browsers(service: &Service, signal: Signal) {
    let is_browser =
        |line: &str| line.contains("--remote-debugging-pipe") && !line.contains("--type=");
    let processes = processes(service).into_iter();
    let browsers: Vec<i32> =
        processes.filter(|(_, line)| is_browser(line)).map(|(pid, _)| pid).collect();
    assert!(!browsers.is_empty());
    for browser in browsers {
        let _ = kill_process(Pid::from_raw(browser).unwrap(), signal);
    }
}

/// Processes below the service.
fn processes(service: &Service) -> Vec<(i32, String)> {
    let parent = |pid: i32| -> Option<i32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
    };
    let all = std::fs::read_dir("/proc").unwrap();
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let service = service.pid();
    let is_below = |pid: i32| {
        let mut at = pid;
        while let Some(above) = parent(at).filter(|above| *above > 1) {
            if above == service {
                return true;
            }
            at = above;
        }
        false
    };
    pids.filter(|pid| is_below(*pid))
        .map(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            (pid, String::from_utf8_lossy(&line).replace('\0', " "))
        })
        .collect()
}

/// The processes that have a page, or are kept for one.
fn pages_of(service: &Service) -> BTreeSet<i32> {
    let processes = processes(service).into_iter();
    let pages = processes.filter(|(_, line)| line.contains("--type=renderer"));
    pages.map(|(pid, _)| pid).collect()
}

#[tokio::test]
async fn a_screenshot_is_shown_in_the_console() {
    let site = Site::start().await;
    let calls = [json!({"action": "open", "url": site.at("/")}), json!({"action": "screenshot"})];
    let service = started(&site, "[auth]\nmode = \"none\"\n", &calls, Db::Sqlite).await;
    let run = service.run("surfer", &json!({})).await;
    let browser = chromium::Chromium::start().await;
    browser.open(&service.url(&format!("/console#/runs/{}", id(&run)))).await;
    // A call is redrawn with each of its events, so it is opened after the last one.
    browser.until("document.querySelector('.end.completed')").await;
    browser.until_eq("document.querySelectorAll('details.call').length", 2).await;
    browser.eval("document.querySelectorAll('details.call')[1].open = true").await;
    browser.until("document.querySelector('img.screenshot')?.src.length > 1000").await;
    let width = "(image => image.decode().then(() => image.naturalWidth))\
                 (document.querySelector('img.screenshot'))";
    assert_eq!(browser.eval(width).await, 1280);
    browser.screenshot("run-screenshot").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn runs_have_pages_of_their_own() {
    let site = Site::start().await;
    let open = json!({"action": "open", "url": site.at("/store")});
    let service = started(&site, "", &[open.clone(), open], Db::Sqlite).await;
    for _ in 0..2 {
        let run = service.run("surfer", &json!({})).await;
        let rows = rows(&service, id(&run)).await;
        assert!(result(&rows[0]).contains("Title: new"), "{:#}", rows[0]);
        assert!(result(&rows[1]).contains("Title: known own=1"), "{:#}", rows[1]);
    }
}

#[tokio::test]
async fn pages_are_limited() {
    let site = Site::start().await;
    let calls = [json!({"action": "open", "url": site.at("/slow")})];
    let config = "[tools.browser]\npages = 1\ntimeout = \"10m\"\n";
    let service = started(&site, config, &calls, Db::Sqlite).await;
    let mut paths = Vec::new();
    for _ in 0..4 {
        paths.push(service.enqueue("surfer").await);
    }
    for path in &paths {
        service.until(path, |run| run["status"] == "completed").await;
        let row = &rows(&service, path).await[0];
        assert!(result(row).contains("The page is"), "it waits for the page: {row:#}");
    }
    assert_eq!(site.asked().iter().filter(|asked| asked.contains("/slow")).count(), 4);
}

#[tokio::test]
async fn a_call_ends_while_it_waits_for_a_page() {
    let site = Site::start().await;
    let calls = [json!({"action": "open", "url": site.at("/hang")})];
    let config = "[tools.browser]\npages = 1\ntimeout = \"1m\"\n";
    let service = started(&site, config, &calls, Db::Sqlite).await;
    let first = service.enqueue("surfer").await;
    site.until_asked(1).await;
    let second = service.enqueue("surfer").await;
    let begun = |events: &Value| events.to_string().contains("tool_call.started");
    service.until(&format!("{second}/events"), begun).await;
    service.post(&format!("{second}/cancel"), &json!({})).await;
    service.until(&second, |run| run["status"] == "cancelled").await;
    service.until(&first, |run| run["status"] == "completed").await;
    let first = rows(&service, &first).await;
    let told = result(&first[0]);
    assert!(told.contains("longer than 60 seconds; the page was closed"), "{told}");
    assert_eq!(site.asked().len(), 1, "who waited left the queue");
}

#[tokio::test]
async fn a_browser_that_was_killed_is_started_again() {
    let site = Site::start().await;
    let calls = [
        json!({"action": "open", "url": site.at("/hang")}),
        json!({"action": "read"}),
        json!({"action": "open", "url": site.at("/")}),
    ];
    let service = started(&site, "", &calls, Db::Sqlite).await;
    let run = service.enqueue("surfer").await;
    site.until_asked(1).await;
    signal_browsers(&service, Signal::KILL);
    service.until(&run, |run| run["status"] == "completed").await;
    let rows = rows(&service, &run).await;
    assert!(result(&rows[0]).contains("the browser has ended"), "{:#}", rows[0]);
    assert!(result(&rows[1]).contains("No page is open"), "{:#}", rows[1]);
    assert!(result(&rows[2]).contains("Hello from a script"), "{:#}", rows[2]);
}

#[tokio::test]
async fn a_killed_service_leaves_no_browser() {
    chromium::program();
    let site = Site::start().await;
    let place = tempfile::TempDir::new().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
    let calls = [json!({"action": "open", "url": site.at("/hang")})];
    let mut service = Setup::new()
        .agent("surfer", &agent(&site.governance()))
        .scenario("surfer", &scenario(&calls))
        .config(PATIENT)
        .variable("TMPDIR", place.path().to_str().unwrap())
        .start(Db::Sqlite)
        .await;
    service.enqueue("surfer").await;
    site.until_asked(1).await;
    let started = processes(&service);
    assert!(started.iter().any(|(_, line)| line.contains("--type=renderer")), "{started:?}");
    let profiles = || -> Vec<_> {
        let entries = std::fs::read_dir(place.path()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("toolloop-browser-")).collect()
    };
    let left = profiles();
    assert_eq!(left.len(), 1, "{left:?}");
    service.kill().await;
    let is_there = |(pid, line): &&(i32, String)| {
        let now = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        !line.is_empty() && String::from_utf8_lossy(&now).replace('\0', " ") == *line
    };
    let mut rest = started.len();
    for _ in 0..1200 {
        rest = started.iter().filter(is_there).count();
        if rest == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(rest, 0, "{:?}", started.iter().filter(is_there).collect::<Vec<_>>());
    let asked = site.asked().len();
    service.restart().await;
    // The run goes on, and what the killed service left behind goes with the next browser.
    site.until_asked(asked + 1).await;
    let now = profiles();
    assert!(now.len() == 1 && now != left, "{left:?} {now:?}");
}

#[tokio::test]
async fn a_page_waits_for_its_parked_run() {
    chromium::program();
    let site = Site::start().await;
    let governance = site
        .governance()
        .replace("autonomy: full", "autonomy: full, tool_policies: {file_ops: ask}");
    let agent = agent(&governance).replace("[browser]", "[browser, file_ops]");
    let write = json!({"operation": "write", "path": "note", "content": "x"});
    let calls = [
        ("browser", json!({"action": "open", "url": site.at("/store")})),
        ("file_ops", write),
        ("browser", json!({"action": "open", "url": site.at("/store")})),
    ];
    let calls = calls
        .map(|(tool, arguments)| json!({"tool_calls": [{"tool": tool, "arguments": arguments}]}));
    let steps =
        json!({"steps": calls.into_iter().chain([json!({"text": "done"})]).collect::<Vec<_>>()});
    let service = Setup::new()
        .agent("surfer", &agent)
        .scenario("surfer", &steps.to_string())
        .config(PATIENT)
        .start(Db::Sqlite)
        .await;
    let run = service.enqueue("surfer").await;
    let parked = service.until(&run, |run| run["status"] == "awaiting_approval").await;
    let call = parked["pending"][0]["call_id"].as_str().unwrap();
    let id = run.rsplit('/').next().unwrap();
    let other = json!({"run_id": id, "inputs": {"what": "else"}});
    let refused = service.post("/v1/agents/surfer/invoke-iterative", &other).await;
    assert_eq!(refused.status, 409, "it has no part in that run's page: {:#}", refused.body);
    let answer = service.post(&format!("{run}/tool-calls/{call}/approve"), &json!({})).await;
    assert!(answer.status.is_success(), "{:#}", answer.body);
    service.until(&run, |run| run["status"] == "completed").await;
    let rows = rows(&service, id).await;
    assert!(result(&rows[0]).contains("Title: new"), "{:#}", rows[0]);
    assert!(result(&rows[2]).contains("Title: known own=1"), "{:#}", rows[2]);
}

/// How long a run waits for its page, and what a browser without pages costs until it is closed:
/// `cargo nextest run --release --test it browser::costs --run-ignored all --no-capture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn costs() {
    chromium::program();
    let site = Site::start().await;
    let service = Setup::new()
        .agent("surfer", &agent(&site.governance()))
        .scenario("surfer", &scenario(&[json!({"action": "open", "url": site.at("/store")})]))
        .variable("TOOLLOOP_LOG", "toolloop::tools::browser=debug,info")
        .start(Db::Sqlite)
        .await;
    let since = tokio::time::Instant::now();
    for _ in 0..30 {
        service.run("surfer", &json!({})).await;
    }
    println!("30 runs, one after another: {:?}", since.elapsed());
    for line in service.log().lines().filter(|line| line.contains("a page is ready")) {
        println!("{line}");
    }
    let (idle, before) = (tokio::time::Instant::now(), service.processor_ticks());
    while !processes(&service).is_empty() && idle.elapsed() < Duration::from_mins(2) {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let ticks = service.processor_ticks() - before;
    println!("closed after {:?}; the service used {ticks} ticks meanwhile", idle.elapsed());
}

#[tokio::test]
async fn a_missing_browser_is_told() {
    let site = Site::start().await;
    let calls = [json!({"action": "open", "url": site.at("/")})];
    let config = "[tools.browser]\npath = \"/nowhere/chromium\"\n";
    let service = started(&site, config, &calls, Db::Sqlite).await;
    let run = service.run("surfer", &json!({})).await;
    let rows = rows(&service, id(&run)).await;
    assert!(result(&rows[0]).contains("apt install chromium"), "{:#}", rows[0]);
    let tool = service.get("/v1/tools/browser").await.body;
    assert!(tool["unavailable"].as_str().unwrap().contains("apt install chromium"), "{tool:#}");
    let doctor = crate::service::command(service.dir.path())
        .args([
            "doctor",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--database-url",
            &service.database_url,
        ])
        .output()
        .await
        .unwrap();
    let doctor: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = doctor["checks"].as_array().unwrap();
    let browser = checks.iter().find(|check| check["check"] == "browser").unwrap();
    assert_eq!(browser["status"], "warn", "{browser:#}");
    assert!(browser["next"].as_str().unwrap().contains("apt install chromium"), "{browser:#}");
}
