//! The query plans of every list with every filter, over many rows: no sort, no sequential scan.

use std::time::Duration;

use chrono::TimeDelta;
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};
use toolloop::store::{
    ApprovalFilter, ApprovalStatus, AuditFilter, LimitReached, MemoryFilter, RunCursor, RunFilter,
    RunLimits, RunReservation, StatsFilter,
};

use super::*;

on_both! {
    no_list_sorts_or_looks_through_a_table,
    sessions_are_listed_without_runs_that_have_none,
    usage_of_many_runs_is_read_from_sums,
    periodic_queries_pass_over_rows_that_are_not_due,
    a_place_costs_only_rows_of_its_own_tenant,
    calls_are_counted_once_for_concurrent_requests,
}

/// SQLite's planner does not ask how many there are.
fn many(db: &Db) -> u32 {
    if db.store.kind() == "postgres" { 100_000 } else { 10_000 }
}

/// Rows that one page may look at in vain.
const IN_VAIN: f64 = 1000.0;

/// A number for which a database makes a row, in its words.
struct Words {
    series: String,
    id: &'static str,
    at: &'static str,
    label: &'static str,
    no: &'static str,
    yes: &'static str,
}

impl Words {
    fn of(db: &Db, rows: u32) -> Self {
        if db.store.kind() == "postgres" {
            Self {
                series: format!("generate_series(1, {rows}) AS s (n)"),
                id: "('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid",
                at: "timestamptz '2026-01-01 00:00:00Z' + n * interval '20 seconds'",
                label: "jsonb_build_object('ticket', (n % 20000)::text, 'env', 'prod')",
                no: "false",
                yes: "true",
            }
        } else {
            let numbers =
                "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n <";
            Self {
                series: format!("({numbers} {rows}) SELECT n FROM s)"),
                id: "'00000000-0000-7000-8000-' || printf('%012d', n)",
                at: "1767225600000000 + n * 20000000",
                label: "json_object('ticket', CAST(n % 20000 AS TEXT), 'env', 'prod')",
                no: "0",
                yes: "1",
            }
        }
    }
}

async fn execute(db: &Db, statements: &[String]) {
    let sql = statements.join(";\n");
    if db.store.kind() == "postgres" {
        let mut database = PgConnection::connect(&db.url).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut database).await.unwrap();
    } else {
        let mut database = SqliteConnection::connect(&db.url).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut database).await.unwrap();
    }
}

/// A value that one of 5,000 rows has, each at another place.
fn rare(rest: u32, value: &str, usual: &str) -> String {
    format!("CASE WHEN n % 5000 = {rest} THEN {value} ELSE {usual} END")
}

/// SQLite's statistics are never made.
fn analyse(db: &Db) -> String {
    if db.store.kind() == "postgres" { "ANALYZE" } else { "SELECT 1" }.to_owned()
}

