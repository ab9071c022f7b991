//! Lists: every filter alone and together, pages that hold still while rows arrive, keys.

use chrono::TimeDelta;
use serde_json::json;
use toolloop::event::{Act, AuditAction};
use toolloop::store::{
    AdminKeys, ApiKeyRecord, AuditFilter, KeyStored, Revocation, Revoked, RunCursor, RunFilter,
    RunRecord,
};

use super::*;

on_both! {
    every_filter_of_runs_selects,
    pages_hold_still_while_runs_arrive,
    large_fields_of_runs_are_not_in_lists,
    runs_of_one_instant_are_all_listed,
    a_forged_cursor_is_harmless,
    a_row_that_cannot_be_read_fails_alone,
    runs_with_a_label_are_paged_and_forgotten,
    every_filter_of_audit_selects,
    an_act_is_of_the_agent_and_session_that_it_names,
    keys_are_kept_listed_and_revoked,
}

async fn listed(db: &Db, filter: RunFilter) -> Vec<Uuid> {
    let runs = db.store.runs(TENANT, &filter, &page(50, None)).await.unwrap();
    runs.into_iter().map(|run| run.id).collect()
}

async fn every_filter_of_runs_selects(db: Db) {
    let parent = Uuid::now_v7();
    let noon = now();
    let at = |minutes| noon + TimeDelta::minutes(minutes);
    let mut plain = Script::with(|new| new.created_at = at(1));
    let mut child = Script::with(|new| {
        new.agent = "child".into();
        new.parent_run_id = Some(parent);
        new.session_id = Some("s-1".into());
        new.created_at = at(2);
    });
    let mut labelled = Script::with(|new| {
        new.metadata = json!({"ticket": "42", "we\"ird.key": "o'hara"});
        new.created_at = at(3);
    });
    let mut queued = Script::with(|new| {
        new.status = RunStatus::Queued;
        new.created_at = at(4);
    });
    queued.epoch = 0;
    for script in [&mut plain, &mut child, &mut labelled, &mut queued] {
        db.commit("me", &script.start()).await;
    }
    let failure =
        Outcome::failed(TerminationReason::MaxIterations, "too many", json!({}), String::new());
    db.commit("me", &child.write(vec![RunEvent::ended(failure, 1)])).await;
    db.commit("me", &labelled.write(vec![completed(json!(1))])).await;

    let any = RunFilter::default;
    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let cases = [
        (any(), vec![&queued, &labelled, &child, &plain]),
        (RunFilter { agent: Some("child".into()), ..any() }, vec![&child]),
        (RunFilter { agent: Some("chil".into()), ..any() }, vec![]),
        (RunFilter { status: Some(RunStatus::Running), ..any() }, vec![&plain]),
        (RunFilter { status: Some(RunStatus::Queued), ..any() }, vec![&queued]),
        (RunFilter { status: Some(RunStatus::Failed), ..any() }, vec![&child]),
        (RunFilter { status: Some(RunStatus::Completed), ..any() }, vec![&labelled]),
        (RunFilter { session_id: Some("s-1".into()), ..any() }, vec![&child]),
        (RunFilter { parent_run_id: Some(parent), ..any() }, vec![&child]),
        (RunFilter { termination_reason: Some("max_iterations".into()), ..any() }, vec![&child]),
        (RunFilter { termination_reason: Some("completed".into()), ..any() }, vec![&labelled]),
        (RunFilter { created_after: Some(at(2)), ..any() }, vec![&queued, &labelled]),
        (RunFilter { created_before: Some(at(2)), ..any() }, vec![&plain]),
        (RunFilter { metadata: vec![label("ticket", "42")], ..any() }, vec![&labelled]),
        (
            RunFilter {
                metadata: vec![label("ticket", "42"), label("we\"ird.key", "o'hara")],
                ..any()
            },
            vec![&labelled],
        ),
        (
            RunFilter { metadata: vec![label("ticket", "42"), label("other", "42")], ..any() },
            vec![],
        ),
        (
            RunFilter { agent: Some("reader".into()), status: Some(RunStatus::Queued), ..any() },
            vec![&queued],
        ),
    ];
    for (filter, expected) in cases {
        let expected: Vec<Uuid> = expected.iter().map(|script| script.id).collect();
        assert_eq!(listed(&db, filter.clone()).await, expected, "{filter:?}");
    }
}

