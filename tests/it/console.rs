//! The console and the API document in a real browser, as a person meets them.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection;
use tokio::sync::watch;

use crate::chromium::Chromium;
use crate::console_live::fragile_proxy;
use crate::mock_model::{MockModel, Reply};
use crate::service::{ADMIN_KEY, Db, Service, Setup, answer};

const READER: &str = r"
description: Reads a file and says what is in it.
version: 1.4.0
model: scripted/reader
instructions: Read the file that is asked for.
inputs:
  type: object
  required: [path]
  properties:
    path: {type: string, title: Path, description: A file of the workspace., minLength: 3}
    depth: {type: integer, minimum: 1, maximum: 9, default: 2}
    weight: {type: number}
    hidden: {type: boolean}
    style: {type: string, enum: [short, long]}
    globs: {type: array, items: {type: string}}
    more: {type: object}
  additionalProperties: false
tools: [file_ops]
enable_double_confirmation: false
";

/// The last answer is slow, so that there is something to watch.
const READING: &str = r#"
steps:
  - text: I will look at the file first.
    tool_calls:
      - {tool: file_ops, arguments: {operation: read, path: "{{ inputs.path }}"}}
      - {tool: file_ops, arguments: {operation: read, path: nowhere.txt}}
  - text: '{"lines": "{{ results[0] | trim }}", "inputs": {{ inputs | tojson }}}'
    delay_ms: 2000
"#;

/// Lists, then answers at length, wrongly first.
const EXTRACTOR: &str = "
description: Counts what is in a directory.
model: scripted/extractor
tools: [file_ops]
output:
  schema: {type: object, required: [total], properties: {total: {type: integer, minimum: 1}}}
";
const EXTRACTING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: output, arguments: {total: 0}}]
  - tool_calls: [{tool: output, arguments: {total: 3}}]
"#;

fn setup() -> Setup {
    Setup::new()
        .agent("reader", READER)
        .scenario("reader", READING)
        .agent("extractor", EXTRACTOR)
        .scenario("extractor", EXTRACTING)
        .agent("hopeless", "model: scripted/hopeless\ndescription: Never succeeds.")
        .scenario("hopeless", "steps: [{error: {status: 400, message: it is no use}}]")
        .agent("patient", "model: scripted/patient\ndescription: Takes its time.")
        .scenario("patient", "steps: [{text: done, delay_ms: 600000}]")
        .file("notes.txt", "seventeen\n")
}

pub(crate) async fn signed_in(service: &Service, page: &str) -> Chromium {
    signed_in_with(ADMIN_KEY, service, page).await
}

pub(crate) async fn signed_in_with(key: &str, service: &Service, page: &str) -> Chromium {
    let browser = Chromium::start().await;
    browser.open(&service.url(&format!("/console{page}"))).await;
    browser.until("document.activeElement.id === 'key'").await;
    browser.write(key).await;
    browser.press("Enter").await;
    browser.until("!document.querySelector('nav').hidden && document.querySelector('h1')").await;
    browser
}

fn id(run: &Value) -> &str {
    run["run_id"].as_str().unwrap()
}

/// How many responses the page has received from addresses with this end.
fn loads(end: &str) -> String {
    format!(
        "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('{end}')).length"
    )
}