/// So many runs of one tenant, a few of them with each rare value, and a hundred of another.
async fn fill_runs(db: &Db, rows: u32) {
    let Words { series, id, at, label, no, yes } = Words::of(db, rows);
    let status = "CASE n % 5000 WHEN 1 THEN 'failed' WHEN 2 THEN 'cancelled' \
         WHEN 3 THEN 'awaiting_approval' WHEN 4 THEN 'queued' WHEN 5 THEN 'running' \
         WHEN 6 THEN 'needs_review' WHEN 7 THEN 'awaiting_tool_results' ELSE 'completed' END";
    let live = "n % 5000 BETWEEN 3 AND 7";
    let tenant = format!("CASE WHEN n % {} = 0 THEN 'other' ELSE '{TENANT}' END", rows / 100);
    let parent = if no == "0" { id.replace("n)", "1)") } else { id.replace("n::", "1::") };
    execute(db, &[
        format!(
            "INSERT INTO runs (id, created_at, tenant, subject, agent, agent_version, \
             engine_version, format, definition_hash, kind, inputs, overrides, metadata, epoch, next_seq, \
             iterations, status, owner, available_at, started_at, finished_at, session_id, \
             parent_run_id, termination_reason, idempotency_key, request_hash, model, input_tokens, \
             output_tokens, cost_micro_usd, mixed_usage) \
             SELECT {id}, {at}, {tenant}, 'key', {}, '1', '1', 1, 'd', 'iterative', '{{}}', '{{}}', \
             {label}, 1, 1, 1, {status}, CASE WHEN n % 5000 = 5 THEN 'me' END, \
             CASE WHEN n % 5000 = 4 THEN {at} END, {at}, CASE WHEN NOT ({live}) THEN {at} END, \
             {}, {}, CASE WHEN {live} THEN NULL WHEN n % 5000 = 1 THEN 'max_iterations' \
             WHEN n % 5000 = 2 THEN 'cancelled' ELSE 'completed' END, 'key-' || n, 'hash', 'openai/gpt', 100, 20, 7, \
             CASE WHEN n % 5000 = 11 THEN {yes} ELSE {no} END FROM {series}",
            rare(8, "'rare'", "'agent'"),
            rare(9, "'session'", "NULL"),
            rare(10, &parent, "NULL"),
        ),
        format!(
            "INSERT INTO iterations (run_id, attempt, number, seq, started_at, latency_ms, retries, \
             input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, \
             reasoning_tokens, cost_micro_usd, estimated, fallback, repeated, provider, model, \
             finish_reason) SELECT {id}, 1, 1, 2, {at}, 5, 0, 100, 20, 0, 0, 0, 7, {no}, {no}, {no}, \
             'openai', 'gpt', 'stop' FROM {series}"
        ),
        format!(
            "INSERT INTO sessions (tenant, session_id, agent, last_run_at, last_run_id, created_at, \
             run_count) SELECT 'crowd', 'session-' || n, 'agent', {at}, {id}, {at}, 1 FROM {series}"
        ),
        analyse(db),
    ])
    .await;
}

/// The same, with a row about each run in every other table that is listed.
async fn fill(db: &Db, rows: u32) {
    fill_runs(db, rows).await;
    let Words { series, id, at, yes, .. } = Words::of(db, rows);
    execute(db, &[
        format!(
            "INSERT INTO audit_log (tenant, at, id, run_id, call_id, action, subject, agent, \
             session_id, tool, rule, decision, outcome, arguments) SELECT '{TENANT}', {at}, {id}, \
             {id}, {id}, 'tool_call', {}, {}, {}, {}, {}, {}, {}, '{{}}' FROM {series}",
            rare(1, "'rare'", "'key'"),
            rare(6, "'rare'", "'agent'"),
            rare(7, "'session'", "NULL"),
            rare(2, "'rare'", "'tool'"),
            rare(5, "'path'", "'none'"),
            rare(3, "'blocked'", "'allowed'"),
            rare(4, "'failed'", "'succeeded'"),
        ),
        format!(
            "INSERT INTO approvals (run_id, seq, call_id, tenant, at, expires_at, kind, tool, \
             reason, arguments, status, resolution) SELECT {id}, 3, {id}, '{TENANT}', {at}, {at}, \
             'approval', 't', 'r', '{{}}', {}, {} FROM {series}",
            rare(1, "'pending'", "'denied'"),
            rare(1, "NULL", "'{\"resolution\": \"denied\"}'"),
        ),
        format!(
            "INSERT INTO api_keys (id, tenant, name, secret_hash, created_at) \
             SELECT 'key-' || n, '{TENANT}', 'n', {}, {at} FROM {series}",
            if yes == "1" { "x'00'" } else { "'\\x00'" },
        ),
        format!(
            "INSERT INTO observations (run_id, seq, tenant, agent, session_id, at, kind, content) \
             SELECT {id}, 1, '{TENANT}', {}, {}, {at}, 'input', 'word' FROM {series}",
            rare(1, "'rare'", "'agent'"),
            rare(2, "'session'", "NULL"),
        ),
        analyse(db),
    ])
    .await;
}

