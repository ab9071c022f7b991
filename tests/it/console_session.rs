//! Signing in to the console: one cookie for all tabs, which other sites and scripts cannot use.
//!
//! | together with | test |
//! |---|---|
//! | replicas, restarts | `signing_out_ends_the_session_everywhere` |
//! | streams | `signing_out_ends_the_session_everywhere` |
//! | keys, tenants, scopes | `a_session_ends_with_its_key`, `a_session_is_as_wide_as_its_key` |
//! | tokens | `a_cookie_is_no_bearer_token_and_no_token_is_a_cookie` |
//! | audit | `a_key_becomes_a_cookie_that_scripts_cannot_read` |

use std::time::{Duration, Instant};

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::chromium::Chromium;
use crate::console::signed_in;
use crate::service::{ADMIN_KEY, Answer, Db, Service, Setup, answer, on_both_stores, on_one_store};

on_both_stores! {
    a_key_becomes_a_cookie_that_scripts_cannot_read,
    signing_out_ends_the_session_everywhere,
    a_session_ends_with_its_key,
    a_session_is_as_wide_as_its_key,
}

on_one_store! {
    a_cookie_is_accepted_from_own_pages_only,
    a_cookie_is_no_bearer_token_and_no_token_is_a_cookie,
}

const WRONG_KEY: &str = "tl_testadmin_zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz";

fn setup() -> Setup {
    let agent = "model: scripted/plain\nenable_double_confirmation: false";
    let slow = "model: scripted/slow\nenable_double_confirmation: false";
    Setup::new()
        .agent("plain", agent)
        .scenario("plain", "steps: [{text: done}]")
        .agent("slow", slow)
        .scenario("slow", "steps: [{delay_ms: 120000, text: late}]")
}

/// A request as the console's own page sends it, with a cookie.
fn own(service: &Service, method: Method, path: &str, cookie: &str) -> RequestBuilder {
    let request = service.http.request(method, service.url(path)).header("cookie", cookie);
    request.header("origin", service.url("")).header("x-toolloop-console", "1")
}

async fn sign_in(service: &Service, key: &str) -> Answer {
    answer(own(service, Method::POST, "/console/session", "").bearer_auth(key)).await
}

/// The cookie of a new session, as a browser sends it back.
async fn cookie(service: &Service, key: &str) -> String {
    let signed_in = sign_in(service, key).await;
    assert_eq!(signed_in.status, 200, "{:#}", signed_in.body);
    let set = signed_in.headers["set-cookie"].to_str().unwrap();
    set.split(';').next().unwrap().to_owned()
}

async fn get(service: &Service, path: &str, cookie: &str) -> Answer {
    answer(own(service, Method::GET, path, cookie)).await
}

