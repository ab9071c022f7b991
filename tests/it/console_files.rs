//! Pages of the console for files, for the search of runs and for judging calls, in a real browser.

use serde_json::json;

use crate::console::signed_in;
use crate::service::{Db, Service, Setup};

const MARKUP: &str = "out/<img src=x onerror=alert(1)>.md";

fn setup() -> Setup {
    let rules = "enable_double_confirmation: false\n\
                 governance: {autonomy: full, paths: {write: ['out/**'], deny: ['secret/**']}}";
    let writing = format!(
        "steps:\n  - tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: '{MARKUP}', \
         content: \"made\\n\"}}}}]\n  - {{text: 'the {{{{ inputs.what }}}} is done'}}"
    );
    let talker = "model: scripted/talker\ntools: [file_ops]\nworkspace: 'of/{session_id}'\n";
    Setup::new()
        .agent("writer", &format!("model: scripted/writer\ntools: [file_ops]\n{rules}"))
        .scenario("writer", &writing)
        .agent("talker", &format!("{talker}{rules}"))
        .scenario("talker", "steps: [{text: done}]")
        .file("data/long.txt", &"a line of text\n".repeat(30_000))
        .file("data/odd # name %.txt", "odd\n")
}

async fn run(service: &Service, what: &str) -> String {
    let body = json!({"inputs": {"what": what}, "metadata": {"about": what}});
    let run = service.run("writer", &body).await;
    run["run_id"].as_str().unwrap().to_owned()
}

/// Chooses pictures, and sends them into a directory.
fn upload(directory: &str, names: &[&str]) -> String {
    let png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    format!(
        "(() => {{
            const bytes = Uint8Array.from(atob('{png}'), (c) => c.charCodeAt(0));
            const files = new DataTransfer();
            for (const name of {names:?}) files.items.add(new File([bytes], name));
            document.querySelector('#upload').files = files.files;
            document.querySelector('#upload-folder').value = '{directory}';
            document.querySelector('.upload button').click();
        }})()"
    )
}