/// The rows that came out of a step of a plan, where the database tells them.
fn actual_rows(line: &str) -> Option<f64> {
    let rows = line.split_once("(actual rows=")?.1.split(' ').next()?;
    rows.parse().ok()
}

/// What is wrong with a plan, if anything: it sorts, reads or filters out many rows. What belongs to
/// one run is not many.
fn fault(plan: &str) -> Option<String> {
    let lines: Vec<&str> =
        plan.lines().map(|line| line.trim_start_matches([' ', '-', '>'])).collect();
    let of_one_run = plan.contains("(run_id=?");
    // Those that wait for a child run now.
    let of_waiting = plan.contains("MATERIALIZE above") || plan.contains("CO-ROUTINE above");
    let is_of_waiting = |line: &str| line == "SCAN above" && of_waiting;
    // At most 64 tenants of each line, found one after the other.
    let of_few = plan.contains("CO-ROUTINE both_lines");
    let steps = ["l", "in_line", "a", "w", "waiting", "b", "both_lines"];
    // The runs that are driven now.
    let of_running = plan.contains("INDEX runs_owned");
    // The runs of one page that a search looks at.
    let of_page = |line: &str| line == "SCAN newest";
    let is_step =
        |line: &str| line.strip_prefix("SCAN ").is_some_and(|of| steps.contains(&of)) && of_few;
    let is_bad = |(at, line): &(usize, &&str)| {
        let sorted =
            lines.get(at + 1..).and_then(|below| below.iter().find_map(|line| actual_rows(line)));
        let sorts = line.starts_with("Sort (") && sorted.is_none_or(|rows| rows > IN_VAIN);
        let sorts_too =
            line.contains("TEMP B-TREE") && !(of_one_run || of_few || of_waiting || of_running);
        let scans = line.starts_with("Seq Scan");
        let scans_too = line.starts_with("SCAN ")
            && !is_step(line)
            && !is_of_waiting(line)
            && !of_page(line)
            && !["INDEX", "json_each", "CONSTANT ROW", " m "]
                .iter()
                .any(|known| line.contains(known));
        let of_all_runs = line.contains("COVERING INDEX") && line.ends_with("(tenant=?)");
        let removed =
            line.split_once("Removed by Filter: ").and_then(|(_, rows)| rows.parse().ok());
        sorts
            || sorts_too
            || scans
            || scans_too
            || of_all_runs
            || removed.is_some_and(|rows: f64| rows > IN_VAIN)
    };
    lines.iter().enumerate().find(is_bad).map(|(_, line)| (*line).to_owned())
}

/// What runs wait for, by a filter and by the runs of a page.
async fn ask_for_approvals(
    db: &Db,
    filter: &ApprovalFilter,
    page: &Page<RunCursor>,
    plans: &parking_lot::Mutex<Vec<String>>,
) {
    db.store.approvals(TENANT, filter, page).await.unwrap();
    db.store.approval_piece(TENANT, filter, page, 1 << 20).await.unwrap();
    if filter.run_id.is_some() {
        let runs = [Uuid::from_u128(1), Uuid::from_u128(2)];
        db.store.pending(TENANT, &runs, 0).await.unwrap();
        of_one_run(db, &plans.lock());
    }
}

/// What belongs to runs that are known is found by them, and not among all that have the status.
/// PostgreSQL knows where those are few.
fn of_one_run(db: &Db, plans: &[String]) {
    let all = ["approvals_listed", "approvals_due", "approvals_of_parents"];
    let wrong = if db.store.kind() == "postgres" { &all[..1] } else { &all };
    let is_wrong = |plan: &&String| wrong.iter().any(|index| plan.contains(index));
    assert_eq!(plans.iter().find(is_wrong), None);
}

