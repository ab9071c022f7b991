//! A tool that asks a person in the middle of its call, answered in the console by a real browser.

use serde_json::{Value, json};

use crate::chromium::Chromium;
use crate::console::signed_in;
use crate::mcp_input::{asks, booking, parked, setup};
use crate::service::{Db, Service};

const FIELD: &str = ".decision textarea";

/// An agent whose tool asks for two forms in one turn.
async fn service() -> Service {
    let number = json!({"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}});
    let name =
        json!({"type": "object", "required": ["who"], "properties": {"who": {"type": "string"}}});
    let forms = asks(&json!({
        "how many": {"message": "How many? <img src=x onerror=\"document.title='taken'\">", "requestedSchema": number},
        "who": {"message": "For whom?", "requestedSchema": name},
    }));
    booking(setup(), "clerk", "governance: {autonomy: full}", &[json!([forms])])
        .start(Db::Sqlite)
        .await
}

async fn waiting(service: &Service) -> (String, Chromium) {
    let run = parked(service, "clerk").await;
    let run = format!("runs/{}", run["run_id"].as_str().unwrap());
    let browser = signed_in(service, &format!("#/{run}")).await;
    browser.until(&format!("document.querySelectorAll('{FIELD}').length === 2")).await;
    (format!("/v1/{run}"), browser)
}

async fn fill(browser: &Chromium, place: usize, text: &str) {
    let put = format!("document.querySelectorAll('{FIELD}')[{place}].value = {}", json!(text));
    browser.eval(&put).await;
}

/// The button of that place: to send, to decline, neither.
async fn press(browser: &Chromium, place: usize) {
    browser.click(&format!(".decision .buttons button:nth-of-type({place})")).await;
}

#[tokio::test]
async fn a_form_is_answered_on_the_page_of_its_run() {
    let service = service().await;
    let (run, browser) = waiting(&service).await;
    let shown = browser.text().await;
    for text in ["odd asks: How many? <img src=x", "For whom?", "\"minimum\": 1"] {
        assert!(shown.contains(text), "{shown}");
    }
    let alert = "document.querySelector('.decision [role=alert]').innerText";
    for (given, told) in [
        (["{\"n\":", "{}"], "\"how many\" is not JSON"),
        (["{\"n\": 0}", "{\"who\": \"Ada\"}"], "/responses/how many/content/n"),
        (["{\"n\": 1}", "{}"], "/responses/who/content"),
    ] {
        fill(&browser, 0, given[0]).await;
        fill(&browser, 1, given[1]).await;
        press(&browser, 1).await;
        browser.until(&format!("{alert}.includes({})", json!(told))).await;
    }
    assert_eq!(service.get(&run).await.body["status"], "awaiting_tool_results");
    browser.screenshot("input").await;

    fill(&browser, 1, "{\"who\": \"Ada\"}").await;
    press(&browser, 1).await;
    browser.until("document.querySelector('.end.completed')").await;
    assert_ne!(browser.eval("document.title").await, "taken");
    let told = output(&service, &run).await;
    assert!(told.contains("Ada"), "{told}");
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_form_is_declined_on_the_page_of_its_run() {
    for (place, action) in [(2, "decline"), (3, "cancel")] {
        let service = service().await;
        let (run, browser) = waiting(&service).await;
        fill(&browser, 0, "no JSON").await;
        press(&browser, place).await;
        browser.until("document.querySelector('.end.completed')").await;
        let told = output(&service, &run).await;
        assert!(told.contains(action), "{told}");
        browser.close(&service.url("/")).await;
    }
}

async fn output(service: &Service, run: &str) -> String {
    let run: Value = service.until(run, |run| run["status"] == "completed").await;
    run["output"].to_string()
}
