//! What is asked while the page of a run or the inbox is open in a real browser: what is asked anew is
//! shown anew, and what is asked as before stays, with what is typed.

use serde_json::{Value, json};

use crate::asked_anew::{LAPSED, asks_anew, parked, setup};
use crate::chromium::Chromium;
use crate::console::signed_in;
use crate::mcp_input::{asks, booking};
use crate::service::{Db, Service};

/// The card of a call.
fn card(call: &Value) -> String {
    let id = call["call_id"].as_str().unwrap();
    format!("document.querySelector(':is(.notice.wait, .inbox) > [data-call=\"{id}\"]')")
}

async fn approve(service: &Service, call: &Value) {
    let of = |field: &str| call[field].as_str().unwrap();
    let path = format!("/v1/runs/{}/tool-calls/{}/approve", of("run_id"), of("call_id"));
    let approved = service.post(&path, &json!({})).await;
    assert_eq!(approved.status, 200, "{:#}", approved.body);
}

#[tokio::test]
async fn a_new_question_replaces_the_old_one_on_the_page() {
    for page in ["runs", "approvals"] {
        let service = setup().start(Db::Sqlite).await;
        let run = parked(&service, "writer").await;
        let id = run["run_id"].as_str().unwrap();
        let page = if page == "runs" { format!("#/runs/{id}") } else { "#/approvals".to_owned() };
        let browser = signed_in(&service, &page).await;
        let (first, second) = (&run["pending"][0], &run["pending"][1]);
        let form = |call: &Value| format!("{}.querySelector('.decision')", card(call));
        for call in [first, second] {
            browser.until(&format!("{}.hidden === false", form(call))).await;
        }
        browser.until_text("new.txt would be a new file").await;

        // One is decided elsewhere: what was typed for the other stays.
        let typed = format!("{}.querySelector('input')", form(first));
        browser.eval(&format!("{typed}.value = 'it is new'; {typed}.focus()")).await;
        browser.eval(&format!("window.before = {}; 0", form(first))).await;
        approve(&service, second).await;
        browser.until(&format!("!{}", card(second))).await;
        assert_eq!(browser.eval(&format!("{typed}.value")).await, "it is new", "{page}");
        assert_eq!(browser.eval(&format!("document.activeElement === {typed}")).await, true);

        // The file is there by now, so the approval of another person lapses.
        service.write("workspace/default/new.txt", "by a person");
        approve(&service, first).await;
        asks_anew(&service, &run).await;
        browser.until(&format!("{}?.innerText.includes({})", card(first), json!(LAPSED))).await;
        browser.until_text("new.txt would change").await;
        browser.until_eq(&format!("{typed}.value"), "").await;

        // Who had clicked before that has approved nothing.
        let stale = "(async () => {
            const said = before.querySelector('[role=alert]');
            before.querySelector('button').click();
            while (!said.textContent) await new Promise((resolve) => setTimeout(resolve, 20));
            return said.textContent;
        })()";
        let told = browser.eval(stale).await;
        assert!(told.as_str().unwrap().contains("asked about anew"), "{page}: {told}");
        assert_eq!(crate::approvals::file(&service, "new.txt"), "by a person");

        browser.until(&format!("{}.hidden === false", form(first))).await;
        browser.eval(&format!("{}.querySelector('button').click()", form(first))).await;
        let done = crate::approvals::ended(&service, &format!("/v1/runs/{id}")).await;
        assert_eq!(done["status"], "completed", "{done:#}");
        assert_eq!(crate::approvals::file(&service, "new.txt"), "by the model");
        browser.until(&format!("!{}", card(first))).await;
        browser.close(&service.url("/")).await;
    }
}

#[tokio::test]
async fn a_form_of_the_next_round_takes_the_place_of_the_last() {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let form =
        |n| asks(&json!({"q": {"message": format!("Question {n}"), "requestedSchema": schema}}));
    let steps = json!([form(1), form(2), form(3)]);
    let setup =
        booking(crate::mcp_input::setup(), "clerk", "governance: {autonomy: full}", &[steps]);
    let service = setup.start(Db::Sqlite).await;
    let run = crate::mcp_input::parked(&service, "clerk").await;
    let id = run["run_id"].as_str().unwrap();
    let call = &run["pending"][0];
    let result = format!("/v1/runs/{id}/tool-calls/{}/result", call["call_id"].as_str().unwrap());
    let browser = signed_in(&service, &format!("#/runs/{id}")).await;
    for (round, page, list) in
        [(1, "approvals".to_owned(), ".inbox"), (2, format!("runs/{id}"), ".notice.wait")]
    {
        browser.go(&page).await;
        let shown = format!("document.querySelector('{list}')?.innerText");
        browser.until(&format!("{shown}.includes('asks: Question {round}')")).await;
        let answers = json!({"q": {"action": "accept", "content": {}}});
        let answered = service.post(&result, &json!({"round": round, "responses": answers})).await;
        assert_eq!(answered.status, 200, "{:#}", answered.body);
        browser.until_text(&format!("asks: Question {}", round + 1)).await;
        assert!(!browser.text().await.contains(&format!("asks: Question {round}")));
    }
    browser.click(".decision .buttons button").await;
    browser.until("document.querySelector('.end.completed')").await;
    browser.close(&service.url("/")).await;
}

/// Two looks at whether the key may decide fail in this way; the next one waits until `window.allow`
/// is called.
async fn fail(browser: &Chromium, how: &str) {
    let wrapped = format!(
        "(() => {{
            const real = window.fetch;
            window.looks = 0;
            const allowed = new Promise((resolve) => {{ window.allow = resolve; }});
            window.fetch = (url, options) => {{
                if (!String(url).endsWith('approvals?limit=1')) return real(url, options);
                window.looks += 1;
                document.body.dataset.looks = window.looks;
                return window.looks > 2 ? allowed.then(() => real(url, options)) : {how};
            }};
        }})()"
    );
    browser.eval(&wrapped).await;
}

#[tokio::test]
async fn a_failed_check_of_the_scope_to_decide_is_repeated() {
    let service = setup().start(Db::Sqlite).await;
    let run = parked(&service, "writer").await;
    let unready = "Promise.resolve(new Response('{\"detail\": \"busy\"}', {status: 503}))";
    for how in ["Promise.reject(new TypeError('Failed to fetch'))", unready] {
        let browser = signed_in(&service, "#/runs").await;
        fail(&browser, how).await;
        let page = run["run_id"].as_str().unwrap();
        browser.go(&format!("runs/{page}")).await;
        browser.until("document.querySelector('.decision')?.hidden === true").await;
        browser.until("window.looks === 3").await;
        browser.eval("allow()").await;
        let all = "[...document.querySelectorAll('.decision')]";
        browser.until(&format!("{all}.length === 2 && {all}.every((it) => !it.hidden)")).await;
        assert_eq!(browser.eval("window.looks").await, 3, "all forms share a look");
        browser.close(&service.url("/")).await;
    }
}