/// SQLite uses a partial index only where the query repeats its condition.
fn finds_by_status(status: RunStatus, plan: &str) {
    let index = match status {
        RunStatus::Running => "runs_owned",
        RunStatus::Completed => "runs_listed",
        _ => "runs_by_status",
    };
    assert!(plan.contains(index), "{status:?}: {plan}");
}

/// SQLite begins with a label that few runs have. One that many have is left to an index of another filter.
fn finds_by_label(db: &Db, filter: &RunFilter, plans: &[String]) {
    if filter.metadata.is_empty() || db.store.kind() == "postgres" {
        return;
    }
    let list = plans.last().unwrap();
    let is_by_label =
        list.lines().any(|line| line.starts_with("SEARCH l ") && line.contains("value=?"));
    let is_common = filter.metadata.iter().all(|(key, _)| key == "env");
    assert_eq!(is_by_label, !is_common || filter.agent.is_none(), "{filter:?}: {list}");
}

/// More filters by labels, where the planner does not ask how many rows there are.
fn filters_by_labels(db: &Db) -> Vec<RunFilter> {
    if db.store.kind() == "postgres" {
        return Vec::new();
    }
    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let (rare, common) = (label("ticket", "17"), label("env", "prod"));
    let any = RunFilter::default;
    vec![
        RunFilter { metadata: vec![common.clone(), rare.clone()], ..any() },
        RunFilter { agent: Some("agent".into()), metadata: vec![rare], ..any() },
        RunFilter { agent: Some("rare".into()), metadata: vec![common], ..any() },
    ]
}

fn run_filters() -> Vec<RunFilter> {
    let any = RunFilter::default;
    let at =
        |days| Some(DateTime::from_timestamp(1_767_225_600, 0).unwrap() + TimeDelta::days(days));
    let mut filters = vec![
        any(),
        RunFilter { agent: Some("rare".into()), ..any() },
        RunFilter { agent: Some("agent".into()), ..any() },
        RunFilter { session_id: Some("session".into()), ..any() },
        RunFilter { parent_run_id: Some(Uuid::from_u128(0x7000_8000_0000_0000_0001)), ..any() },
        RunFilter { termination_reason: Some("max_iterations".into()), ..any() },
        RunFilter { termination_reason: Some("completed".into()), ..any() },
        RunFilter { metadata: vec![("ticket".into(), "17".into())], ..any() },
        RunFilter { metadata: vec![("env".into(), "prod".into())], ..any() },
        RunFilter { created_after: at(3), ..any() },
        RunFilter { created_before: at(3), ..any() },
    ];
    let statuses = [
        RunStatus::Queued,
        RunStatus::Running,
        RunStatus::AwaitingApproval,
        RunStatus::AwaitingToolResults,
        RunStatus::NeedsReview,
        RunStatus::Completed,
        RunStatus::Failed,
        RunStatus::Cancelled,
    ];
    filters.extend(statuses.map(|status| RunFilter { status: Some(status), ..any() }));
    filters
}

fn audit_filters() -> Vec<AuditFilter> {
    let any = AuditFilter::default;
    let at =
        |days| Some(DateTime::from_timestamp(1_767_225_600, 0).unwrap() + TimeDelta::days(days));
    vec![
        any(),
        AuditFilter { run_id: Some(Uuid::from_u128(0x7000_8000_0000_0000_0001)), ..any() },
        AuditFilter { agent: Some("rare".into()), ..any() },
        AuditFilter { agent: Some("agent".into()), ..any() },
        AuditFilter { session_id: Some("session".into()), ..any() },
        AuditFilter { tool: Some("rare".into()), ..any() },
        AuditFilter { tool: Some("tool".into()), ..any() },
        AuditFilter { rule: Some("path".into()), ..any() },
        AuditFilter { rule: Some("none".into()), ..any() },
        AuditFilter { decision: Some("blocked".into()), ..any() },
        AuditFilter { decision: Some("allowed".into()), ..any() },
        AuditFilter { subject: Some("rare".into()), ..any() },
        AuditFilter { outcome: Some("failed".into()), ..any() },
        AuditFilter { outcome: Some("succeeded".into()), ..any() },
        AuditFilter { created_after: at(3), ..any() },
        AuditFilter { created_before: at(3), ..any() },
    ]
}