async fn a_key_becomes_a_cookie_that_scripts_cannot_read(db: Db) {
    let service = setup().start(db).await;
    let signed_in = sign_in(&service, ADMIN_KEY).await;
    assert_eq!(signed_in.status, 200, "{:#}", signed_in.body);
    assert_eq!(signed_in.body["caller"]["tenant"], "default");
    assert_eq!(signed_in.body["caller"]["key"]["id"], "testadmin");
    assert!(!signed_in.body.to_string().contains(ADMIN_KEY));
    let set = signed_in.headers["set-cookie"].to_str().unwrap().to_owned();
    let (value, about) = set.split_once("; ").unwrap();
    let age = max_age(&set);
    assert!((43_000..=43_200).contains(&age), "{set}");
    let about = about.replace(&age.to_string(), "43200");
    assert_eq!(about, "Path=/; Max-Age=43200; HttpOnly; SameSite=Strict", "by plain HTTP");
    assert!(value.starts_with("toolloop_") && !value.contains(&ADMIN_KEY[14..]), "{value}");
    // A browser that came by HTTPS, as behind a proxy, sends it by HTTPS only, and to this host only.
    for (name, told) in [
        ("origin", service.url("").replace("http:", "https:")),
        ("sec-fetch-site", "same-origin".into()),
    ] {
        let url = service.url("/console/session");
        let request = service.http.post(url).header(name, told).header("x-toolloop-console", "1");
        let set = answer(request.bearer_auth(ADMIN_KEY)).await.headers["set-cookie"].clone();
        let set = set.to_str().unwrap();
        assert!(set.starts_with("__Host-toolloop_") && set.ends_with("; Secure"), "{set}");
        assert_eq!(get(&service, "/v1/runs", set.split(';').next().unwrap()).await.status, 200);
    }
    // It opens the API, and tells who is signed in.
    for path in ["/v1/agents", "/v1/runs", "/v1/keys", "/agents/plain"] {
        assert_eq!(get(&service, path, value).await.status, 200, "{path}");
        assert_eq!(get(&service, path, "").await.status, 401, "{path}");
    }
    let who = get(&service, "/console/session", value).await;
    assert_eq!(who.body["caller"]["scopes"], json!(["admin"]));
    assert!(who.body["caller"]["expires_at"].is_string(), "{:#}", who.body);
    assert_eq!(who.headers["cache-control"], "no-store");
    let nobody = get(&service, "/console/session", "").await;
    assert_eq!(nobody.body, json!({"authentication": "api_key", "caller": null}));
    assert!(!nobody.headers.contains_key("set-cookie"));

    // A wrong key is refused and counted as everywhere, and signing in is in the audit log.
    for wrong in [WRONG_KEY, "tl_nobody_x", "eyJ", ""] {
        let refused = sign_in(&service, wrong).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (401, &json!("UNAUTHENTICATED"))
        );
        assert!(!refused.headers.contains_key("set-cookie"));
    }
    let without = answer(own(&service, Method::POST, "/console/session", value)).await;
    assert_eq!(without.status, 401, "a session is not made of a session");
    let refused = |log: &Value| !log["data"].as_array().unwrap().is_empty();
    service.until("/v1/audit?action=login.refused&subject=testadmin", refused).await;
    let log = service.get("/v1/audit?action=console.signed_in").await.body;
    assert_eq!(log["data"].as_array().unwrap().len(), 3, "{log:#}");
    let jwt = value.split_once('=').unwrap().1;
    assert!(!log.to_string().contains(jwt) && !service.log().contains(jwt));

    let open = setup().config("[auth]\nmode = \"none\"").start(db).await;
    let who = get(&open, "/console/session", "").await.body;
    assert_eq!((&who["authentication"], &who["caller"]["key"]), (&json!("none"), &Value::Null));
    assert!(!sign_in(&open, ADMIN_KEY).await.headers.contains_key("set-cookie"));
    let bare = setup().config("[server]\nexpose = []").start(db).await;
    assert_eq!(sign_in(&bare, ADMIN_KEY).await.status, 404);
}

async fn a_cookie_is_accepted_from_own_pages_only(db: Db) {
    let service =
        setup().config("[server]\ncors_origins = [\"https://listed.example\"]").start(db).await;
    let cookie = cookie(&service, ADMIN_KEY).await;
    let own_origin = service.url("");
    let send = |method: Method, path: &'static str, headers: &[(&'static str, &str)]| {
        let mut request = service.http.request(method, service.url(path)).header("cookie", &cookie);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request.json(&json!({})))
    };
    let mark = ("x-toolloop-console", "1");
    let invoke = "/v1/agents/plain/invoke-iterative";
    for (headers, reads, changes) in [
        (&[][..], 200, 403),
        (&[mark], 200, 403),
        (&[("origin", &own_origin), mark], 200, 200),
        (&[("sec-fetch-site", "same-origin"), mark], 200, 200),
        (&[("sec-fetch-site", "same-origin"), ("origin", &own_origin)], 200, 403),
        (&[("sec-fetch-site", "same-origin"), ("x-toolloop-console", "0")], 200, 403),
        (&[("sec-fetch-site", "cross-site"), mark], 403, 403),
        (&[("sec-fetch-site", "same-site"), ("origin", &own_origin), mark], 403, 403),
        (&[("sec-fetch-site", "none"), mark], 403, 403),
        (&[("origin", "https://evil.example"), mark], 403, 403),
        (&[("origin", "https://listed.example"), mark], 403, 403),
        (&[("origin", "null"), mark], 403, 403),
    ] {
        let read = send(Method::GET, "/v1/runs", headers).await;
        let changed = send(Method::POST, invoke, headers).await;
        let got = (read.status.as_u16(), changed.status.as_u16());
        assert_eq!(got, (reads, changes), "{headers:?}: {:#}", changed.body);
        if changes == 403 {
            assert_eq!(changed.body["code"], "FOREIGN_ORIGIN", "{headers:?}");
        }
        // Signing out is nothing that another page can do, and neither is signing in as another caller.
        if changes == 403 {
            for method in [Method::DELETE, Method::POST] {
                let mut request = service
                    .http
                    .request(method, service.url("/console/session"))
                    .bearer_auth(ADMIN_KEY);
                for (name, value) in headers {
                    request = request.header(*name, *value);
                }
                let refused = answer(request.header("cookie", &cookie)).await;
                assert_eq!(refused.status, 403, "{headers:?}");
                assert!(!refused.headers.contains_key("set-cookie"));
            }
        }
    }
    // No page of a listed origin is allowed to send the cookie, or the header.
    let preflight = service.http.request(Method::OPTIONS, service.url(invoke));
    let preflight = preflight
        .header("origin", "https://listed.example")
        .header("access-control-request-method", "POST");
    let allowed = answer(preflight).await.headers;
    assert!(!allowed.contains_key("access-control-allow-credentials"));
    let headers = allowed["access-control-allow-headers"].to_str().unwrap();
    assert!(!headers.contains("x-toolloop-console"), "{headers}");
    assert_eq!(get(&service, "/v1/runs", &cookie).await.status, 200, "still signed in");
}

