//! The pages of the console for people who see little, hear them read or use no mouse: axe-core finds no
//! violation of WCAG 2.2 AA and of its best practices, on any page. One store is enough.

use serde_json::{Value, json};

use crate::chromium::Chromium;
use crate::console::signed_in;
use crate::installing::Workshop;
use crate::service::{ADMIN_KEY, Db, Service, Setup};

const WRITER: &str = "
model: scripted/writer
description: Reads, and writes a report.
version: 1.0.0
tools: [file_ops]
inputs:
  type: object
  properties:
    topic: {type: string, title: Topic}
    tags: {type: array, items: {type: string}}
    more: {type: object, properties: {deep: {type: boolean}}}
governance: {paths: {write: ['**']}}
enable_double_confirmation: false
";
const WRITING: &str = "
steps:
  - text: I look and write.
    usage: {input_tokens: 4000, output_tokens: 500}
    tool_calls:
      - {tool: file_ops, arguments: {operation: read, path: notes.txt}}
      - {tool: file_ops, arguments: {operation: read, path: nowhere.txt}}
      - {tool: file_ops, arguments: {operation: edit, path: notes.txt, old: seventeen, new: eighteen}}
  - {text: done, usage: {input_tokens: 7000, output_tokens: 900}}
";

/// Violations: the rule, how many elements, and the first of them.
const VIOLATIONS: &str = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})
    .then(({violations}) => violations.map(({id, nodes}) => `${id}: ${nodes.length}, first ${nodes[0].html.slice(0, 200)}`))";

async fn service() -> Service {
    let careful = WRITER
        .replace("scripted/writer", "scripted/careful")
        .replace("governance: {", "governance: {tool_policies: {file_ops: ask}, ");
    Setup::new()
        .agent("writer", WRITER)
        .scenario("writer", WRITING)
        .agent("careful", &careful)
        .scenario("careful", WRITING)
        .agent("boss", "model: scripted/boss\ntools: ['agent:writer']")
        .scenario(
            "boss",
            "steps: [{tool_calls: [{tool: 'agent:writer', arguments: {topic: a}}]}, {text: done}]",
        )
        .agent("hopeless", "model: scripted/hopeless")
        .scenario("hopeless", "steps: [{error: {status: 400, message: it is no use}}]")
        .config("[capabilities.\"scripted/writer\"]\ncontext_window = 10000")
        .file("notes.txt", "seventeen\n")
        .start(Db::Sqlite)
        .await
}

async fn started(service: &Service, agent: &str, body: &Value) -> String {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    let run = service.post(&path, body).await.body;
    run["run_id"].as_str().unwrap_or_else(|| panic!("{run:#}")).to_owned()
}

async fn assert_accessible(browser: &Chromium, axe: &str, page: &str) {
    if browser.eval("typeof axe").await != "object" {
        browser.eval(&format!("{axe}; 0")).await;
    }
    // The bar that leads to the newest event covers, above the end of a page, what lies beneath it.
    let end = "(scrollTo(0, document.documentElement.scrollHeight), !document.querySelector('.follow:not([hidden])'))";
    browser.until(end).await;
    assert_eq!(browser.eval(VIOLATIONS).await, json!([]), "{page}");
}

#[tokio::test]
async fn no_page_has_a_violation() {
    let axe = Workshop::node().await.dir.join("node_modules/axe-core/axe.min.js");
    let axe = std::fs::read_to_string(axe).unwrap();
    let service = service().await;
    let written = started(&service, "writer", &json!({"session_id": "s-1"})).await;
    let waiting = started(&service, "careful", &json!({})).await;
    let family = started(&service, "boss", &json!({})).await;
    let failed = started(&service, "hopeless", &json!({})).await;
    let browser = Chromium::start().await;
    browser.open(&service.url("/console")).await;
    browser.until("document.activeElement.id === 'key'").await;
    assert_accessible(&browser, &axe, "sign in").await;
    browser.write(ADMIN_KEY).await;
    browser.press("Enter").await;
    browser.until("!document.querySelector('nav').hidden && document.querySelector('h1')").await;
    let pages = [
        (String::new(), "figure, .card"),
        ("runs".into(), "table a"),
        ("runs?q=seventeen".into(), "main tbody td"),
        (format!("runs/{written}"), ".end.completed"),
        (format!("runs/{waiting}"), ".decision .buttons button"),
        (format!("runs/{family}"), ".end.completed"),
        (format!("runs/{failed}"), ".end.failed, .end"),
        ("approvals".into(), ".buttons button"),
        ("sessions".into(), "main a[href^='#/sessions/']"),
        ("sessions/s-1".into(), "textarea"),
        ("agents".into(), ".card"),
        ("agents/writer".into(), "form.invoke"),
        ("judge/writer".into(), "form.judge"),
        ("tools".into(), ".card"),
        ("runs/nobody".into(), ".notice"),
    ];
    for (scheme, width) in [("light", 1280), ("dark", 390)] {
        browser.scheme(scheme).await;
        browser.window(width, 844).await;
        for (page, there) in &pages {
            browser.go(page).await;
            browser.until(&format!("document.querySelector(\"{there}\")")).await;
            let unfolded = "document.querySelectorAll('main details').forEach((part) => { part.open = true; })";
            browser.eval(unfolded).await;
            assert_accessible(&browser, &axe, &format!("{page}, {scheme}")).await;
        }
    }
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn how_full_the_context_window_was_is_drawn() {
    let service = service().await;
    let run = started(&service, "writer", &json!({})).await;
    let browser = signed_in(&service, &format!("#/runs/{run}")).await;
    let chart = "document.querySelector('svg[aria-label^=\"Context window\"]')";
    let label = format!("{chart}?.getAttribute('aria-label')");
    browser.until_eq(&label, "Context window: 79 % in 2 model calls, of 10,000 tokens").await;
    browser.screenshot("context-window").await;
    // A model whose window is not known has no such picture.
    let run = started(&service, "boss", &json!({})).await;
    browser.go(&format!("runs/{run}")).await;
    browser.until("document.querySelector('svg[aria-label^=\"Tokens by model call\"]')").await;
    assert_eq!(browser.eval(chart).await, Value::Null);
    browser.close(&service.url("/")).await;
}
