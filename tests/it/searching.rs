//! Searching runs by words: what is found, and what must not be found out by searching.
//!
//! With other features: tenants and redaction (below); filters and pages (below); plans of the statement
//! (`store/plans.rs`); the console's box (`console_files.rs`).

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    runs_are_found_by_their_words,
    hostile_words_are_words,
    redacted_words_and_those_of_other_tenants_are_not_found,
    a_search_is_paged_and_filtered,
}

fn setup() -> Setup {
    let echo = "model: scripted/echo\nenable_double_confirmation: false\ntools: [file_ops]";
    Setup::new()
        .agent("echo", echo)
        .scenario("echo", "steps: [{text: 'The Capital is Reykjavík, \"they\" said'}]")
        .agent("parrot", &echo.replace("echo", "parrot"))
        .scenario("parrot", "steps: [{text: 'I heard {{ inputs | tojson }}'}]")
        .agent("quiet-accountant", "model: scripted/quiet\nenable_double_confirmation: false")
        .scenario("quiet", "steps: [{text: done}]")
        .agent("sleeper", "model: scripted/slow\nenable_double_confirmation: false")
        .scenario("slow", "steps: [{delay_ms: 120000, text: late}]")
}

async fn search(service: &Service, words: &str, more: &str) -> Answer {
    let url = reqwest::Url::parse_with_params(&service.url("/v1/runs"), [("q", words)]).unwrap();
    let url = format!("{url}{more}");
    answer(service.http.request(Method::GET, url).bearer_auth(&service.key)).await
}

async fn found(service: &Service, words: &str) -> Vec<String> {
    let found = search(service, words, "").await;
    assert_eq!(found.status, 200, "{words:?}: {:#}", found.body);
    ids(&found.body)
}

fn ids(page: &Value) -> Vec<String> {
    let rows = page["data"].as_array().unwrap().iter();
    rows.map(|run| run["run_id"].as_str().unwrap().to_owned()).collect()
}

fn id(run: &Value) -> String {
    run["run_id"].as_str().unwrap().to_owned()
}

async fn runs_are_found_by_their_words(db: Db) {
    let service = setup().start(db).await;
    let asked = json!({"inputs": {"task": "Compare Invoice 4711\nwith the \"ledger\"", "depth": 7_700_770_077_u64},
        "metadata": {"ticket": "ÖBB-42"}});
    let echo = id(&service.run("echo", &asked).await);
    let quiet = id(&service.run("quiet-accountant", &json!({"inputs": {"task": "nothing"}})).await);
    let path = service.enqueue("sleeper").await;
    let sleeper = path.rsplit('/').next().unwrap().to_owned();
    for (words, runs) in [
        ("invoice 4711", vec![&echo]),
        ("LEDGER\" compare", vec![&echo]),
        ("4711\twith", vec![&echo]),
        ("7700770077", vec![&echo]),
        ("capital reykjavík", vec![&echo]), // its output
        ("\"they\"", vec![&echo]),
        ("öbb", vec![]),        // only A to Z are the same in both cases
        ("ÖBB-4", vec![&echo]), // metadata
        ("accountant", vec![&quiet]),
        ("ACCOUNT nothing", vec![&quiet]),
        ("nothing invoice", vec![]),
        ("done", vec![&quiet]),
        ("sleep", vec![&sleeper]), // still running
        (&echo[..13], vec![&echo]),
        (&echo[28..], vec![&echo]),
        ("task", vec![]), // names of fields are not searched
        ("data", vec![]),
        ("depth", vec![]),
        ("completed", vec![]),
        ("  ", vec![&sleeper, &quiet, &echo]),
    ] {
        assert_eq!(found(&service, words).await.iter().collect::<Vec<_>>(), runs, "{words:?}");
    }
    let page = search(&service, "invoice", "").await.body;
    assert_eq!((&page["searched"], &page["next_cursor"]), (&json!(3), &Value::Null));
    assert!(service.get("/v1/runs").await.body.get("searched").is_none());
    assert_eq!(service.post(&format!("{path}/cancel"), &json!({})).await.status.as_u16() / 100, 2);
}

async fn hostile_words_are_words(db: Db) {
    let service = setup().start(db).await;
    let odd = "100% of a_b * \\ 'q' \" NEAR(x) ${y} :word0 :tenant ?1 $1 \u{202e}x {now}";
    let run = id(&service.run("quiet-accountant", &json!({"inputs": {"text": odd}})).await);
    for words in [
        odd,
        "100%",
        "a_b",
        "*",
        "\\",
        "'q'",
        "\"",
        "NEAR(x)",
        ":word0",
        "{now}",
        "\u{202e}x",
        "$1 ?1",
    ] {
        assert_eq!(found(&service, words).await, std::slice::from_ref(&run), "{words:?}");
    }
    let (long, many) = ("x".repeat(4096), "zq ".repeat(1365));
    for words in
        ["%", "_", "a%b", "axb", "*)", "\" OR \"1\"=\"1", "') OR 1=1 --", "NEAR/2", &long, &many]
    {
        let hits = found(&service, words).await;
        assert!(words == "%" || words == "_" || hits.is_empty(), "{words:?}: {hits:?}");
    }
    let nul = service.get("/v1/runs?q=%00").await;
    assert_eq!(nul.status, 400, "{:#}", nul.body);
}

async fn redacted_words_and_those_of_other_tenants_are_not_found(db: Db) {
    let mut service = setup().start(db).await;
    let inputs = json!({"note": "call the bank", "password": "horse-battery", "text": "api_key=sk-live-abcdefghij1234567890"});
    let run = id(&service.run("parrot", &json!({"inputs": inputs})).await);
    assert_eq!(found(&service, "call bank").await, std::slice::from_ref(&run));
    for secret in ["horse", "battery", "sk-live", "abcdefghij1234567890", "bank horse"] {
        assert_eq!(found(&service, secret).await, Vec::<String>::new(), "{secret}");
    }
    // Nor is anything of another tenant.
    let admin = json!({"name": "k", "tenant": "acme", "scopes": ["admin"]});
    let foreign = service.post("/v1/keys", &admin).await.body["key"].as_str().unwrap().to_owned();
    service.key = foreign;
    for words in ["bank", "echo", &run] {
        let page = search(&service, words, "").await.body;
        assert_eq!((ids(&page), &page["searched"]), (vec![], &json!(0)), "{words}");
    }
}

async fn a_search_is_paged_and_filtered(db: Db) {
    let service = setup().start(db).await;
    let mut runs = Vec::new();
    for number in 0..7 {
        let agent = if number % 2 == 0 { "echo" } else { "quiet-accountant" };
        let body = json!({"inputs": {"text": format!("the word, {number}")}, "metadata": {"odd": (number % 2).to_string()}});
        runs.push(id(&service.run(agent, &body).await));
    }
    runs.reverse();
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    for _ in 0..5 {
        let page = search(&service, "word the", &format!("&limit=2{cursor}")).await.body;
        seen.extend(ids(&page));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen, runs);
    for filter in
        ["agent=quiet-accountant", "metadata.odd=1", "status=completed&agent=quiet-accountant"]
    {
        let page = search(&service, "word", &format!("&{filter}")).await.body;
        assert_eq!(ids(&page), [runs[1].clone(), runs[3].clone(), runs[5].clone()], "{filter}");
        assert_eq!(page["searched"], 3, "{filter}");
    }
    let none = search(&service, "word", "&status=failed").await.body;
    assert_eq!((ids(&none), &none["searched"]), (vec![], &json!(0)));
}