async fn signing_out_ends_the_session_everywhere(db: Db) {
    let mut service = setup().start(db).await;
    let staying = cookie(&service, ADMIN_KEY).await;
    let cookie = cookie(&service, ADMIN_KEY).await;
    service.kill().await;
    service.expect_reclaims();
    service.restart().await;
    assert_eq!(get(&service, "/v1/runs", &cookie).await.status, 200, "a restart changes nothing");

    let replica = match db {
        Db::Postgres => Some(setup().start_on(service.database_url.clone()).await),
        Db::Sqlite => None,
    };
    let run = service.enqueue("slow").await;
    let other = replica.as_ref().unwrap_or(&service);
    let stream = own(other, Method::GET, &format!("{run}/events"), &cookie);
    let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!(stream.status(), 200);

    let left = answer(own(&service, Method::DELETE, "/console/session", &cookie)).await;
    assert_eq!(left.status, 204);
    let set = left.headers["set-cookie"].to_str().unwrap();
    assert!(set.contains("=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"), "{set}");
    assert_eq!(get(&service, "/v1/runs", &cookie).await.status, 401, "at once");
    let end = tokio::time::timeout(Duration::from_mins(1), stream.text()).await;
    assert!(!end.expect("the stream ends").unwrap_or_default().contains("run.completed"));
    tokio::time::sleep(Duration::from_millis(1100)).await;
    for service in [Some(&service), replica.as_ref()].into_iter().flatten() {
        assert_eq!(get(service, "/v1/runs", &cookie).await.status, 401);
        let who = get(service, "/console/session", &cookie).await;
        assert_eq!(who.body["caller"], Value::Null);
        assert!(who.headers["set-cookie"].to_str().unwrap().contains("Max-Age=0"));
        assert_eq!(get(service, "/v1/runs", &staying).await.status, 200, "another one goes on");
    }
    drop(replica);
    service.kill().await;
    service.restart().await;
    assert_eq!(get(&service, "/v1/runs", &cookie).await.status, 401, "still, after a restart");
    // Again, or with nothing, it is harmless; the log has it once.
    for cookie in [&cookie, "", "toolloop_x=y"] {
        let again = answer(own(&service, Method::DELETE, "/console/session", cookie)).await;
        assert_eq!(again.status, 204);
    }
    let log = service.get("/v1/audit?action=console.signed_out").await.body;
    assert_eq!(log["data"].as_array().unwrap().len(), 1, "{log:#}");
    assert_eq!(log["data"][0]["subject"], "testadmin");
    assert!(service.post(&format!("{run}/cancel"), &json!({})).await.status.is_success());
}