#[tokio::test]
async fn a_person_signs_in_and_finds_runs() {
    let service = setup().start(Db::Sqlite).await;
    let labels =
        json!({"inputs": {"path": "notes.txt"}, "metadata": {"ticket": "42"}, "session_id": "s-1"});
    let read = service.run("reader", &labels).await;
    let failed = service.run("hopeless", &json!({"metadata": {"which": "first"}})).await;
    let extracted = service.run("extractor", &json!({})).await;

    let browser = Chromium::start().await;
    browser.open(&service.url("/console#/runs")).await;
    browser.until("document.activeElement.id === 'key'").await;
    browser.screenshot("sign-in").await;
    browser.write("tl_nobody_0123456789abcdefghjkmnpqrstvwxyz0123456789abcdefghjk").await;
    browser.press("Enter").await;
    browser.until_text("unknown, expired or revoked").await;
    browser.until("document.activeElement.id === 'key'").await;
    browser.write(ADMIN_KEY).await;
    browser.press("Enter").await;
    browser.until("document.querySelectorAll('[data-run]').length === 3").await;
    let statuses = "[...document.querySelectorAll('td .status')].map((s) => s.innerText)";
    browser.until_eq(statuses, json!(["completed", "failed", "completed"])).await;
    browser.screenshot("runs").await;

    // What happens is seen without a look of one's own; where there is more than a page, pages
    // follow.
    for _ in 0..48 {
        service.run("hopeless", &json!({})).await;
    }
    browser.until("document.querySelectorAll('[data-run]').length === 50").await;
    browser.click(".pager a").await;
    browser.until("document.querySelectorAll('[data-run]').length === 1").await;
    assert_eq!(browser.eval("document.querySelector('[data-run]').dataset.run").await, id(&read));
    browser.click(".pager a").await;
    browser.until("document.querySelectorAll('[data-run]').length === 50").await;

    // A filter changes rows and address; the address alone shows the same.
    let only = |run: &Value| {
        format!(
            "document.querySelectorAll('[data-run]').length === 1 && document.querySelector('[data-run=\"{}\"]')",
            id(run)
        )
    };
    let choose = "(() => { const s = document.querySelector('[name=status]'); s.value = 'failed';
        s.dispatchEvent(new Event('change', {bubbles: true})); })()";
    browser.eval(choose).await;
    browser
        .until(
            "document.querySelectorAll('[data-run]').length === 49 && \
             [...document.querySelectorAll('td .status')].every((s) => s.innerText === 'failed')",
        )
        .await;
    assert_eq!(browser.eval("location.hash").await, "#/runs?status=failed");
    browser.eval("history.back()").await;
    browser.until("document.querySelectorAll('[data-run]').length === 50").await;
    for (filter, run) in [
        ("status=completed&agent=reader", &read),
        ("agent=extractor", &extracted),
        ("metadata.ticket=42&session_id=s-1", &read),
        ("termination_reason=model_error&metadata.which=first", &failed),
    ] {
        browser.go(&format!("runs?{filter}")).await;
        browser.until(&only(run)).await;
    }
    browser.go("runs?created_before=2020-01-01T00:00:00Z").await;
    browser.until_text("No runs match.").await;

    for (page, part) in [("agents", "Counts what is in a directory."), ("tools", "file_ops")] {
        browser.go(page).await;
        browser.until_text(part).await;
        browser.screenshot(page).await;
    }
    browser.click("#sign-out").await;
    browser.until("document.activeElement.id === 'key'").await;
    let kept = "sessionStorage.length + localStorage.length + document.cookie.length";
    assert_eq!(browser.eval(kept).await, 0);
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn the_timeline_shows_calls_results_and_errors() {
    let service = setup().start(Db::Sqlite).await;
    let labels =
        json!({"inputs": {"path": "notes.txt"}, "metadata": {"ticket": "42"}, "session_id": "s-1"});
    let read = service.run("reader", &labels).await;
    let failed = service.run("hopeless", &json!({})).await;
    let extracted = service.run("extractor", &json!({})).await;

    let browser = signed_in(&service, "#/runs?agent=reader").await;
    // The tool calls of one run.
    browser.click(&format!("[data-run='{}']", id(&read))).await;
    browser
        .until("document.querySelectorAll('.call').length === 2 && document.querySelector('.end')")
        .await;
    browser.until("!document.querySelector('.picture [hidden]')").await;
    browser.click(".call summary").await;
    browser.until("document.querySelector('.call').innerText.includes('Gate: allowed')").await;
    let call = browser.eval("document.querySelector('.call').innerText").await;
    for part in [
        "file_ops",
        "succeeded",
        "\"operation\": \"read\"",
        "\"path\": \"notes.txt\"",
        "seventeen",
        "Gate: allowed",
    ] {
        assert!(call.as_str().unwrap().contains(part), "{part} is not in {call}");
    }
    let page = browser.text().await;
    for part in [
        "I will look at the file first.",
        "Iteration 2",
        "ticket=42",
        "s-1",
        "reader 1.4.0",
        "2 of 20",
    ] {
        assert!(page.contains(part), "{part} is not in:\n{page}");
    }
    browser.screenshot("run-completed").await;
    assert!(!page.contains("[object"), "{page}");

    // A run with an error, and one with a proposal that was not valid.
    browser.go(&format!("runs/{}", id(&failed))).await;
    browser.until("document.querySelector('.end.failed')").await;
    browser.until_text("MODEL_ERROR").await;
    browser.screenshot("run-failed").await;
    browser.go(&format!("runs/{}", id(&extracted))).await;
    browser.until("document.querySelector('.end.completed')").await;
    let story = browser.text().await;
    for part in
        ["Attempt 1", "Output proposed", "Validation failed", "/total", "Attempt 2", "\"total\": 3"]
    {
        assert!(story.contains(part), "{part} is not in:\n{story}");
    }

    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_parked_run_shows_its_pending_calls() {
    let service = setup().start(Db::Sqlite).await;
    let run = service.run("extractor", &json!({})).await;
    // As a crash in the middle of a call, and the replica that met it, leave it.
    let mut database = sqlx::SqliteConnection::connect(&service.database_url).await.unwrap();
    for change in [
        "DELETE FROM run_events WHERE first_seq > 5",
        "UPDATE run_events SET seq = 5, events = (SELECT json_group_array(json(value)) \
         FROM json_each(run_events.events) WHERE key <= 5 - first_seq) WHERE seq > 5",
        "UPDATE tool_calls SET state = 'unknown', result_seq = NULL",
        "UPDATE runs SET status = 'needs_review', next_seq = 6, finished_at = NULL, \
         termination_reason = NULL",
        "INSERT INTO approvals (run_id, seq, call_id, tenant, at, kind, tool, reason, arguments, status) \
         SELECT run_id, 5, call_id, 'default', 0, 'review', tool, 'It is unknown whether it took effect.', \
         '{\"operation\": \"list\"}', 'pending' FROM tool_calls",
    ] {
        sqlx::query(change).execute(&mut database).await.unwrap();
    }

    let browser = signed_in(&service, &format!("#/runs/{}", id(&run))).await;
    browser.until("document.querySelector('.title .status')?.innerText === 'needs review'").await;
    browser.until("document.querySelector('.call')?.innerText.includes('running')").await;
    browser.until_text("Waits for review").await;
    let waits =
        browser.eval("document.querySelector('[aria-label=\"Waiting for\"]').innerText").await;
    for part in [
        "Waits for review",
        "file_ops",
        "unknown whether it took effect",
        "\"operation\": \"list\"",
    ] {
        assert!(waits.as_str().unwrap().contains(part), "{part} is not in {waits}");
    }
    browser.screenshot("run-parked").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_pending_call_is_approved_and_denied_on_the_page_of_its_run() {
    let editor = "
model: scripted/editor
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}}
";
    let steps = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: notes.txt, content: "new\u202edlo"}}]
  - text: '{{ results[0] }}'