fn memory_filters() -> Vec<MemoryFilter> {
    let any = MemoryFilter::default;
    vec![
        any(),
        MemoryFilter { agent: Some("rare".into()), ..any() },
        MemoryFilter { agent: Some("agent".into()), ..any() },
        MemoryFilter { session_id: Some("session".into()), ..any() },
    ]
}

/// The same page; the ids of observations are not those of runs.
fn page_of_memory(page: &Page<RunCursor>) -> Page<RunCursor> {
    let after =
        page.after.clone().map(|after| RunCursor { id: format!("{}-1", after.id), ..after });
    Page { limit: page.limit, after }
}

fn approval_filters() -> Vec<ApprovalFilter> {
    let any = ApprovalFilter::default;
    let one = Uuid::from_u128(0x7000_8000_0000_0000_0001);
    vec![
        ApprovalFilter { status: Some(ApprovalStatus::Pending), ..any() },
        ApprovalFilter { status: Some(ApprovalStatus::Denied), ..any() },
        ApprovalFilter { run_id: Some(one), ..any() },
        ApprovalFilter { call_id: Some(one), run_id: Some(one), ..any() },
        ApprovalFilter { status: Some(ApprovalStatus::Pending), run_id: Some(one), ..any() },
        ApprovalFilter {
            status: Some(ApprovalStatus::Denied),
            run_id: Some(one),
            call_id: None,
            from_outside: true,
        },
    ]
}

