//! Which rights a key can pass on, who can revoke it, what ends with it, and what is recorded of that.

use std::time::{Duration, Instant};

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use reqwest::Method;
use serde_json::{Value, json};

use crate::claims::change;
use crate::service::{ADMIN_KEY, Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_key_cannot_create_one_that_lives_longer_or_may_do_more,
    a_scope_that_permits_no_tool_is_warned_of,
    descendants_go_with_the_key_that_created_them,
    the_operators_key_and_the_last_admin_are_revoked_only_by_force,
    of_two_admins_that_revoke_each_other_at_once_one_stays,
    an_admin_lists_and_revokes_in_every_tenant,
    the_last_use_of_a_key_is_noted,
    keys_cancels_and_refused_logins_are_audited,
    streams_and_waits_end_with_their_key,
    runs_are_cancelled_with_their_key,
    a_run_that_cannot_be_cancelled_with_its_key_holds_back_no_other,
    an_expired_key_loses_its_stream,
    a_key_has_only_so_many_requests_open,
}

/// A key that was created: its id and the whole of it.
struct Made {
    id: String,
    key: String,
}

async fn make(service: &Service, key: &str, body: &Value) -> Answer {
    answer(service.http.post(service.url("/v1/keys")).bearer_auth(key).json(body)).await
}

async fn made(service: &Service, key: &str, body: Value) -> Made {
    let mut named = json!({"name": "k"});
    named.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let made = make(service, key, &named).await;
    assert_eq!(made.status, 201, "{named}: {:#}", made.body);
    let text = |field: &str| made.body[field].as_str().unwrap().to_owned();
    Made { id: text("id"), key: text("key") }
}

async fn status(service: &Service, key: &str, path: &str) -> u16 {
    answer(service.http.get(service.url(path)).bearer_auth(key)).await.status.as_u16()
}