"#;
    let service = setup().agent("editor", editor).scenario("editor", steps).start(Db::Sqlite).await;
    let parked = service.post("/v1/agents/editor/invoke-iterative", &json!({})).await.body;
    assert_eq!(parked["status"], "awaiting_approval", "{parked:#}");
    let reader = json!({"name": "x", "tenant": "default", "scopes": ["runs:read", "agents:read"]});
    let reader = service.post("/v1/keys", &reader).await.body["key"].as_str().unwrap().to_owned();

    let page = format!("#/runs/{}", id(&parked));
    let browser = signed_in(&service, &page).await;
    let form = "[aria-label=\"Waiting for\"] form";
    browser.until(&format!("document.querySelector('{form}')?.hidden === false")).await;
    let shown = browser.eval("document.getElementById('main').innerText").await;
    let shown = shown.as_str().unwrap();
    assert!(shown.contains(r"new\u{202e}dlo") && !shown.contains('\u{202e}'), "{shown}");
    browser.screenshot("run-approval").await;
    browser.click(&format!("{form} input")).await;
    browser.write("not today").await;
    let looks = loads(id(&parked));
    let before = browser.eval(&looks).await;
    browser.until(&format!("{looks} >= {before} + 2")).await; // the run is looked at again every second
    assert_eq!(
        browser.eval(&format!("document.querySelector('{form} input').value")).await,
        "not today"
    );
    browser.press("Tab").await;
    browser.until_eq("document.activeElement.innerText", "Approve").await;
    browser.press("Tab").await;
    browser.until_eq("document.activeElement.innerText", "Deny").await;
    browser.press("Enter").await;
    browser.until("document.querySelector('.title .status')?.innerText === 'completed'").await;
    let run = service.get(&format!("/v1/runs/{}", id(&parked))).await.body;
    assert!(run["output"]["result"].as_str().unwrap().contains("not today"), "{run:#}");
    browser.close(&service.url("/")).await;

    // Who may not decide is told what is waited for, and not asked.
    let parked = service.post("/v1/agents/editor/invoke-iterative", &json!({})).await.body;
    let browser = Chromium::start().await;
    browser.open(&service.url(&format!("/console#/runs/{}", id(&parked)))).await;
    browser.until("document.activeElement.id === 'key'").await;
    browser.write(&reader).await;
    browser.press("Enter").await;
    browser.until("document.querySelector('[aria-label=\"Waiting for\"]')?.innerText.includes('notes.txt')").await;
    // The page has been told that this key may not decide, and has been drawn since.
    browser.until(&format!("{} > 0", loads("approvals?limit=1"))).await;
    let looks = loads(id(&parked));
    let before = browser.eval(&looks).await;
    browser.until(&format!("{looks} > {before}")).await;
    assert_eq!(browser.eval(&format!("document.querySelector('{form}').hidden")).await, true);
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_run_is_started_from_the_form_and_followed_live() {
    let mock = MockModel::start().await;
    let (answers, held) = watch::channel(false);
    let read = json!({"operation": "read", "path": "notes.txt"});
    let last = Reply::Held(held, Box::new(Reply::text("seventeen")));
    mock.script([Reply::call("file_ops", &read), last]);
    let provider = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let reader = READER.replace("scripted/reader", "mock/any");
    let service = setup().agent("reader", &reader).config(&provider).start(Db::Sqlite).await;
    let browser = signed_in(&service, "#/agents/reader").await;
    let field = |name: &str| format!("#field-inputs-{name}");
    browser.click(&field("path")).await;
    browser.screenshot("invoke").await;

    // What the service refuses is said at the field.
    browser.click("button.main").await;
    browser
        .until(
            "document.querySelector('#field-inputs-path').getAttribute('aria-invalid') === 'true'",
        )
        .await;
    let said = "document.querySelector('#field-inputs-path-error').innerText";
    browser.until_eq(said, "\"path\" is a required property").await;
    browser.click(&field("path")).await;
    browser.write("x").await;
    // A text may have lines; a field of one line sends the form.
    browser.press("Enter").await;
    let path = "document.querySelector('#field-inputs-path').value";
    browser.until_eq(path, "x\n").await;
    browser.eval(&format!("{path} = 'x'")).await;
    browser.click(&field("weight")).await;
    browser.press("Enter").await;
    browser.until(&format!("{said}.includes('shorter')")).await;
    browser.until_eq("document.activeElement.id", "field-inputs-path").await;
    browser.screenshot("invoke-refused").await;
    browser.click(&field("more")).await;
    browser.write("[1,").await;
    browser.click("button.main").await;
    browser
        .until("document.querySelector('#field-inputs-more-error').innerText.includes('not JSON')")
        .await;

    // All kinds of fields, and a limit.
    browser.eval("document.querySelector('#field-inputs-more').value = ''").await;
    browser.click("#field-inputs-globs .add").await;
    for (name, text) in [("globs-0", "*.md"), ("more", "{\"a\": [null]}"), ("weight", "0.5")] {
        browser.click(&field(name)).await;
        browser.write(text).await;
    }
    browser.eval("document.querySelector('#field-inputs-path').value = ''").await;
    browser.click(&field("path")).await;
    browser.write("notes.txt").await;
    browser.eval("document.querySelector('#field-inputs-hidden').selectedIndex = 2").await;
    browser.eval("document.querySelector('#field-inputs-style').selectedIndex = 2").await;
    browser.click("form details summary").await;
    browser.click("#field-budget-max_tool_calls").await;
    browser.write("7").await;
    browser.click("button.main").await;

    // The page of the run shows what happens while it happens, and then the end.
    browser.until("location.hash.startsWith('#/runs/') && document.querySelector('.call')").await;
    browser.until("document.querySelector('.call').innerText.includes('succeeded')").await;
    browser.until_eq("document.querySelector('.title .status').innerText", "running").await;
    browser.screenshot("run-live").await;
    answers.send(true).unwrap();
    browser.until("document.querySelector('.end.completed')").await;
    browser.until("document.querySelector('.title .status').innerText === 'completed'").await;
    browser.until("document.querySelector('#announcer').textContent === 'Run completed'").await;
    let run = browser.eval("location.hash").await.as_str().unwrap().replace("#/", "/v1/");
    let run = service.get(&run).await.body;
    let inputs = json!({"path": "notes.txt", "depth": 2, "weight": 0.5, "hidden": false, "style": "long", "globs": ["*.md"], "more": {"a": [null]}});
    assert_eq!(run["inputs"], inputs);
    assert_eq!(run["budget"]["limits"]["max_tool_calls"], 7);
    assert_eq!(run["kind"], "iterative");

    // A single shot has no limits to choose.
    browser.go("agents/extractor").await;
    browser.click("[value=invoke]").await;
    browser.until("document.querySelector('fieldset:disabled')").await;
    browser.click("button.main").await;
    browser.until("location.hash.startsWith('#/runs/') && document.querySelector('.end')").await;
    browser.until_text("single").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn every_action_works_with_the_keyboard() {
    let service = setup().start(Db::Sqlite).await;
    service.run("hopeless", &json!({})).await;
    let browser = signed_in(&service, "#/runs").await;
    browser.until("document.querySelector('[data-run]')").await;
    browser.until_eq("document.activeElement.tagName", "H1").await;

    browser.press("/").await;
    browser.until_eq("document.activeElement.name + document.activeElement.value", "q").await;
    browser.write("nobody").await;
    browser.press("Enter").await;
    browser.until_text("No runs match.").await;
    browser.until("document.querySelector('#announcer').textContent === '0 runs'").await;
    browser.press("Escape").await;
    browser.until_eq("document.activeElement.tagName", "H1").await;

    // Start a run that takes long, by links, fields and the button.
    browser.eval("document.querySelector('.skip').focus()").await;
    browser.tab_to("nav a[href='#/agents']").await;
    browser.until_eq("getComputedStyle(document.activeElement).outlineStyle", "solid").await;
    browser.press("Enter").await;
    browser.until("document.querySelector('a[href=\"#/agents/patient\"]')").await;
    browser.tab_to("a[href='#/agents/patient']").await;
    browser.press("Enter").await;
    browser.until("document.querySelector('form.invoke')").await;
    browser.tab_to("form.invoke summary").await;
    browser.press(" ").await;
    browser.tab_to("#field-session_id").await;
    browser.write("by-keyboard").await;
    browser.tab_to("button.main").await;
    browser.press("Enter").await;

    // Think better of cancelling it, then do.
    browser.until("document.querySelector('.iteration')").await;
    browser.tab_to(".title button.danger").await;
    browser.press("Enter").await;
    browser.until("document.querySelector('dialog[open]')").await;
    browser.screenshot("cancel").await;
    browser.press("Escape").await;
    browser.until("!document.querySelector('dialog')").await;
    browser.until_eq("document.activeElement.innerText", "Cancel run").await;
    browser.press(" ").await;
    browser.until("document.querySelector('dialog[open]')").await;
    browser.tab_to("#reason").await;
    browser.write("no longer needed").await;
    browser.press("Enter").await;
    browser.until("document.querySelector('.end.cancelled')").await;
    browser.until("document.querySelector('.title .status').innerText === 'cancelled'").await;
    browser.until_eq("document.querySelector('.title button.danger').hidden", true).await;
    let run = service.get("/v1/runs?session_id=by-keyboard").await.body["data"][0].clone();
    assert_eq!(
        (&run["status"], &run["error"]["context"]["reason"]),
        (&json!("cancelled"), &json!("no longer needed"))
    );
    browser.close(&service.url("/")).await;
}

const MARKUP: &str =
    r#"<img src=x onerror="window.struck = true"><script>window.struck = true</script>"#;

#[tokio::test]
async fn markup_from_models_and_callers_is_shown_as_text() {
    let yaml = |text: &str| serde_json::to_string(text).unwrap();
    let service = Setup::new()
        .agent("nasty", &format!("model: scripted/nasty\ndescription: {}\ntools: [file_ops]", yaml(MARKUP)))
        .scenario(
            "nasty",
            &format!(
                "steps: [{{text: {0}, tool_calls: [{{tool: {0}, arguments: {0}}}, {{tool: file_ops, arguments: {{operation: read, path: x.html}}}}]}}, {{text: {0}}}]",
                yaml(MARKUP)
            ),
        )
        .file("x.html", MARKUP)
        .config("[auth]\nmode = \"none\"")
        .start(Db::Sqlite)
        .await;
    let request =
        json!({"inputs": {MARKUP: MARKUP}, "metadata": {MARKUP: MARKUP}, "session_id": MARKUP});
    let run = service.run("nasty", &request).await;

    // Without a key, for none is asked for.
    let browser = Chromium::start().await;
    browser.open(&service.url("/console#/runs")).await;
    browser.until("document.querySelector('[data-run]')").await;
    assert_eq!(browser.eval("document.querySelector('#sign-out').hidden").await, true);
    for (page, drawn, parts) in [
        (format!("runs/{}", id(&run)), ".end", 6),
        (
            format!("runs?session_id={}", "%3Cimg%20src%3Dx%20onerror%3D1%3E"),
            "table tbody td, .notice",
            0,
        ),
        ("agents".into(), ".card, table tbody td", 1),
        ("agents/nasty".into(), ".card, .notice, form", 1),
        ("agents/%3Cimg%20src%3Dx%20onerror%3D%22window.struck%3Dtrue%22%3E".into(), ".notice", 0),
    ] {
        browser.go(&page).await;
        browser.until(&format!("document.querySelector('{drawn}')")).await;
        browser.eval("document.querySelectorAll('details').forEach((d) => d.open = true)").await;
        browser
            .until(&format!("document.body.innerText.split('<img src=x').length > {parts}"))
            .await;
        assert_eq!(
            browser.eval("document.querySelectorAll('img, script:not([src])').length").await,
            0,
            "{page}"
        );
        assert_eq!(browser.eval("window.struck === undefined").await, true, "{page}");
    }
    browser.close(&service.url("/")).await;
}

/// The lowest contrast (WCAG 2) of a text with what is behind it, and which text that is.
const LOWEST_CONTRAST: &str = "(() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => channels(colour).slice(0, 3).map((c) => c / 255)
        .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (node) => {
        const colour = getComputedStyle(node).backgroundColor;
        return channels(colour)[3] === 0 ? behind(node.parentElement) : colour;
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let worst = [21, ''];
    while (texts.nextNode()) {
        const node = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || !node.checkVisibility() || node.closest(':disabled')) continue;
        const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < worst[0]) worst = [contrast, texts.currentNode.data];
    }
    return worst;
})()";