async fn no_list_sorts_or_looks_through_a_table(mut db: Db) {
    fill(&db, many(&db)).await;
    let cursor = RunCursor {
        at: DateTime::from_timestamp(1_767_225_600, 0).unwrap() + TimeDelta::days(9),
        id: Uuid::from_u128(0x7000_8000_0000_0000_ffff).to_string(),
    };
    let (store, plans) = Arc::into_inner(db.store).unwrap().explaining();
    db.store = Arc::new(store);
    let mut faults = Vec::new();
    let mut found = |what: String| {
        for plan in std::mem::take(&mut *plans.lock()) {
            if let Some(fault) = fault(&plan) {
                faults.push(format!("{what}: {fault}\n{plan}"));
            }
        }
    };
    let all = page(20, None);
    let of_runs = db.store.runs(TENANT, &RunFilter::default(), &all).await.unwrap().len();
    let of_audit = db.store.audit(TENANT, &AuditFilter::default(), &all).await.unwrap().len();
    let of_approvals =
        db.store.approvals(TENANT, &ApprovalFilter::default(), &all).await.unwrap().len();
    assert_eq!((of_runs, of_audit, of_approvals), (20, 20, 20), "the rows can be read");
    plans.lock().clear();
    for after in [None, Some(cursor)] {
        let page = page(20, after.clone());
        for filter in run_filters().into_iter().chain(filters_by_labels(&db)) {
            db.store.runs(TENANT, &filter, &page).await.unwrap();
            finds_by_label(&db, &filter, &plans.lock());
            if let Some(status) = filter.status.filter(|_| db.store.kind() == "sqlite") {
                finds_by_status(status, &plans.lock().concat());
            }
            found(format!("{filter:?} {after:?}"));
            if filter.metadata.is_empty() {
                let words = ["agent", "%\"word"];
                let looked_at = db.store.search_runs(TENANT, &filter, &words, &page).await.unwrap();
                assert!(looked_at.iter().all(|run| !run.may_match));
                found(format!("search of {filter:?} {after:?}"));
            }
        }
        let waits = [RunStatus::NeedsReview, RunStatus::Running];
        db.store.runs_above(TENANT, &waits, &RunFilter::default(), &page).await.unwrap();
        found(format!("runs that wait for others {after:?}"));
        for filter in audit_filters() {
            db.store.audit(TENANT, &filter, &page).await.unwrap();
            found(format!("{filter:?} {after:?}"));
        }
        for filter in approval_filters() {
            ask_for_approvals(&db, &filter, &page, &plans).await;
            found(format!("{filter:?} {after:?}"));
        }
        let of_memory = page_of_memory(&page);
        for filter in memory_filters() {
            db.store.memory(TENANT, &filter, &of_memory).await.unwrap();
            found(format!("{filter:?} {after:?}"));
        }
        db.store.keys(TENANT, &page).await.unwrap();
        found(format!("keys {after:?}"));
    }
    db.store.queued().await.unwrap();
    found("queued".into());
    assert!(db.store.claim("me", 0, "").await.unwrap().is_empty());
    found("tenants in line".into());
    db.store.end_delays(9).await.unwrap();
    db.store.undo_clock_step().await.unwrap();
    found("delays".into());
    db.store.cancel_requests("me").await.unwrap();
    db.store.owned_runs("me").await.unwrap();
    found("owned".into());
    db.store.idempotent_run(TENANT, "key-7").await.unwrap().unwrap();
    found("idempotent".into());
    let run = Uuid::from_u128(0x7000_8000_0000_0000_0001);
    db.store.events(TENANT, run, 0, 100).await.unwrap();
    db.store.journals(TENANT, &[run]).await.unwrap();
    db.store.iterations(TENANT, run, &page(20, None)).await.unwrap();
    db.store.tool_calls(TENANT, run, &page(20, None)).await.unwrap();
    db.store.tool_call_piece(TENANT, run, &page(20, None), 1 << 20).await.unwrap();
    assert!(!db.store.has_tool_call(TENANT, run, run).await.unwrap());
    found("parts".into());
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

/// One of 5,000 runs has a session, and all of those the same.
async fn sessions_are_listed_without_runs_that_have_none(mut db: Db) {
    let many = many(&db);
    fill_runs(&db, many).await;
    let (store, plans) = Arc::into_inner(db.store).unwrap().explaining();
    db.store = Arc::new(store);
    let newest =
        RunCursor { at: DateTime::from_timestamp(4_000_000_000, 0).unwrap(), id: String::new() };
    for (agent, index, sessions) in [
        (None, "sessions_listed", 1),
        (Some("agent"), "sessions_by_agent", 1),
        (Some("rare"), "sessions_by_agent", 0),
    ] {
        for after in [None, Some(newest.clone())] {
            let found = db.store.sessions(TENANT, agent, &page(20, after)).await.unwrap();
            assert_eq!(found.len(), sessions, "{agent:?}");
            let plans = std::mem::take(&mut *plans.lock());
            let [plan] = plans.as_slice() else { panic!("one statement: {plans:?}") };
            let uses = |word: &str| plan.split([' ', '\n']).any(|part| part == word);
            assert!(uses(index), "{agent:?}: {plan}");
            let most = plan.lines().filter_map(actual_rows).fold(0.0, f64::max);
            let removed = plan.lines().filter_map(|line| line.split_once("Removed by Filter: "));
            let removed = removed.filter_map(|(_, rows)| rows.parse().ok()).fold(0.0, f64::max);
            assert!(most.max(removed) < 100.0, "{agent:?}: {plan}");
            println!("{agent:?}\n{plan}");
        }
    }
}

async fn periodic_queries_pass_over_rows_that_are_not_due(mut db: Db) {
    let Words { series, id, at, no, .. } = Words::of(&db, 20_000);
    let later = if no == "false" { "'2099-01-01'" } else { "4070908800000000" };
    execute(
        &db,
        &[
            format!(
                "INSERT INTO approvals (run_id, seq, call_id, tenant, at, expires_at, kind, tool, \
                 reason, arguments, status) SELECT {id}, 3, {id}, '{TENANT}', {at}, {later}, \
                 'approval', 't', 'r', '{{}}', 'pending' FROM {series}"
            ),
            format!(
                "INSERT INTO webhook_outbox (run_id, seq, id, tenant, lane, event, at, status, \
                 due_at, retry_until, attempts, tries) SELECT {id}, 3, {id}, '{TENANT}', 'lane', \
                 'e', {at}, 'pending', {later}, {later}, 0, 0 FROM {series}"
            ),
        ],
    )
    .await;
    let (store, plans) = Arc::into_inner(db.store).unwrap().explaining();
    db.store = Arc::new(store);
    assert_eq!(db.store.expire_approvals().await.unwrap(), 0);
    assert_eq!(db.store.due_lanes("", 9).await.unwrap(), Vec::<String>::new());
    let plans = std::mem::take(&mut *plans.lock());
    assert_eq!(plans.len(), 2, "{plans:?}");
    let looks_through = |plan: &&String| {
        plan.lines().any(|line| {
            let of_lanes = line == "SCAN lanes";
            let passed = line.split_once("Removed by Filter: ").map(|(_, rows)| rows.parse());
            passed.is_some_and(|rows| rows.is_ok_and(|rows: f64| rows > IN_VAIN))
                || (line.starts_with("SCAN ") && !of_lanes && !line.contains("CONSTANT ROW"))
        })
    };
    assert_eq!(plans.iter().find(looks_through), None);
    assert!(plans[0].contains("approvals_due"), "{}", plans[0]);
}

async fn a_place_costs_only_rows_of_its_own_tenant(mut db: Db) {
    let Words { series, id, at, .. } = Words::of(&db, 20_000);
    let running = format!(
        "INSERT INTO runs (id, created_at, tenant, subject, agent, agent_version, engine_version, \
         format, definition_hash, kind, inputs, overrides, metadata, epoch, next_seq, status, owner) \
         SELECT {id}, {at}, CASE WHEN n = 7 THEN '{TENANT}' ELSE 'other' END, 'key', 'a', '1', '1', \
         1, 'd', 'iterative', '{{}}', '{{}}', '{{}}', 1, 3, 'running', 'me' FROM {series}"
    );
    execute(&db, &[running]).await;
    for replica in ["me", "you"] {
        db.store.register_replica(replica, Duration::from_hours(1)).await.unwrap();
    }
    let (store, plans) = Arc::into_inner(db.store).unwrap().explaining();
    db.store = Arc::new(store);
    let limits = RunLimits { of_tenant: Some(1), of_key: None };
    let place = RunReservation {
        id: Uuid::now_v7(),
        owner: "you",
        run: Uuid::now_v7(),
        tenant: TENANT,
        subject: "key",
        idempotency_key: Some("k"),
    };
    let taken = db.store.reserve_run(place, limits).await.unwrap();
    assert_eq!(taken, Err(LimitReached::OfTenant(1)));
    let plans = std::mem::take(&mut *plans.lock());
    assert_eq!(plans.len(), 2, "{plans:?}");
    for plan in &plans {
        let rows = plan.lines().filter_map(actual_rows).fold(0.0, f64::max);
        let removed = plan.lines().filter_map(|line| line.split_once("Removed by Filter: "));
        assert!(rows < IN_VAIN && removed.count() == 0, "{plan}");
    }
    if db.store.kind() == "sqlite" {
        assert!(plans[0].contains("runs_owned (owner=? AND tenant=?)"), "{}", plans[0]);
    }
}

/// As commits do: sums of an hour's runs, and then those of hours and days.
async fn add_up(db: &Db) {
    let hour = match db.store.kind() {
        "postgres" => "date_trunc('hour', created_at, 'UTC')",
        _ => "created_at / 3600000000 * 3600000000",
    };
    let sums = ["input_tokens", "output_tokens", "cached_input_tokens", "cache_write_tokens"];
    let sums = sums.map(|column| format!("sum({column}), ")).concat();
    execute(
        db,
        &[format!(
            "INSERT INTO usage_added (tenant, hour, agent, model, runs, input_tokens, \
             output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, \
             cost_micro_usd, estimated) SELECT tenant, {hour}, agent, model, count(*), {sums} \
             sum(reasoning_tokens), sum(cost_micro_usd), count(*) < 0 FROM runs \
             GROUP BY tenant, {hour}, agent, model"
        )],
    )
    .await;
    while db.store.add_up_usage(1000).await.unwrap() > 0 {}
}

/// However many runs there are: sums of days and hours are read, and runs of parts of an hour alone.
async fn usage_of_many_runs_is_read_from_sums(mut db: Db) {
    let many = 2 * many(&db);
    fill_runs(&db, many).await;
    add_up(&db).await;
    let (store, plans) = Arc::into_inner(db.store).unwrap().explaining();
    db.store = Arc::new(store);
    let first = DateTime::from_timestamp(1_767_225_600, 0).unwrap();
    let last = first + TimeDelta::days(90);
    let whole = StatsFilter { since: first, until: last, agent: None };
    let part = StatsFilter { since: first + TimeDelta::minutes(10), ..whole.clone() };
    // The first two hours have 180 and 179 runs, the first minutes 29.
    for (filter, left_out, looks_at_runs) in [(whole, 0, false), (part, 29, true)] {
        let stats = db.store.usage_stats(TENANT, &filter, &page(9999, None)).await.unwrap();
        let runs: u64 = stats.iter().map(|row| row.runs).sum();
        let tokens: u64 = stats.iter().map(|row| row.usage.input_tokens).sum();
        let expected = u64::from(many) - 100 - left_out;
        assert_eq!((runs, tokens), (expected, 100 * expected));
        let plans = std::mem::take(&mut *plans.lock());
        let [plan] = plans.as_slice() else { panic!("one statement: {plans:?}") };
        assert_eq!(
            plan.contains("runs_listed") || plan.contains("runs_by"),
            looks_at_runs,
            "{plan}"
        );
        let most = plan.lines().filter_map(actual_rows).fold(0.0, f64::max);
        assert!(most < 1_500.0, "{plan}");
        let looks_through = ["Seq Scan on runs", "Seq Scan on usage_sums", "SCAN runs", "SCAN s"];
        assert!(!looks_through.iter().any(|scan| plan.contains(scan)), "{plan}");
    }
}

async fn calls_are_counted_once_for_concurrent_requests(mut db: Db) {
    stats::called(&db, Script::owned(), "file_ops", 3).await;
    let filters = [stats::all(), StatsFilter { agent: Some("unused".into()), ..stats::all() }];
    let (store, plans) = Arc::into_inner(db.store).unwrap().explaining();
    db.store = Arc::new(store);
    let ask = async |filter: &StatsFilter| db.store.tool_stats(TENANT, filter).await.unwrap();
    // A request that is answered at its first poll does not overlap with the others.
    let mut fewest = usize::MAX;
    for _ in 0..20 {
        plans.lock().clear();
        let same = futures::future::join_all((0..24).map(|_| ask(&filters[0]))).await;
        assert!(same.iter().all(|stats| stats[0].calls == 3), "{same:?}");
        fewest = fewest.min(plans.lock().len());
    }
    assert!(fewest <= 2, "{fewest} counts for 24 requests");
    assert_eq!(ask(&filters[1]).await, []);
    stats::called(&db, Script::owned(), "file_ops", 2).await;
    assert_eq!(ask(&filters[0]).await[0].calls, 5, "nothing old is told");
}