fn cursor(run: &RunRecord) -> RunCursor {
    RunCursor { at: run.created_at, id: run.id.to_string() }
}

async fn large_fields_of_runs_are_not_in_lists(db: Db) {
    let tools = json!([{"name": "t", "description": "x".repeat(5000)}]);
    let mut script = Script::with(|new| {
        new.inputs = Arc::new(json!({"text": "x".repeat(5000)}));
        new.overrides = json!({"max_iterations": 3, "client_tools": tools});
        new.metadata = json!({"ticket": "42"});
    });
    db.commit("me", &script.start()).await;
    let labelled = vec![("ticket".to_owned(), "42".to_owned())];
    for metadata in [Vec::new(), labelled] {
        let filter = RunFilter { metadata, ..RunFilter::default() };
        let listed = db.store.runs(TENANT, &filter, &page(50, None)).await.unwrap();
        assert_eq!((listed.len(), &listed[0].inputs), (1, &json!({})));
        let overrides = serde_json::to_value(&listed[0].overrides).unwrap();
        assert_eq!(overrides, json!({"max_iterations": 3}));
    }
    let run = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    assert!(serde_json::to_string(&run.inputs).unwrap().len() > 5000);
}

async fn pages_hold_still_while_runs_arrive(db: Db) {
    let noon = now();
    let mut before = Vec::new();
    for second in 0..9 {
        let mut script = Script::with(|new| new.created_at = noon + TimeDelta::seconds(second));
        db.commit("me", &script.start()).await;
        before.insert(0, script.id);
    }
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let runs =
            db.store.runs(TENANT, &RunFilter::default(), &page(2, after.clone())).await.unwrap();
        let Some(last) = runs.last() else { break };
        after = Some(cursor(last));
        seen.extend(runs.iter().map(|run| run.id));
        // A newer one arrives between two pages.
        db.commit("me", &Script::with(|new| new.created_at = noon + TimeDelta::hours(1)).start())
            .await;
    }
    assert_eq!(seen, before);
}

async fn runs_of_one_instant_are_all_listed(db: Db) {
    let noon = now();
    let mut all = Vec::new();
    for _ in 0..7 {
        let mut script = Script::with(|new| new.created_at = noon);
        db.commit("me", &script.start()).await;
        all.insert(0, script.id);
    }
    let (mut seen, mut after) = (Vec::new(), None);
    while seen.len() < all.len() {
        let runs =
            db.store.runs(TENANT, &RunFilter::default(), &page(3, after.clone())).await.unwrap();
        after = Some(cursor(runs.last().expect("a page is missing")));
        seen.extend(runs.iter().map(|run| run.id));
    }
    assert_eq!(seen, all);
}

async fn a_forged_cursor_is_harmless(db: Db) {
    db.commit("me", &Script::owned().start()).await;
    let forged = RunCursor { at: now() + TimeDelta::days(1), id: "'; DROP TABLE runs; --".into() };
    let runs =
        db.store.runs(TENANT, &RunFilter::default(), &page(5, Some(forged.clone()))).await.unwrap();
    assert_eq!(runs.len(), 1);
    assert!(db.store.keys(TENANT, &page(5, Some(forged))).await.unwrap().is_empty());
}