/// Asks until a key is accepted no more, at most 30 seconds.
async fn until_refused(service: &Service, key: &str) {
    for _ in 0..3000 {
        if status(service, key, "/v1/runs").await == 401 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the key is still accepted");
}

async fn revoke(service: &Service, key: &str, path: &str) -> Answer {
    let url = service.url(&format!("/v1/keys/{path}"));
    answer(service.http.delete(url).bearer_auth(key)).await
}

fn refusal(answer: &Answer) -> (u16, &str) {
    (answer.status.as_u16(), answer.body["code"].as_str().unwrap_or_default())
}

fn setup() -> Setup {
    Setup::new()
        .agent("sleeper", "model: scripted/sleeper\ninstructions: Sleep.\n")
        .scenario("sleeper", "steps: [{delay_ms: 120000, text: late}]")
        .agent(
            "asker",
            "model: scripted/asker\ninstructions: Ask.\nenable_double_confirmation: false\n",
        )
        .scenario("asker", "steps: [{tool_calls: [{tool: ask, arguments: {}}]}, {text: done}]")
}

async fn a_key_cannot_create_one_that_lives_longer_or_may_do_more(db: Db) {
    let service = setup()
        .config("[governance]\nrate_limit_per_minute = 600\nrate_limit_burst = 60")
        .start(db)
        .await;
    let end = (Utc::now() + TimeDelta::hours(1)).trunc_subsecs(0);
    let limits = json!({
        "scopes": ["keys:admin", "runs:read"], "expires_at": end,
        "rate_limit_per_minute": 5, "rate_limit_burst": 2,
    });
    let maker = made(&service, ADMIN_KEY, limits).await;
    let expiring = format!("{}", end.format("%Y-%m-%dT%H:%M:%SZ"));
    for (field, value, bound) in [
        ("expires_at", json!(end + TimeDelta::seconds(1)), expiring.as_str()),
        ("rate_limit_per_minute", json!(6), "5"),
        ("rate_limit_per_minute", json!(1_000_000_000), "5"),
        ("rate_limit_burst", json!(3), "2"),
    ] {
        let mut body = json!({"name": "n", "scopes": ["runs:read"]});
        body[field] = value;
        let refused = make(&service, &maker.key, &body).await;
        assert_eq!(refusal(&refused), (403, "FORBIDDEN"), "{body}: {:#}", refused.body);
        let detail = refused.body["detail"].as_str().unwrap();
        assert!(detail.contains("cannot create") && detail.contains(bound), "{detail}");
    }
    // What is left open, or null, is what the creating key has; less is possible.
    for body in [
        json!({"name": "n", "scopes": ["runs:read"]}),
        json!({"name": "n", "scopes": ["runs:read"], "expires_at": null, "rate_limit_burst": null}),
    ] {
        let heir = make(&service, &maker.key, &body).await.body;
        let expires: DateTime<Utc> = heir["expires_at"].as_str().unwrap().parse().unwrap();
        assert_eq!(
            (expires, &heir["rate_limit_per_minute"], &heir["rate_limit_burst"]),
            (end, &json!(5), &json!(2)),
            "{heir:#}"
        );
        assert_eq!(heir["created_by"], maker.id.as_str());
    }
    let less = json!({"name": "n", "scopes": ["runs:read"], "rate_limit_per_minute": 1,
        "expires_at": end - TimeDelta::minutes(1)});
    let less = make(&service, &maker.key, &less).await;
    assert_eq!((less.status.as_u16(), &less.body["rate_limit_burst"]), (201, &json!(1)));

    // Without limits of its own, a key is held to those of the service; not so an administrator.
    let plain = made(&service, ADMIN_KEY, json!({"scopes": ["keys:admin", "runs:read"]})).await;
    let more = json!({"name": "n", "scopes": ["runs:read"], "rate_limit_per_minute": 601});
    let refused = make(&service, &plain.key, &more).await;
    assert_eq!(refusal(&refused), (403, "FORBIDDEN"));
    assert!(refused.body["detail"].as_str().unwrap().contains("600"), "{:#}", refused.body);
    made(&service, ADMIN_KEY, json!({"scopes": ["runs:read"], "rate_limit_per_minute": 60_000}))
        .await;
}

async fn a_scope_that_permits_no_tool_is_warned_of(db: Db) {
    let service = setup().start(db).await;
    let scopes = json!([
        "runs:read",
        "tools:execute",
        "tools:file_ops",
        "tools:file_*",
        "tools:file-ops",
        "tools:mcp:tme/*"
    ]);
    let made = make(&service, ADMIN_KEY, &json!({"name": "n", "scopes": scopes})).await;
    assert_eq!(made.status, 201, "{:#}", made.body);
    let expected = ["tools:file-ops", "tools:mcp:tme/*"];
    let expected = expected.map(|scope| format!("\"{scope}\" permits no tool of this service"));
    assert_eq!(made.body["warnings"], json!(expected), "{:#}", made.body);
}

async fn descendants_go_with_the_key_that_created_them(db: Db) {
    let service = setup().start(db).await;
    let scopes = json!({"scopes": ["keys:admin", "runs:read"]});
    let root = made(&service, ADMIN_KEY, scopes.clone()).await;
    let child = made(&service, &root.key, scopes.clone()).await;
    let grandchild = made(&service, &child.key, scopes.clone()).await;
    let other = made(&service, ADMIN_KEY, scopes.clone()).await;

    assert_eq!(revoke(&service, ADMIN_KEY, &root.id).await.status, 204);
    let alive = |key: String| {
        let service = &service;
        async move { status(service, &key, "/v1/runs").await == 200 }
    };
    let keys = [&root, &child, &grandchild, &other].map(|made| made.key.clone());
    let mut lives = Vec::new();
    for key in keys.clone() {
        lives.push(alive(key).await);
    }
    assert_eq!(lives, [false, true, true, true], "without them by default");

    assert_eq!(
        revoke(&service, ADMIN_KEY, &format!("{}?descendants=maybe", root.id)).await.status,
        400
    );
    let path = format!("{}?descendants=true", root.id);
    assert_eq!(revoke(&service, ADMIN_KEY, &path).await.status, 204);
    assert_eq!(revoke(&service, ADMIN_KEY, &path).await.status, 204, "again is harmless");
    let mut lives = Vec::new();
    for key in keys {
        lives.push(alive(key).await);
    }
    assert_eq!(lives, [false, false, false, true]);
    let records = service.get("/v1/audit?action=key.revoked").await.body;
    let mut revoked: Vec<&str> = records["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| record["arguments"]["key_id"].as_str().unwrap())
        .collect();
    revoked.sort_unstable();
    let mut expected = [&root, &child, &grandchild].map(|made| made.id.as_str());
    expected.sort_unstable();
    assert_eq!(revoked, expected, "each once");
}

async fn the_operators_key_and_the_last_admin_are_revoked_only_by_force(db: Db) {
    let service = setup().start(db).await;
    let helper = made(&service, ADMIN_KEY, json!({"scopes": ["keys:admin"]})).await;
    let refused = revoke(&service, &helper.key, "testadmin").await;
    assert_eq!(refusal(&refused), (403, "FORBIDDEN"), "only admin revokes admin");
    let by_force = revoke(&service, &helper.key, "testadmin?force=true").await;
    assert_eq!(refusal(&by_force), (403, "FORBIDDEN"));

    let second = made(&service, ADMIN_KEY, json!({"scopes": ["admin"]})).await;
    let refused = revoke(&service, &second.key, "testadmin").await;
    assert_eq!(refusal(&refused), (409, "PROTECTED_KEY"), "{:#}", refused.body);
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("operator") && detail.contains("force=true"), "{detail}");
    assert_eq!(status(&service, ADMIN_KEY, "/v1/keys").await, 200);
    assert_eq!(revoke(&service, &second.key, "testadmin?force=true").await.status, 204);
    assert_eq!(status(&service, ADMIN_KEY, "/v1/keys").await, 401);

    // One that has expired, and one that is only called so, are none.
    let soon = Utc::now() + TimeDelta::seconds(3);
    let expiring =
        made(&service, &second.key, json!({"scopes": ["admin"], "expires_at": soon})).await;
    made(&service, &second.key, json!({"name": "admin", "scopes": ["tools:\"admin\""]})).await;
    until_refused(&service, &expiring.key).await;
    let refused = revoke(&service, &second.key, &second.id).await;
    assert_eq!(refusal(&refused), (409, "PROTECTED_KEY"), "{:#}", refused.body);
    assert!(refused.body["detail"].as_str().unwrap().contains("last key"));
    assert_eq!(status(&service, &second.key, "/v1/keys").await, 200, "nothing was revoked");
    let third = made(&service, &second.key, json!({"scopes": ["admin"]})).await;
    let both = format!("{}?descendants=true", second.id);
    assert_eq!(refusal(&revoke(&service, &third.key, &both).await), (409, "PROTECTED_KEY"));
    assert_eq!(revoke(&service, &third.key, &second.id).await.status, 204);
    assert_eq!(revoke(&service, &third.key, &format!("{}?force=true", third.id)).await.status, 204);
    assert_eq!(status(&service, &third.key, "/v1/keys").await, 401);
}

async fn of_two_admins_that_revoke_each_other_at_once_one_stays(db: Db) {
    let service = setup().start(db).await;
    let first = made(&service, ADMIN_KEY, json!({"scopes": ["admin"]})).await;
    assert_eq!(revoke(&service, &first.key, "testadmin?force=true").await.status, 204);
    let mut keys = vec![first];
    for _ in 0..7 {
        keys.push(made(&service, &keys[0].key, json!({"scopes": ["admin"]})).await);
    }
    // Each has been let in before any of them is revoked.
    let revoked = keys.iter().map(|key| revoke(&service, &keys[0].key, &key.id));
    futures::future::join_all(revoked).await;
    let mut left = 0;
    for key in &keys {
        left += usize::from(status(&service, &key.key, "/v1/keys").await == 200);
    }
    assert!(left >= 1, "no administrator is left");
}

async fn an_admin_lists_and_revokes_in_every_tenant(db: Db) {
    let service = setup().start(db).await;
    let theirs =
        made(&service, ADMIN_KEY, json!({"tenant": "acme", "scopes": ["keys:admin", "runs:read"]}))
            .await;
    let ours = made(&service, ADMIN_KEY, json!({"scopes": ["keys:admin", "runs:read"]})).await;
    let listed = service.get("/v1/keys?tenant=acme").await.body;
    let ids: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [theirs.id.as_str()]);
    assert_eq!(service.get("/v1/keys?tenant=Not%20One").await.status, 400);

    for (key, tenant, expected) in [
        (&ours, "acme", 403),
        (&ours, "default", 200),
        (&theirs, "default", 403),
        (&theirs, "acme", 200),
    ] {
        assert_eq!(
            status(&service, &key.key, &format!("/v1/keys?tenant={tenant}")).await,
            expected
        );
    }
    // To others, a key of another tenant does not exist.
    assert_eq!(refusal(&revoke(&service, &ours.key, &theirs.id).await), (404, "NOT_FOUND"));
    assert_eq!(refusal(&revoke(&service, &theirs.key, &ours.id).await), (404, "NOT_FOUND"));
    assert_eq!(refusal(&revoke(&service, &theirs.key, "testadmin").await), (404, "NOT_FOUND"));
    assert_eq!(revoke(&service, ADMIN_KEY, &theirs.id).await.status, 204);
    assert_eq!(status(&service, &theirs.key, "/v1/runs").await, 401);
    // It is recorded where the key is.
    assert_eq!(service.get("/v1/audit?action=key.revoked").await.body["data"], json!([]));
    let auditor =
        made(&service, ADMIN_KEY, json!({"tenant": "acme", "scopes": ["audit:read"]})).await;
    let records = service.http.get(service.url("/v1/audit?action=key.revoked"));
    let records = answer(records.bearer_auth(&auditor.key)).await.body;
    assert_eq!(records["data"][0]["subject"], "testadmin", "{records:#}");
    assert_eq!(records["data"][0]["arguments"]["key_id"], theirs.id.as_str());
}