async fn key(service: &Service, fields: Value) -> (String, String) {
    let mut body = json!({"name": "k", "tenant": "default"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let made = service.post("/v1/keys", &body).await.body;
    (made["id"].as_str().unwrap().to_owned(), made["key"].as_str().unwrap().to_owned())
}

async fn a_session_ends_with_its_key(db: Db) {
    let service = setup().config("[auth]\nconsole_session = \"1m\"").start(db).await;
    let (id, revoked) = key(&service, json!({"scopes": ["runs:read"]})).await;
    let session = cookie(&service, &revoked).await;
    assert_eq!(get(&service, "/v1/runs", &session).await.status, 200);
    assert_eq!(service.delete(&format!("/v1/keys/{id}")).await.status, 204);
    assert_eq!(get(&service, "/v1/runs", &session).await.status, 401);
    assert_eq!(get(&service, "/console/session", &session).await.body["caller"], Value::Null);

    // A session is never longer than its key, or than the operator says.
    let (signed_in, seconds) = signed_in_briefly(&service).await;
    // Sooner than a session of another key.
    let end = Instant::now() + Duration::from_secs(50);
    let set = signed_in.headers["set-cookie"].to_str().unwrap();
    let session = set.split(';').next().unwrap().to_owned();
    assert!(max_age(set) <= seconds, "{set}");
    let of_admin = sign_in(&service, ADMIN_KEY).await;
    assert!((30..=60).contains(&max_age(of_admin.headers["set-cookie"].to_str().unwrap())));
    while get(&service, "/v1/runs", &session).await.status != 401 {
        assert!(Instant::now() < end, "the session has no end");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Seconds that a cookie is kept.
fn max_age(set: &str) -> i64 {
    let rest = set.split_once("Max-Age=").unwrap().1;
    rest.split(';').next().unwrap().parse().unwrap()
}

/// Signs in with a key that expires in so many seconds, as few as the machine needs for that.
async fn signed_in_briefly(service: &Service) -> (Answer, i64) {
    for seconds in [3, 10, 30] {
        let end = chrono::Utc::now() + chrono::TimeDelta::seconds(seconds);
        let body = json!({"name": "brief", "scopes": ["runs:read"], "expires_at": end});
        let made = service.post("/v1/keys", &body).await;
        if let Some(key) = made.body["key"].as_str() {
            let signed_in = sign_in(service, key).await;
            if signed_in.status == 200 {
                return (signed_in, seconds);
            }
        }
    }
    panic!("no key lives long enough to sign in with");
}

async fn a_session_is_as_wide_as_its_key(db: Db) {
    let service = setup().start(db).await;
    let run = service.run("plain", &json!({})).await;
    let run = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let (_, reader) = key(&service, json!({"scopes": ["runs:read"]})).await;
    let (_, foreign) = key(&service, json!({"tenant": "acme", "scopes": ["admin"]})).await;
    let (reader, of_acme) = (cookie(&service, &reader).await, cookie(&service, &foreign).await);
    assert_eq!(get(&service, &run, &reader).await.status, 200);
    for path in ["/v1/agents", "/v1/keys", "/v1/approvals"] {
        assert_eq!(get(&service, path, &reader).await.body["code"], "FORBIDDEN", "{path}");
    }
    let invoke = own(&service, Method::POST, "/v1/agents/plain/invoke", &reader).json(&json!({}));
    assert_eq!(answer(invoke).await.body["code"], "FORBIDDEN");
    assert_eq!(get(&service, &run, &of_acme).await.status, 404);
    assert_eq!(get(&service, "/v1/runs", &of_acme).await.body["data"], json!([]));
    let who = get(&service, "/console/session", &reader).await.body;
    assert_eq!(who["caller"]["scopes"], json!(["runs:read"]));

    // A request that says itself who sends it is that one's, wherever it comes from.
    let header = own(&service, Method::GET, "/v1/runs", &reader).bearer_auth(&foreign);
    assert_eq!(answer(header).await.body["data"], json!([]));
    let wrong = own(&service, Method::GET, "/v1/runs", &reader).bearer_auth(WRONG_KEY);
    assert_eq!(answer(wrong).await.status, 401);
    let basic = own(&service, Method::GET, "/v1/runs", &reader).basic_auth("a", Some("b"));
    assert_eq!(answer(basic).await.status, 401);
    let elsewhere =
        service.http.post(service.url("/v1/agents/plain/invoke")).bearer_auth(ADMIN_KEY);
    let elsewhere = elsewhere.header("cookie", &reader).header("sec-fetch-site", "cross-site");
    assert_eq!(answer(elsewhere.json(&json!({}))).await.status, 200);
}

async fn a_cookie_is_no_bearer_token_and_no_token_is_a_cookie(db: Db) {
    let service = setup().start(db).await;
    let run = service.run("plain", &json!({})).await;
    let run = run["run_id"].as_str().unwrap();
    let path = format!("/v1/runs/{run}");
    let cookie = cookie(&service, ADMIN_KEY).await;
    let (name, session) = cookie.split_once('=').unwrap();
    let bearer = answer(service.http.get(service.url(&path)).bearer_auth(session)).await;
    assert_eq!(bearer.status, 401);
    let query = format!("{path}/events?access_token={session}");
    let query = service.http.get(service.url(&query)).header("accept", "text/event-stream");
    assert_eq!(answer(query).await.status, 401);
    let token = json!({"run_id": run, "actions": ["read"]});
    let token = service.post("/v1/tokens", &token).await.body["token"].clone();
    let token = token.as_str().unwrap();
    assert_eq!(sign_in(&service, token).await.status, 401);
    let (body, signature) = session.rsplit_once('.').unwrap();
    for forged in [token, ADMIN_KEY, "", "eyJ", &format!("{body}.{}", "A".repeat(signature.len()))]
    {
        let answer = get(&service, &path, &format!("{name}={forged}")).await;
        assert_eq!(answer.status, 401, "{forged}");
    }
    // A cookie of another service on this host says nothing here.
    let other = setup().start(db).await;
    let stranger = get(&other, "/v1/runs", &cookie).await.body;
    assert!(stranger["detail"].as_str().unwrap().contains("API key as"), "{stranger:#}");
}

#[tokio::test]
async fn all_tabs_are_signed_in_and_out_together() {
    let service = setup().start(Db::Sqlite).await;
    let run = service.run("plain", &json!({})).await;
    let mut browser = signed_in(&service, "#/runs").await;
    browser.until("document.querySelector('[data-run]')").await;
    assert_eq!(browser.eval("document.querySelector('#who').innerText.length > 3").await, true);
    assert_eq!(browser.eval("document.cookie").await, "");
    let first = browser.new_tab().await;
    let page = format!("/console#/runs/{}", run["run_id"].as_str().unwrap());
    browser.open(&service.url(&page)).await;
    browser.until("document.querySelector('.end.completed')").await;
    // Runs are started, and followed, with the session alone.
    browser.go("agents/plain").await;
    browser.click("button.main").await;
    browser
        .until("location.hash.startsWith('#/runs/') && document.querySelector('.end.completed')")
        .await;
    browser.screenshot("second-tab").await;
    browser.click("#sign-out").await;
    browser.until("document.activeElement.id === 'key'").await;
    let second = browser.switch_tab(first).await;
    browser
        .until("document.querySelector('form.sign-in') && document.querySelector('nav').hidden")
        .await;
    browser.eval("document.querySelector('#key').focus()").await;
    browser.write(ADMIN_KEY).await;
    browser.press("Enter").await;
    browser.until("document.querySelector('[data-run]')").await;
    let first = browser.switch_tab(second).await;
    browser
        .until("!document.querySelector('form.sign-in') && !document.querySelector('nav').hidden")
        .await;

    // A key that is revoked ends what its sessions show.
    let (id, brief) = key(&service, json!({"scopes": ["runs:read"], "name": "<b>brief</b>"})).await;
    browser.click("#sign-out").await;
    browser.until("document.activeElement.id === 'key'").await;
    browser.write(&brief).await;
    browser.press("Enter").await;
    browser.until("document.querySelector('#who').innerText.startsWith('<b>brief</b>')").await;
    let second = browser.switch_tab(first).await;
    browser.until("document.querySelector('#who').innerText.startsWith('<b>brief</b>')").await;
    browser.until("document.querySelector('[data-run]')").await;
    service.delete(&format!("/v1/keys/{id}")).await;
    browser.until_text("You are signed out").await;
    browser.switch_tab(second).await;
    browser.go("runs").await;
    browser.until("document.querySelector('form.sign-in')").await;
    browser.close(&service.url("/")).await;
    let stranger = Chromium::start().await;
    stranger.open(&service.url("/console")).await;
    stranger.until("document.activeElement.id === 'key'").await;
    stranger.close(&service.url("/")).await;
}