async fn a_row_that_cannot_be_read_fails_alone(db: Db) {
    let mut scripts = [Script::owned(), Script::owned(), Script::owned(), Script::queued()];
    for script in &mut scripts {
        db.commit("me", &script.start()).await;
    }
    let mut damaged = Script::queued();
    db.commit("me", &damaged.start()).await;
    for run in [scripts[1].id, damaged.id] {
        db.sql(&format!("UPDATE runs SET kind = 'odd' WHERE id = '{run}'")).await;
    }
    assert!(db.store.run(TENANT, scripts[1].id).await.is_err());
    let newest = db.store.runs(TENANT, &RunFilter::default(), &page(3, None)).await.unwrap();
    let newest: Vec<_> = newest.iter().map(|run| run.id).collect();
    assert_eq!(newest, [scripts[3].id, scripts[2].id, scripts[0].id], "a page is full");
    let claimed = db.store.claim("you", 9, "").await.unwrap();
    assert_eq!(claimed.iter().map(|claimed| claimed.run.id).collect::<Vec<_>>(), [scripts[3].id]);
    assert_eq!(db.store.owned_runs("you").await.unwrap(), [(scripts[3].id, 1)]);
    assert_eq!(db.store.queued().await.unwrap(), 0, "the other one is parked");
    assert_eq!(db.store.claim_run("you", damaged.id).await.unwrap(), None);
    let mut without_definition = Script::queued();
    db.commit("me", &without_definition.start()).await;
    db.sql("DELETE FROM definitions").await;
    let claimed = db.store.claim("you", 9, "").await.unwrap();
    assert_eq!(claimed[0].run.id, without_definition.id, "it can be ended");
}

async fn runs_with_a_label_are_paged_and_forgotten(db: Db) {
    let noon = now();
    let mut labelled = Vec::new();
    for second in 0..5 {
        let created_at = noon + TimeDelta::seconds(second);
        let mut script = Script::with(|new| {
            new.metadata = json!({"env": "prod", "ticket": second.to_string()});
            new.created_at = created_at;
        });
        db.commit("me", &script.start()).await;
        db.commit("me", &script.write(vec![completed(json!(1))])).await;
        labelled.insert(0, script.id);
        db.commit("me", &Script::with(|new| new.created_at = created_at).start()).await;
    }
    let metadata = vec![("env".to_owned(), "prod".to_owned())];
    let filter = RunFilter { metadata, ..RunFilter::default() };
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let runs = db.store.runs(TENANT, &filter, &page(2, after.clone())).await.unwrap();
        let Some(last) = runs.last() else { break };
        after = Some(cursor(last));
        seen.extend(runs.iter().map(|run| run.id));
    }
    assert_eq!(seen, labelled);
    let created_before = Some(noon + TimeDelta::seconds(3));
    let earlier = RunFilter { created_before, ..filter.clone() };
    assert_eq!(listed(&db, earlier).await, labelled[2..]);
    let found = db.store.search_runs(TENANT, &filter, &["reader"], &page(2, None)).await.unwrap();
    let found: Vec<_> = found.iter().map(|run| (run.id, run.may_match)).collect();
    assert_eq!(found, [(labelled[0], true), (labelled[1], true)]);
    let later = now() + TimeDelta::hours(1);
    assert_eq!(db.store.delete_ended(later, 10, &no_files).await.unwrap(), 5);
    assert!(listed(&db, filter).await.is_empty());
    if db.store.kind() == "sqlite" {
        assert_eq!(db.sql("SELECT CAST(count(*) AS TEXT) FROM run_labels").await, "0");
    }
}

/// Or of its run's; what names neither is of neither.
async fn an_act_is_of_the_agent_and_session_that_it_names(db: Db) {
    let mut script = Script::with(|new| {
        new.agent = "asked".into();
        new.session_id = Some("s-1".into());
    });
    db.commit("me", &script.start()).await;
    for (run_id, details) in [
        (Some(script.id), json!({})),
        (None, json!({"agent": "asked", "session_id": "s-1"})),
        (Some(Uuid::now_v7()), json!({})),
    ] {
        let action = AuditAction::FileWritten;
        let (tenant, subject) = (TENANT.to_owned(), "key-3".to_owned());
        let act = Act { tenant, subject, action, run_id, reason: None, details };
        db.store.record_act(act).await.unwrap();
    }
    let uploads = AuditFilter { action: Some(AuditAction::FileWritten), ..AuditFilter::default() };
    let of_agent = AuditFilter { agent: Some("asked".into()), ..uploads.clone() };
    let of_session = AuditFilter { session_id: Some("s-1".into()), ..uploads.clone() };
    for (filter, count) in [(uploads, 3), (of_agent, 2), (of_session, 2)] {
        let rows = db.store.audit(TENANT, &filter, &page(10, None)).await.unwrap();
        assert_eq!(rows.len(), count, "{filter:?}");
    }
}