#[tokio::test]
async fn contrast_and_layout_hold_in_light_dark_and_on_a_small_screen() {
    let service = setup().start(Db::Sqlite).await;
    let long = "s".repeat(256);
    let read = service
        .run("reader", &json!({"inputs": {"path": "notes.txt"}, "metadata": {"ticket": "42"}, "session_id": long}))
        .await;
    let failed = service.run("hopeless", &json!({})).await;
    let browser = signed_in(&service, "#/runs").await;
    let mut grounds = Vec::new();
    for scheme in ["light", "dark"] {
        browser.scheme(scheme).await;
        for (width, size) in [(1280, "wide"), (390, "narrow")] {
            browser.window(width, 844).await;
            for (page, name, there) in [
                ("runs".to_owned(), "runs", "table a"),
                (format!("runs/{}", id(&read)), "run", ".end"),
                (format!("runs/{}", id(&failed)), "failed", ".end"),
                ("agents".to_owned(), "agents", ".card"),
                ("agents/reader".to_owned(), "invoke", "form.invoke"),
                ("judge/reader".to_owned(), "judge", "form.judge"),
                ("tools".to_owned(), "tools", ".card"),
                (format!("sessions/{long}"), "long-session", ".of-run"),
            ] {
                browser.go(&page).await;
                browser.until(&format!("document.querySelector('{there}')")).await;
                browser.screenshot(&format!("{name}-{scheme}-{size}")).await;
                let worst = browser.eval(LOWEST_CONTRAST).await;
                assert!(worst[0].as_f64().unwrap() >= 4.5, "{page} in {scheme}: {worst}");
                let overflow =
                    browser.eval("document.documentElement.scrollWidth - innerWidth").await;
                assert!(
                    overflow.as_i64().unwrap() <= 0,
                    "{page}, {size}: {overflow} pixels too wide"
                );
            }
        }
        grounds.push(browser.eval("getComputedStyle(document.body).backgroundColor").await);
    }
    assert_ne!(grounds[0], grounds[1]);
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_resumed_stream_neither_loses_nor_repeats_events() {
    let step = |n: u32| {
        format!(
            "  - {{delay_ms: 400, tool_calls: [{{tool: file_ops, arguments: {{operation: read, path: n{n}.txt}}}}]}}\n"
        )
    };
    let steps: String = (0..8).map(step).collect();
    let service = Setup::new()
        .agent("long", "model: scripted/long\ntools: [file_ops]\nlimits: {error_threshold: 100}\nenable_double_confirmation: false")
        .scenario("long", &format!("steps:\n{steps}  - text: the end"))
        .config("[auth]\nmode = \"none\"")
        .start(Db::Sqlite)
        .await;
    let (proxy, breaks) = fragile_proxy(service.url("").replace("http://", "")).await;
    let browser = Chromium::start().await;
    browser.open(&format!("{proxy}/console#/agents/long")).await;
    browser.click("button.main").await;
    for calls in [1, 4] {
        browser.until(&format!("document.querySelectorAll('.call').length >= {calls}")).await;
        breaks.send_modify(|n| *n += 1);
    }
    browser.until("document.querySelector('.end.completed')").await;
    let shown = "[...document.querySelectorAll('.call summary .preview')].map((p) => JSON.parse(p.textContent).path)";
    let expected: Vec<String> = (0..8).map(|n| format!("n{n}.txt")).collect();
    browser.until_eq(shown, json!(expected)).await;
    browser.until_eq("document.querySelectorAll('.iteration').length", 9).await;
    browser.close(&proxy).await;
}

#[tokio::test]
async fn the_console_is_beneath_the_prefix_too() {
    let service = setup().start(Db::Sqlite).await;
    let browser = Chromium::start().await;
    browser.open(&service.url("/v1/console#/agents")).await;
    browser.until("document.activeElement.id === 'key'").await;
    browser.write(ADMIN_KEY).await;
    browser.press("Enter").await;
    browser.until_text("extractor").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn the_api_document_page_loads_nothing_from_the_internet() {
    let service = setup().start(Db::Sqlite).await;
    let browser = Chromium::start().await;
    browser.open(&service.url("/docs")).await;
    browser.until("document.querySelectorAll('.opblock').length > 15").await;
    browser.until_text("/agents/{name}/invoke-iterative").await;
    browser.click("[id$=list_runs] .opblock-summary-control").await;
    browser.until("document.querySelector('[id$=list_runs] .parameters')").await;
    browser.screenshot("docs").await;
    browser.open(&service.url("/v1/docs")).await;
    browser.until("document.querySelectorAll('.opblock').length > 15").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn pages_have_a_content_security_policy_and_can_be_disabled() {
    let service = setup().start(Db::Sqlite).await;
    let get = async |service: &Service, path: &str| {
        answer(service.http.request(Method::GET, service.url(path))).await
    };
    for (path, kind) in [
        ("/console", "text/html; charset=utf-8"),
        ("/console/console.js", "text/javascript; charset=utf-8"),
        ("/console/console.css", "text/css; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/docs/swagger-ui.css", "text/css; charset=utf-8"),
        ("/docs/", "text/html; charset=utf-8"),
        ("/v1/console", "text/html; charset=utf-8"),
        ("/v1/console/console.js", "text/javascript; charset=utf-8"),
        ("/v1/docs", "text/html; charset=utf-8"),
        ("/v1/docs/", "text/html; charset=utf-8"),
        ("/v1/docs/swagger-ui.css", "text/css; charset=utf-8"),
    ] {
        let page = get(&service, path).await;
        assert_eq!(page.status, StatusCode::OK, "{path}");
        assert_eq!(page.headers["content-type"], kind, "{path}");
        let policy = page.headers["content-security-policy"].to_str().unwrap();
        for rule in [
            "default-src 'none'",
            "script-src 'self';",
            "connect-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        ] {
            assert!(policy.contains(rule), "{path}: {policy}");
        }
        assert_eq!(page.headers["cache-control"], "no-cache");
        assert_eq!(page.headers["x-content-type-options"], "nosniff");
        let known =
            service.http.get(service.url(path)).header("If-None-Match", &page.headers["etag"]);
        assert_eq!(answer(known).await.status, StatusCode::NOT_MODIFIED, "{path}");
    }
    for path in ["/console/nothing.js", "/docs/index.css", "/console/../api.js"] {
        assert_eq!(get(&service, path).await.body["code"], "NOT_FOUND", "{path}");
    }
    let written = answer(service.http.post(service.url("/console"))).await;
    assert_eq!(written.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(written.headers["allow"], "GET,HEAD");

    let bare = setup().config("[server]\nexpose = []").start(Db::Sqlite).await;
    for path in ["/console", "/console/", "/console/console.js", "/docs", "/v1/docs", "/v1/console"]
    {
        assert_eq!(get(&bare, path).await.body["code"], "NOT_FOUND", "{path}");
    }
}