async fn the_last_use_of_a_key_is_noted(db: Db) {
    let service = setup().start(db).await;
    let used = made(&service, ADMIN_KEY, json!({"scopes": ["runs:read"]})).await;
    let unused = made(&service, ADMIN_KEY, json!({"scopes": ["runs:read"]})).await;
    let before = Utc::now() - TimeDelta::seconds(1);
    assert_eq!(status(&service, &used.key, "/v1/runs").await, 200);
    // A wrong secret is no use of it.
    let wrong = format!("tl_{}_{}", unused.id, "x".repeat(43));
    assert_eq!(status(&service, &wrong, "/v1/runs").await, 401);
    let last_use = |keys: &Value, id: &str| {
        let keys = keys["data"].as_array().unwrap();
        let key = keys.iter().find(|key| key["id"] == id).unwrap();
        key["last_used_at"].as_str().map(|at| at.parse::<DateTime<Utc>>().unwrap())
    };
    let keys = service.until("/v1/keys", |keys| last_use(keys, &used.id).is_some()).await;
    let noted = last_use(&keys, &used.id).unwrap();
    assert!(noted > before && noted < Utc::now() + TimeDelta::seconds(1), "{noted}");
    assert_eq!(last_use(&keys, &unused.id), None);
    for _ in 0..20 {
        assert_eq!(status(&service, &used.key, "/v1/runs").await, 200);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let keys = service.get("/v1/keys").await.body;
    assert_eq!(last_use(&keys, &used.id), Some(noted), "not again within a minute");
}

async fn keys_cancels_and_refused_logins_are_audited(db: Db) {
    let mut service = setup().start(db).await;
    let made =
        made(&service, ADMIN_KEY, json!({"scopes": ["runs:read"], "rate_limit_per_minute": 7}))
            .await;
    let started = service
        .request(Method::POST, "/v1/agents/sleeper/invoke-iterative")
        .header("prefer", "respond-async")
        .json(&json!({}));
    let run = answer(started).await.body["run_id"].as_str().unwrap().to_owned();
    for _ in 0..3 {
        let cancel = json!({"reason": "enough"});
        assert!(service.post(&format!("/v1/runs/{run}/cancel"), &cancel).await.status.is_success());
    }
    assert_eq!(revoke(&service, ADMIN_KEY, &made.id).await.status, 204);
    let unknown = format!("tl_nosuchkey_{}", "x".repeat(43));
    let wrong = format!("tl_testadmin_{}", "x".repeat(43));
    for _ in 0..20 {
        for token in [unknown.as_str(), &wrong, &made.key, "none"] {
            assert_eq!(status(&service, token, "/v1/runs").await, 401);
        }
        assert_eq!(
            answer(service.http.get(service.url("/v1/runs"))).await.status,
            401,
            "without a token there is no login"
        );
    }
    service.signal(crate::service::Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
    service.restart().await;

    let records = async |action: &str| {
        let records = service.get(&format!("/v1/audit?limit=200&action={action}")).await.body;
        records["data"].as_array().unwrap().clone()
    };
    let created = records("key.created").await;
    assert_eq!(created.len(), 2, "{created:#?}");
    assert_eq!(
        (&created[1]["subject"], &created[1]["arguments"]["key_id"]),
        (&json!("service"), &json!("testadmin"))
    );
    let about = &created[0]["arguments"];
    assert_eq!(
        (&about["rate_limit_per_minute"], &about["scopes"]),
        (&json!(7), &json!(["runs:read"]))
    );
    assert!(!created[0].to_string().contains(made.key.splitn(3, '_').nth(2).unwrap()));
    let cancelled = records("run.cancel_requested").await;
    assert_eq!(cancelled.len(), 1, "{cancelled:#?}");
    assert_eq!(
        (&cancelled[0]["run_id"], &cancelled[0]["subject"], &cancelled[0]["reason"]),
        (&json!(run), &json!("testadmin"), &json!("enough"))
    );
    let mut refused = std::collections::BTreeMap::<(String, String), (u64, usize)>::new();
    for record in records("login.refused").await {
        assert_eq!(
            (&record["decision"], &record["arguments"]["source"]),
            (&json!("blocked"), &json!("127.0.0.1"))
        );
        let text = |field: &str| record[field].as_str().unwrap().to_owned();
        let entry = refused.entry((text("subject"), text("reason"))).or_default();
        entry.0 += record["arguments"]["count"].as_u64().unwrap();
        entry.1 += 1;
    }
    let expected = [
        ("testadmin", "The key has another secret."),
        (&made.id, "The key is revoked."),
        ("unknown", "The token is not an API key."),
        ("unknown", "There is no key with this id."),
    ];
    assert_eq!(refused.len(), 4, "{refused:#?}");
    for (subject, reason) in expected {
        let (count, records) = refused[&(subject.to_owned(), reason.to_owned())];
        assert_eq!(count, 20, "{subject}: {reason}");
        assert!(records <= 3, "they are counted, not listed: {records}");
    }
}

async fn asleep(service: &Service, key: &str) -> String {
    let started = service
        .http
        .post(service.url("/v1/agents/sleeper/invoke-iterative"))
        .bearer_auth(key)
        .header("prefer", "respond-async")
        .json(&json!({}));
    let answer = answer(started).await;
    assert_eq!(answer.status, 202, "{:#}", answer.body);
    answer.body["run_id"].as_str().unwrap().to_owned()
}

async fn streams_and_waits_end_with_their_key(db: Db) {
    let service = setup().start(db).await;
    let viewer = made(&service, ADMIN_KEY, json!({"scopes": ["runs:read", "agents:invoke"]})).await;
    let run = asleep(&service, ADMIN_KEY).await;
    let events = service.url(&format!("/v1/runs/{run}/events"));
    let stream = |key: &str| {
        let request = service.http.get(&events).bearer_auth(key);
        request.header("accept", "text/event-stream").send()
    };
    let (theirs, mut ours) = (stream(&viewer.key).await.unwrap(), stream(ADMIN_KEY).await.unwrap());
    assert!(theirs.status() == 200 && ours.status() == 200);
    let wait = service.http.get(service.url(&format!("/v1/runs/{run}/wait?timeout=60")));
    let wait = tokio::spawn(answer(wait.bearer_auth(&viewer.key)));
    let invoke = service.http.post(service.url("/v1/agents/sleeper/invoke-iterative"));
    let invoke = tokio::spawn(answer(invoke.bearer_auth(&viewer.key).json(&json!({}))));
    service
        .until("/v1/runs?status=running", |runs| runs["data"].as_array().unwrap().len() == 2)
        .await;
    assert_eq!(revoke(&service, ADMIN_KEY, &viewer.id).await.status, 204);

    let at_most = Duration::from_mins(1);
    let text = tokio::time::timeout(at_most, theirs.text()).await.expect("the stream stays open");
    assert!(text.unwrap().contains(": the API key or token is revoked or has expired"));
    let waited = tokio::time::timeout(at_most, wait).await.expect("the wait goes on").unwrap();
    assert_eq!(refusal(&waited), (401, "UNAUTHENTICATED"));
    let invoked =
        tokio::time::timeout(at_most, invoke).await.expect("the request goes on").unwrap();
    assert_eq!(refusal(&invoked), (401, "UNAUTHENTICATED"));
    let begun = invoked.body["run_id"].as_str().unwrap();
    let begun = service.get(&format!("/v1/runs/{begun}")).await.body;
    assert_eq!(begun["status"], "running", "what it started goes on");
    // Other readers of the same run notice nothing.
    let open = async { while ours.chunk().await.unwrap().is_some() {} };
    assert!(tokio::time::timeout(Duration::from_secs(3), open).await.is_err());
}

async fn runs_are_cancelled_with_their_key(db: Db) {
    let service = setup().start(db).await;
    let maker = made(&service, ADMIN_KEY, json!({"scopes": ["keys:admin", "agents:invoke"]})).await;
    let user = made(&service, &maker.key, json!({"scopes": ["agents:invoke"]})).await;
    let (theirs, own) = (asleep(&service, &user.key).await, asleep(&service, ADMIN_KEY).await);
    service
        .until("/v1/runs?status=running", |runs| runs["data"].as_array().unwrap().len() == 2)
        .await;
    let asking = json!({"client_tools": [{"name": "ask", "input_schema": {"type": "object"}}]});
    let parked = service.http.post(service.url("/v1/agents/asker/invoke-iterative"));
    let parked = answer(parked.bearer_auth(&user.key).json(&asking)).await.body;
    assert_eq!(parked["status"], "awaiting_tool_results", "{parked:#}");
    let path = format!("{}?descendants=true&cancel_runs=true", maker.id);
    assert_eq!(revoke(&service, ADMIN_KEY, &path).await.status, 204);
    let ended =
        service.until(&format!("/v1/runs/{theirs}"), |run| run["status"] == "cancelled").await;
    assert!(ended["error"].to_string().contains("revoked"), "{ended:#}");
    let parked = format!("/v1/runs/{}", parked["run_id"].as_str().unwrap());
    service.until(&parked, |run| run["status"] == "cancelled").await;
    assert_eq!(service.get(&format!("/v1/runs/{own}")).await.body["status"], "running");
}

async fn a_run_that_cannot_be_cancelled_with_its_key_holds_back_no_other(db: Db) {
    let service = setup().start(db).await;
    let user = made(&service, ADMIN_KEY, json!({"scopes": ["agents:invoke"]})).await;
    let asking = json!({"client_tools": [{"name": "ask", "input_schema": {"type": "object"}}]});
    let mut parked = Vec::new();
    for _ in 0..3 {
        let run = service.http.post(service.url("/v1/agents/asker/invoke-iterative"));
        let run = answer(run.bearer_auth(&user.key).json(&asking)).await.body;
        assert_eq!(run["status"], "awaiting_tool_results", "{run:#}");
        parked.push(run["run_id"].as_str().unwrap().to_owned());
    }
    let first = &parked[0];
    let cancels = format!("OLD.id = '{first}' AND NEW.cancel_requested_at IS NOT NULL");
    let (refuse, allow) = if service.database_url.starts_with("postgres") {
        (
            format!(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 RAISE EXCEPTION 'refused'; END $$; \
                 CREATE TRIGGER refuse BEFORE UPDATE ON runs FOR EACH ROW \
                 WHEN ({cancels}) EXECUTE FUNCTION refuse()"
            ),
            "DROP TRIGGER refuse ON runs",
        )
    } else {
        (
            format!(
                "CREATE TRIGGER refuse BEFORE UPDATE ON runs \
                 WHEN {cancels} BEGIN SELECT RAISE(ABORT, 'refused'); END"
            ),
            "DROP TRIGGER refuse",
        )
    };
    change(&service, &refuse).await;
    let path = format!("{}?cancel_runs=true", user.id);
    assert!(revoke(&service, ADMIN_KEY, &path).await.status.is_server_error());
    let is_cancelled = |run: &Value| run["status"] == "cancelled";
    for run in &parked[1..] {
        service.until(&format!("/v1/runs/{run}"), is_cancelled).await;
    }
    let first = format!("/v1/runs/{first}");
    assert_eq!(service.get(&first).await.body["status"], "awaiting_tool_results");
    change(&service, allow).await;
    assert_eq!(revoke(&service, ADMIN_KEY, &path).await.status, 204);
    service.until(&first, is_cancelled).await;
}

async fn an_expired_key_loses_its_stream(db: Db) {
    let service = setup().start(db).await;
    let run = asleep(&service, ADMIN_KEY).await;
    let soon = Utc::now() + TimeDelta::seconds(5);
    let viewer =
        made(&service, ADMIN_KEY, json!({"scopes": ["runs:read"], "expires_at": soon})).await;
    let stream = service.http.get(service.url(&format!("/v1/runs/{run}/events")));
    let stream =
        stream.bearer_auth(&viewer.key).header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!(stream.status(), 200);
    let text = tokio::time::timeout(Duration::from_mins(1), stream.text()).await.unwrap().unwrap();
    assert!(text.contains(": the API key or token is revoked or has expired"), "{text}");
}

async fn a_key_has_only_so_many_requests_open(db: Db) {
    let service = setup().config("[server]\nmax_requests_per_key = 3").start(db).await;
    let viewer = made(&service, ADMIN_KEY, json!({"scopes": ["runs:read"]})).await;
    let run = asleep(&service, ADMIN_KEY).await;
    let stream = || {
        let request = service.http.get(service.url(&format!("/v1/runs/{run}/events")));
        request.bearer_auth(&viewer.key).header("accept", "text/event-stream").send()
    };
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(stream().await.unwrap());
        assert_eq!(open.last().unwrap().status(), 200);
    }
    let refused = answer(service.http.get(service.url("/v1/runs")).bearer_auth(&viewer.key)).await;
    assert_eq!(refusal(&refused), (429, "RATE_LIMITED"), "{:#}", refused.body);
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(service.get("/v1/runs").await.status, 200, "other keys have their own");
    drop(open.pop());
    for _ in 0..3000 {
        if status(&service, &viewer.key, "/v1/runs").await == 200 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("a closed stream still counts");
}

#[tokio::test]
async fn a_revocation_reaches_the_streams_of_other_replicas() {
    let first = setup().start(Db::Postgres).await;
    let second = setup().start_on(first.database_url.clone()).await;
    let viewer = made(&first, ADMIN_KEY, json!({"scopes": ["runs:read"]})).await;
    let run = asleep(&first, ADMIN_KEY).await;
    let stream = second.http.get(second.url(&format!("/v1/runs/{run}/events")));
    let stream = stream.bearer_auth(&viewer.key).header("accept", "text/event-stream");
    let stream = stream.send().await.unwrap();
    assert_eq!(stream.status(), 200);
    assert_eq!(revoke(&first, ADMIN_KEY, &viewer.id).await.status, 204);
    let text = tokio::time::timeout(Duration::from_mins(1), stream.text()).await;
    let text = text.expect("the stream stays open").unwrap();
    assert!(text.contains(": the API key or token is revoked or has expired"), "{text}");
    assert_eq!(status(&second, &viewer.key, "/v1/runs").await, 401);
}

#[tokio::test]
async fn a_revocation_is_heard_by_other_replicas_at_once() {
    let first = setup().start(Db::Postgres).await;
    let second = setup().start_on(first.database_url.clone()).await;
    // What is known of a key may be used for a second, so what is refused earlier was heard of. A slow
    // machine may miss that a few times.
    let (mut heard, mut late) = (0, 0);
    while heard < 4 {
        let viewer = made(&first, ADMIN_KEY, json!({"scopes": ["runs:read"]})).await;
        let since = Instant::now();
        assert_eq!(status(&second, &viewer.key, "/v1/runs").await, 200);
        assert_eq!(revoke(&first, ADMIN_KEY, &viewer.id).await.status, 204);
        until_refused(&second, &viewer.key).await;
        let is_early = since.elapsed() < Duration::from_secs(1);
        (heard, late) = (heard + u8::from(is_early), late + u8::from(!is_early));
        assert!(late < 8, "{heard} of {}", heard + late);
    }
}