async fn every_filter_of_audit_selects(db: Db) {
    let mut script = Script::with(|new| {
        new.agent = "asked".into();
        new.session_id = Some("s-1".into());
    });
    let mut other = Script::owned();
    other.caller = Arc::new(Caller { subject: "key-2".into(), ..Caller::clone(&other.caller) });
    let (read, shell) = (call("file_ops", "{}"), call("shell", "{\"x\":1}"));
    let mut first = script.start();
    first.audit = vec![audited(&read, "allowed")];
    db.commit("me", &first).await;
    let mut second = other.start();
    second.audit = vec![AuditRecord {
        outcome: "not_executed".into(),
        rule: "path".into(),
        ..audited(&shell, "blocked")
    }];
    db.commit("me", &second).await;
    let act = Act {
        tenant: TENANT.into(),
        subject: "key-3".into(),
        action: AuditAction::LoginRefused,
        run_id: None,
        reason: Some("why".into()),
        details: json!({"count": 2}),
    };
    let before_act = now();
    db.store.record_act(act).await.unwrap();
    let (early, late) = (first.audit[0].at, second.audit[0].at);
    let any = || AuditFilter { action: Some(AuditAction::ToolCall), ..AuditFilter::default() };
    let acts = AuditFilter { action: Some(AuditAction::LoginRefused), ..any() };
    let all = AuditFilter { created_before: None, ..AuditFilter::default() };
    let cases = [
        (any(), vec!["shell", "file_ops"]),
        (acts.clone(), vec![""]),
        (AuditFilter { created_before: Some(before_act), ..acts.clone() }, vec![]),
        (AuditFilter { subject: Some("key-3".into()), ..any() }, vec![]),
        (all, vec!["", "shell", "file_ops"]),
        (AuditFilter { run_id: Some(script.id), ..any() }, vec!["file_ops"]),
        (AuditFilter { agent: Some("asked".into()), ..any() }, vec!["file_ops"]),
        (AuditFilter { agent: Some("ask".into()), ..any() }, vec![]),
        (AuditFilter { session_id: Some("s-1".into()), ..any() }, vec!["file_ops"]),
        (AuditFilter { session_id: Some("s-2".into()), ..any() }, vec![]),
        (AuditFilter { tool: Some("shell".into()), ..any() }, vec!["shell"]),
        (AuditFilter { rule: Some(first.audit[0].rule.clone()), ..any() }, vec!["file_ops"]),
        (AuditFilter { rule: Some("path".into()), ..any() }, vec!["shell"]),
        (AuditFilter { rule: Some("flow".into()), ..any() }, vec![]),
        (AuditFilter { decision: Some("blocked".into()), ..any() }, vec!["shell"]),
        (AuditFilter { decision: Some("allowed".into()), ..any() }, vec!["file_ops"]),
        (AuditFilter { subject: Some("key-2".into()), ..any() }, vec!["shell"]),
        (AuditFilter { outcome: Some("not_executed".into()), ..any() }, vec!["shell"]),
        (AuditFilter { created_after: Some(early), ..any() }, vec!["shell"]),
        (AuditFilter { created_before: Some(late), ..any() }, vec!["file_ops"]),
    ];
    for (filter, expected) in cases {
        let rows = db.store.audit(TENANT, &filter, &page(10, None)).await.unwrap();
        let tools: Vec<_> =
            rows.iter().map(|row| row.tool.as_deref().unwrap_or_default()).collect();
        assert_eq!(tools, expected, "{filter:?}");
    }
    let newest = db.store.audit(TENANT, &any(), &page(1, None)).await.unwrap().remove(0);
    assert_eq!((newest.run_id, newest.subject.as_str()), (Some(other.id), "key-2"));
    assert!(is_record_of(&newest, &second.audit[0]), "{newest:?}");
    let acted = db.store.audit(TENANT, &acts, &page(2, None)).await.unwrap();
    assert_eq!((acted.len(), acted[0].call_id, acted[0].run_id), (1, None, None));
    assert_eq!(
        (acted[0].decision.as_str(), acted[0].outcome.as_str(), acted[0].arguments.as_str()),
        ("blocked", "blocked", r#"{"count":2}"#)
    );
    let after = Some(RunCursor { at: newest.at, id: newest.id.to_string() });
    let rest = db.store.audit(TENANT, &any(), &page(10, after)).await.unwrap();
    assert_eq!(rest.len(), 1);
    assert!(is_record_of(&rest[0], &first.audit[0]), "{rest:?}");
}

async fn keys_are_kept_listed_and_revoked(db: Db) {
    let store = &db.store;
    assert_eq!(store.admin_keys().await.unwrap(), AdminKeys::Never);
    let key = |id: &str, tenant: &str| ApiKeyRecord {
        id: id.into(),
        name: "ci".into(),
        tenant: tenant.into(),
        scopes: vec!["runs:read".into(), "tools:file_ops".into()],
        secret_hash: vec![0, 1, 255],
        created_at: now(),
        created_by: None,
        expires_at: Some(now() + TimeDelta::days(1)),
        revoked_at: None,
        last_used_at: None,
        rate_limit_per_minute: Some(60),
        rate_limit_burst: None,
    };
    let (first, second, foreign) = (key("a", TENANT), key("b", TENANT), key("c", "rival"));
    for key in [&first, &second, &foreign] {
        assert_eq!(store.insert_key(key).await.unwrap(), KeyStored::Stored);
    }
    assert_eq!(store.insert_key(&key("a", "rival")).await.unwrap(), KeyStored::IdTaken);
    assert_eq!(store.admin_keys().await.unwrap(), AdminKeys::Never, "none of them has admin");
    assert_eq!(store.key("a").await.unwrap(), Some(first.clone()));
    assert_eq!(store.key("x").await.unwrap(), None);
    let newest = store.keys(TENANT, &page(1, None)).await.unwrap();
    assert_eq!(newest, std::slice::from_ref(&second));
    let after = Some(RunCursor { at: second.created_at, id: second.id.clone() });
    assert_eq!(store.keys(TENANT, &page(5, after)).await.unwrap(), std::slice::from_ref(&first));

    let revoke = async |id: &str| {
        let within = Some(TENANT);
        let what =
            Revocation { subject: "me", within, id, with_descendants: true, is_forced: true };
        store.revoke_keys(what).await.unwrap()
    };
    assert_eq!(revoke("c").await, Revoked::Unknown, "another tenant's");
    assert!(matches!(revoke("a").await, Revoked::Done(keys) if keys.len() == 1));
    let revoked = store.key("a").await.unwrap().unwrap();
    assert!(revoked.revoked_at.is_some());
    assert!(matches!(revoke("a").await, Revoked::Done(_)));
    assert_eq!(store.key("a").await.unwrap(), Some(revoked), "revoking twice keeps the first time");
    let late = ApiKeyRecord { created_by: Some("a".into()), ..key("d", TENANT) };
    assert_eq!(store.insert_key(&late).await.unwrap(), KeyStored::CreatorRevoked);
    assert_eq!(store.key("d").await.unwrap(), None);

    let expires_at = Some(now() + TimeDelta::hours(1));
    let admin = ApiKeyRecord { scopes: vec!["admin".into()], expires_at, ..key("e", "rival") };
    store.insert_key(&admin).await.unwrap();
    assert_eq!(store.admin_keys().await.unwrap(), AdminKeys::Usable);
    db.execute("UPDATE api_keys SET expires_at = created_at WHERE id = 'e'").await;
    assert_eq!(store.admin_keys().await.unwrap(), AdminKeys::Unusable);
}