#[tokio::test]
async fn files_of_a_run_are_seen_put_and_deleted() {
    let service = setup().start(Db::Sqlite).await;
    let run = run(&service, "first").await;
    let browser = signed_in(&service, &format!("#/runs/{run}")).await;
    browser.until("document.querySelector('.end.completed')").await;
    browser.click(".workspace summary").await;
    browser.until("document.querySelectorAll('.files li').length === 3").await;
    for part in [MARKUP, "450 kB", "4 bytes", "changed by a call"] {
        let rows = "document.querySelector('.files').innerText";
        browser.until(&format!("{rows}.includes({})", json!(part))).await;
    }
    assert_eq!(browser.eval("document.querySelectorAll('.files img').length").await, 0);
    let says = |place: &str, text: &str| {
        format!("document.querySelector('.workspace{place}').innerText.includes('{text}')")
    };
    browser.click("[aria-label='View data/odd # name %.txt']").await;
    browser.until(&says(" .result", "odd")).await;
    browser.click("[aria-label='View data/long.txt']").await;
    browser.until(&says(" .result", "The first 262 kB of 450 kB")).await;
    browser.screenshot("files").await;

    // A picture is shown by an address that the page has made.
    browser.eval(&upload("out/pictures/", &["dot.png"])).await;
    browser.click("[aria-label='View out/pictures/dot.png']").await;
    browser.until("document.querySelector('.workspace img')").await;
    let picture = "document.querySelector('.workspace img')";
    let width = format!("{picture}.decode().then(() => {picture}.naturalWidth)");
    assert_eq!(browser.eval(&width).await, 1);
    // The same again is asked about, each file; deleting takes two clicks.
    let both = upload("out/pictures/", &["dot.png", "second.png"]);
    browser.eval(&both).await;
    browser.until("document.querySelector('[aria-label=\"View out/pictures/second.png\"]')").await;
    browser.until(&says("", "dot.png already exists")).await;
    browser.eval(&both).await;
    browser.until("document.querySelectorAll('.workspace .notice button').length === 2").await;
    browser.eval("document.querySelector('.files li').dataset.before = ''").await;
    browser.click(".workspace .notice button").await;
    browser.until(&format!("!{}", says("", "dot.png already exists"))).await;
    browser.until("!document.querySelector('.files [data-before]')").await;
    browser.until(&says("", "second.png already exists")).await;
    browser.click("[aria-label='Delete out/pictures/dot.png']").await;
    browser.click("[aria-label='Really delete out/pictures/dot.png?']").await;
    browser.until("document.querySelectorAll('.files li').length === 4").await;
    let gone = service.get(&format!("/v1/runs/{run}/files/out/pictures/dot.png")).await;
    assert_eq!(gone.status, 404);
    // What leads elsewhere is no path.
    browser.eval(&upload("../..", &["dot.png"])).await;
    browser.until(&says("", "not a path in the workspace")).await;
    browser.window(390, 844).await;
    let overflow = browser.eval("document.documentElement.scrollWidth - innerWidth").await;
    assert!(overflow.as_i64().unwrap() <= 0, "{overflow} pixels too wide");
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn without_files_write_nothing_can_be_changed_and_sessions_have_files() {
    let service = setup().start(Db::Sqlite).await;
    service.run("talker", &json!({"session_id": "s-1", "inputs": {}})).await;
    let put = service.request(reqwest::Method::PUT, "/v1/sessions/s-1/files/out/a.txt");
    assert_eq!(put.body("one\n").send().await.unwrap().status(), 201);
    let run = run(&service, "first").await;
    let browser = signed_in(&service, "#/sessions/s-1").await;
    browser.click(".workspace summary").await;
    browser.click("[aria-label='View out/a.txt']").await;
    browser.until("document.querySelector('.workspace .result').innerText.includes('one')").await;
    for (scopes, panels) in [(json!(["runs:read", "files:read"]), 1), (json!(["runs:read"]), 0)] {
        let key = json!({"name": "reader", "tenant": "default", "scopes": scopes});
        let key = service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned();
        browser.click("#sign-out").await;
        browser.until("document.activeElement.id === 'key'").await;
        browser.go(&format!("runs/{run}")).await;
        browser.write(&key).await;
        browser.press("Enter").await;
        browser.until("document.querySelector('.end.completed')").await;
        assert_eq!(browser.eval("document.querySelectorAll('.workspace').length").await, panels);
        if panels == 1 {
            browser.click(".workspace summary").await;
            browser.until("document.querySelectorAll('.files li').length > 0").await;
            let tools = "document.querySelectorAll('.upload, .files .danger').length";
            assert_eq!(browser.eval(tools).await, 0);
        }
    }
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn runs_are_searched_in_the_console() {
    let service = setup().start(Db::Sqlite).await;
    let apple = run(&service, "apple").await;
    run(&service, "pear").await;
    let browser = signed_in(&service, "#/runs").await;
    browser.until("document.querySelectorAll('[data-run]').length === 2").await;
    browser.press("/").await;
    browser.write("APPLE done").await;
    browser.press("Enter").await;
    browser
        .until(&format!(
            "document.querySelectorAll('[data-run]').length === 1 \
             && document.querySelector('[data-run=\"{apple}\"]')"
        ))
        .await;
    assert_eq!(browser.eval("location.hash").await, "#/runs?q=APPLE+done");
    assert!(browser.text().await.contains("Looked through 2 runs"));
    browser.go("runs?q=%25&agent=writ").await;
    browser.until_text("No runs match.").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_call_is_judged_on_the_page_of_its_agent() {
    let service = setup().start(Db::Sqlite).await;
    let browser = signed_in(&service, "#/agents/writer").await;
    browser.click("a[href='#/judge/writer']").await;
    browser.until("document.querySelector('form.judge')").await;
    let choose = "(() => { const s = document.querySelector('#judged-arguments-operation');
        s.value = [...s.options].find((o) => o.text === 'write').value; })()";
    browser.eval(choose).await;
    browser.eval("document.querySelector('#judged-arguments-content').value = 'x'").await;
    for (path, decision) in [("out/new.txt", "allowed"), ("secret/x", "blocked")] {
        browser.eval("document.querySelector('#judged-arguments-path').value = ''").await;
        browser.click("#judged-arguments-path").await;
        browser.write(path).await;
        browser.click("button.main").await;
        let status = "document.querySelector('.result .status')?.innerText";
        browser.until(&format!("{status} === '{decision}'")).await;
        let said = browser.eval("document.querySelector('.result').innerText").await;
        let said = said.as_str().unwrap();
        assert!(said.contains("Judged, not executed.") && said.contains(path), "{said}");
    }
    browser.screenshot("judged").await;
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]));
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_tool_is_called_on_the_page_of_its_agent() {
    let service = setup().start(Db::Sqlite).await;
    let browser = signed_in(&service, "#/judge/writer").await;
    browser.until("document.querySelector('form.judge')").await;
    let choose = "(() => { const s = document.querySelector('#judged-arguments-operation');
        s.value = [...s.options].find((o) => o.text === 'write').value; })()";
    let status = "document.querySelector('.result .status')?.innerText";
    browser.eval(choose).await;
    browser.eval("document.querySelector('#judged-arguments-content').value = 'x'").await;
    for (path, ending) in [("out/new.txt", "completed"), ("secret/x", "failed")] {
        browser.eval("document.querySelector('#judged-arguments-path').value = ''").await;
        browser.click("#judged-arguments-path").await;
        browser.write(path).await;
        browser.eval("document.querySelector('.result')?.remove()").await;
        browser.click("button.call").await;
        browser.until(&format!("{status} === '{ending}'")).await;
        let said = browser.eval("document.querySelector('.result').innerText").await;
        assert!(said.as_str().unwrap().contains(path), "{said}");
    }
    browser.screenshot("called").await;
    let runs = service.get("/v1/runs").await.body["data"].clone();
    assert_eq!((&runs[0]["kind"], &runs[1]["kind"]), (&json!("call"), &json!("call")), "{runs:#}");

    // Its page tells the call, and leads back to the form with what was entered.
    browser.click(".result a[href^='#/runs/']").await;
    browser.until("document.querySelector('.call') && document.querySelector('.end.failed')").await;
    assert_eq!(browser.eval("document.querySelectorAll('.step.iteration').length").await, json!(0));
    browser.click("a[href^='#/judge/writer?from=']").await;
    browser.until("document.querySelector('#judged-arguments-path')?.value === 'secret/x'").await;
    browser.close(&service.url("/")).await;
}
