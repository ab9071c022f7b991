//! The statements of the PostgreSQL store that read rows and move runs between owners.
//!
//! Every list of columns selects integers, text and bytes only (see [`crate::store::decode`]).

use crate::store::listing::Dialect;

macro_rules! micros {
    ($column:literal) => {
        concat!("(extract(epoch FROM ", $column, ") * 1000000)::bigint")
    };
}

macro_rules! usage {
    () => {
        "input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, \
         estimated::int::bigint AS estimated"
    };
}

macro_rules! run {
    () => {
        concat!(
            "id::text AS id, tenant, agent, agent_version, definition_hash, kind, status, subject, \
             inputs::text AS inputs, overrides::text AS overrides, session_id, parent_run_id::text AS parent_run_id, \
             metadata::text AS metadata, output::text AS output, raw_response, error::text AS error, \
             termination_reason, partial::int::bigint AS partial, latency_ms, model, attempts, iterations, \
             tool_calls_made, tools_used::text AS tools_used, warnings::text AS warnings, \
             callback_errors::text AS callback_errors, consumption::text AS consumption, owner, epoch, next_seq, crash_count, cancel_reason, \
             traceparent, ",
            usage!(), ", ",
            micros!("created_at"), " AS created_at, ",
            micros!("started_at"), " AS started_at, ",
            micros!("finished_at"), " AS finished_at, ",
            micros!("cancel_requested_at"), " AS cancel_requested_at"
        )
    };
}

/// Runs that wait for a replica and for nothing else, as their index has it.
macro_rules! in_line {
    () => {
        "status = 'queued' AND (session_place IS NULL OR session_place = 'holds')"
    };
}

/// Runs that wait for their session, as their index has it.
macro_rules! waits {
    ($table:literal) => {
        concat!($table, "status = 'queued' AND ", $table, "session_place <> 'holds'")
    };
}

macro_rules! event {
    () => {
        concat!("run_id::text AS run_id, seq, type, data::text AS data, ", micros!("at"), " AS at")
    };
}

macro_rules! key {
    () => {
        concat!(
            "id, tenant, name, scopes::text AS scopes, secret_hash, rate_limit_per_minute, rate_limit_burst, ",
            micros!("created_at"),
            " AS created_at, ",
            micros!("expires_at"),
            " AS expires_at, ",
            micros!("revoked_at"),
            " AS revoked_at"
        )
    };
}

pub(super) const DIALECT: Dialect = Dialect {
    runs: concat!("SELECT ", run!(), " FROM runs"),
    audit: concat!(
        "SELECT id::text AS id, run_id::text AS run_id, call_id::text AS call_id, duration_ms, subject, tool, rule, \
         decision, reason, outcome, arguments, ",
        micros!("at"),
        " AS at FROM audit_log"
    ),
    approvals: concat!(
        "SELECT run_id::text AS run_id, seq, call_id::text AS call_id, agent, kind, tool, reason, \
         arguments::text AS arguments, status, decided_by, decision_reason, resolution::text AS resolution, ",
        micros!("at"),
        " AS at, ",
        micros!("expires_at"),
        " AS expires_at, ",
        micros!("decided_at"),
        " AS decided_at FROM (SELECT *, call_id AS id, \
         (SELECT agent FROM runs WHERE runs.id = approvals.run_id) AS agent FROM approvals) AS asked"
    ),
    keys: concat!("SELECT ", key!(), " FROM api_keys"),
    time: ("(timestamptz 'epoch' + ", " * interval '1 microsecond')"),
    uuid: ("CAST(", " AS uuid)"),
    label: ("metadata <> '{}' AND metadata @> jsonb_build_object(", "::text, ", "::text)"),
};

pub(super) const ABOUT: &str =
    "SELECT current_setting('server_version') AS version, clock_timestamp() AS now,
    to_regclass('_sqlx_migrations') IS NOT NULL AS is_migrated";

pub(super) const MIGRATED: &str = "SELECT count(*) FROM _sqlx_migrations WHERE success";

pub(super) const DEFINE: &str =
    "INSERT INTO definitions (hash, body) SELECT * FROM unnest($1::text[], $2::text[])
    ON CONFLICT (hash) DO UPDATE SET used_at = excluded.used_at";

pub(super) const RUN: &str = concat!("SELECT ", run!(), " FROM runs WHERE tenant = $1 AND id = $2");

pub(super) const EVENTS: &str = concat!(
    "SELECT ",
    event!(),
    " FROM run_events WHERE run_id = $2 AND seq > $3 \
     AND EXISTS (SELECT 1 FROM runs WHERE id = $2 AND tenant = $1) ORDER BY seq LIMIT $4"
);

pub(super) const JOURNALS: &str = concat!(
    "SELECT ",
    event!(),
    " FROM run_events WHERE run_id = ANY($2) \
     AND run_id IN (SELECT id FROM runs WHERE id = ANY($2) AND tenant = $1) ORDER BY run_id, seq"
);

/// `$3`: how many of the ended runs.
pub(super) const SESSION: &str = concat!(
    "SELECT f.agent, ",
    micros!("f.created_at"),
    " AS created_at, ",
    micros!("l.created_at"),
    " AS last_run_at, \
     (SELECT json_agg(id ORDER BY session_place, available_at, id)::text FROM (\
     SELECT id, session_place, available_at FROM runs WHERE tenant = $1 AND session_id = $2 \
     AND session_place = 'holds' AND finished_at IS NULL \
     UNION ALL SELECT id, session_place, available_at FROM runs WHERE tenant = $1 AND session_id = $2 AND ",
    waits!(""),
    ") alive) AS live, \
     (SELECT COALESCE(max(session_turn), 0) FROM runs WHERE tenant = $1 AND session_id = $2 \
     AND session_turn IS NOT NULL) AS turn, \
     (SELECT json_agg(id ORDER BY session_turn)::text FROM (SELECT id, session_turn FROM runs \
     WHERE tenant = $1 AND session_id = $2 AND session_turn IS NOT NULL AND finished_at IS NOT NULL AND iterations > 0 \
     ORDER BY session_turn DESC LIMIT $3) past) AS ended \
     FROM (SELECT agent, created_at FROM runs WHERE tenant = $1 AND session_id = $2 AND parent_run_id IS NULL \
     ORDER BY created_at, id LIMIT 1) f CROSS JOIN (SELECT created_at FROM runs WHERE tenant = $1 \
     AND session_id = $2 AND parent_run_id IS NULL ORDER BY created_at DESC, id DESC LIMIT 1) l"
);

/// Runs that are counted; `$4` may be NULL for all agents.
macro_rules! counted {
    () => {
        "r.tenant = $1 AND r.created_at >= $2 AND r.created_at < $3 AND ($4::text IS NULL OR r.agent = $4)"
    };
}

/// A quantile of the durations of executed calls.
macro_rules! quantile {
    ($share:literal) => {
        concat!(
            "percentile_disc(",
            $share,
            ") WITHIN GROUP (ORDER BY t.duration_ms) FILTER (WHERE t.started_at IS NOT NULL AND NOT t.cached)"
        )
    };
}

pub(super) const TOOL_STATS: &str = concat!(
    "SELECT t.tool, count(*) AS calls, count(*) FILTER (WHERE t.state IN ('failed', 'unknown')) AS errors, \
     count(*) FILTER (WHERE t.state = 'denied') AS blocked, ",
    quantile!("0.5"),
    " AS p50_ms, ",
    quantile!("0.95"),
    " AS p95_ms, ",
    quantile!("0.99"),
    " AS p99_ms FROM runs r JOIN tool_calls t ON t.run_id = r.id WHERE ",
    counted!(),
    " AND t.state <> 'proposed' GROUP BY t.tool ORDER BY t.tool"
);

/// A cost is known where that of every answer is.
pub(super) const USAGE_STATS: &str = concat!(
    "SELECT to_char(r.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day, r.agent, i.provider || '/' || i.model AS model, \
     count(DISTINCT r.id) AS runs, sum(i.input_tokens)::bigint AS input_tokens, \
     sum(i.output_tokens)::bigint AS output_tokens, sum(i.cached_input_tokens)::bigint AS cached_input_tokens, \
     sum(i.cache_write_tokens)::bigint AS cache_write_tokens, sum(i.reasoning_tokens)::bigint AS reasoning_tokens, \
     CASE WHEN count(*) = count(i.cost_micro_usd) THEN sum(i.cost_micro_usd)::bigint END AS cost_micro_usd, \
     max(i.estimated::int)::bigint AS estimated FROM runs r JOIN iterations i ON i.run_id = r.id WHERE ",
    counted!(),
    " GROUP BY 1, 2, 3 ORDER BY 1 DESC, 2, 3"
);

/// `$4`: words with operators between them.
pub(super) const RECALL: &str = concat!(
    "SELECT kind, content, ",
    micros!("at"),
    " AS at FROM observations, to_tsquery('english', $4) q WHERE words @@ q AND tenant = $1 AND agent = $2 \
     AND run_id <> $3 ORDER BY ts_rank(words, q) DESC, at DESC, seq LIMIT $5"
);

pub(super) const EVENTS_AT: &str = concat!(
    "SELECT ",
    event!(),
    " FROM run_events WHERE run_id = $1 AND seq = ANY($2) ORDER BY seq"
);

pub(super) const ITERATIONS: &str = concat!(
    "SELECT run_id::text AS run_id, attempt, number, latency_ms, retries, fallback::int::bigint AS fallback, provider, \
     model, finish_reason, ",
    usage!(),
    ", ",
    micros!("started_at"),
    " AS started_at FROM iterations WHERE run_id = $2 \
     AND EXISTS (SELECT 1 FROM runs WHERE id = $2 AND tenant = $1) ORDER BY attempt, number LIMIT $3 OFFSET $4"
);

pub(super) const TOOL_CALLS: &str = concat!(
    "SELECT run_id::text AS run_id, call_id::text AS call_id, attempt, iteration, ordinal, tool, proposed_seq, \
     result_seq, state, effect, decision, reason, is_error::int::bigint AS is_error, cached::int::bigint AS cached, \
     duration_ms, ",
    micros!("started_at"),
    " AS started_at, ",
    micros!("finished_at"),
    " AS finished_at \
     FROM tool_calls WHERE run_id = $2 AND EXISTS (SELECT 1 FROM runs WHERE id = $2 AND tenant = $1) \
     ORDER BY proposed_seq, ordinal LIMIT $3 OFFSET $4"
);

pub(super) const KEY: &str = concat!("SELECT ", key!(), " FROM api_keys WHERE id = $1");

pub(super) const DEFINITION: &str = "SELECT body FROM definitions WHERE hash = $1";

pub(super) const HAS_KEYS: &str = "SELECT 1 FROM api_keys LIMIT 1";

pub(super) const INSERT_KEY: &str = "INSERT INTO api_keys (id, tenant, name, scopes, secret_hash, created_at, \
     expires_at, revoked_at, rate_limit_per_minute, rate_limit_burst) \
     VALUES ($1, $2, $3, to_json($4::text[]), $5, $6, $7, $8, $9, $10) ON CONFLICT DO NOTHING RETURNING id";

pub(super) const REVOKE_KEY: &str = "UPDATE api_keys SET revoked_at = COALESCE(revoked_at, clock_timestamp()) \
     WHERE tenant = $1 AND id = $2 RETURNING id";

pub(super) const IDEMPOTENT_RUN: &str = concat!(
    "SELECT id::text AS id, request_hash, ",
    micros!("created_at"),
    " AS created_at FROM runs WHERE tenant = $1 AND idempotency_key = $2"
);

pub(super) const FORGET_KEY: &str = "UPDATE runs SET idempotency_key = NULL, request_hash = NULL \
     WHERE tenant = $1 AND idempotency_key = $2 AND created_at < $3";

pub(super) const QUEUED: &str = concat!(
    "SELECT (SELECT count(*) FROM runs WHERE ",
    in_line!(),
    ") + (SELECT count(*) FROM runs WHERE ",
    waits!(""),
    ")"
);

/// First in each line for a session: those whose turn it is if nobody holds it. Materialised, so
/// that the limit holds.
pub(super) const CLAIM: &str = concat!(
    "WITH RECURSIVE heads (id) AS ((SELECT id FROM runs WHERE ",
    waits!(""),
    " ORDER BY tenant, session_id, session_place, available_at, id LIMIT 1) \
     UNION ALL SELECT (SELECT r.id FROM runs r WHERE ",
    waits!("r."),
    " AND (r.tenant, r.session_id) > (h.tenant, h.session_id) \
     ORDER BY r.tenant, r.session_id, r.session_place, r.available_at, r.id LIMIT 1) \
     FROM heads JOIN runs h ON h.id = heads.id), \
     turned AS MATERIALIZED (SELECT id, available_at FROM runs w WHERE id IN (SELECT id FROM heads) AND ",
    waits!("w."),
    " AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.tenant = w.tenant AND r.session_id = w.session_id \
     AND r.session_place = 'holds' AND r.finished_at IS NULL) LIMIT $2 FOR UPDATE SKIP LOCKED), \
     due AS MATERIALIZED (SELECT id, available_at FROM runs WHERE ",
    in_line!(),
    " AND available_at <= clock_timestamp() ORDER BY available_at, id LIMIT $2 FOR UPDATE SKIP LOCKED), \
     next AS MATERIALIZED (SELECT id AS next_id FROM (SELECT * FROM turned UNION ALL SELECT * FROM due) both_lines \
     ORDER BY available_at, id LIMIT $2) \
     UPDATE runs SET status = 'running', owner = $1, epoch = epoch + 1, available_at = NULL, \
     session_place = CASE WHEN session_place IS NOT NULL THEN 'holds' END, \
     session_turn = CASE WHEN session_place <> 'holds' THEN (SELECT COALESCE(max(r.session_turn), 0) + 1 FROM runs r \
     WHERE r.tenant = runs.tenant AND r.session_id = runs.session_id AND r.session_turn IS NOT NULL) \
     ELSE session_turn END \
     FROM next WHERE id = next_id RETURNING ",
    run!(),
    ", scopes::text AS scopes, \
     (SELECT body FROM definitions WHERE hash = definition_hash) AS definition"
);

pub(super) const CLAIM_RUN: &str = concat!(
    "UPDATE runs SET status = 'running', owner = $1, epoch = epoch + 1, available_at = NULL \
     WHERE id = $2 AND status = 'queued' AND available_at <= clock_timestamp() RETURNING ",
    run!(),
    ", scopes::text AS scopes, \
     (SELECT body FROM definitions WHERE hash = definition_hash) AS definition"
);

/// What a run started, and what that started, as far as it has not ended.
pub(super) const DESCENDANTS: &str = "WITH RECURSIVE tree (id) AS (SELECT id FROM runs \
     WHERE parent_run_id = $1 AND finished_at IS NULL UNION SELECT child.id FROM tree JOIN runs child \
     ON child.parent_run_id = tree.id AND child.finished_at IS NULL) SELECT id FROM tree";

/// Runs whose parent has ended without them.
pub(super) const STRAYS: &str = "SELECT child.tenant, child.id FROM runs child WHERE child.parent_run_id IS NOT NULL \
     AND child.finished_at IS NULL AND child.cancel_requested_at IS NULL AND EXISTS \
     (SELECT 1 FROM runs parent WHERE parent.id = child.parent_run_id AND parent.finished_at IS NOT NULL) LIMIT $1";

pub(super) const RELEASE: &str = "UPDATE runs SET status = 'queued', owner = NULL, available_at = clock_timestamp() \
     WHERE status = 'running' AND owner = $1";

pub(super) const OWNED: &str =
    "SELECT id::text AS id, epoch FROM runs WHERE status = 'running' AND owner = $1";

/// `$4`: the crashes to count, none or one.
pub(super) const GIVE_BACK: &str = "UPDATE runs SET status = 'queued', owner = NULL, crash_count = crash_count + $4, \
     available_at = clock_timestamp() + $4 * least(crash_count, 60) * interval '1 second' \
     WHERE status = 'running' AND owner = $1 AND id = $2 AND epoch = $3";

/// Runs that were asked to cancel while nobody drove them, whatever else they wait for.
pub(super) const CLAIM_CANCELLED: &str = concat!(
    "UPDATE runs SET status = 'running', owner = $1, epoch = epoch + 1, available_at = NULL WHERE id IN \
     (SELECT id FROM runs WHERE status = 'queued' AND cancel_requested_at IS NOT NULL \
     ORDER BY cancel_requested_at LIMIT $2 FOR UPDATE SKIP LOCKED) RETURNING ",
    run!(),
    ", scopes::text AS scopes, \
     (SELECT body FROM definitions WHERE hash = definition_hash) AS definition"
);

pub(super) const CANCEL_REQUESTS: &str = "SELECT id::text AS id, cancel_reason FROM runs \
     WHERE status = 'running' AND owner = $1 AND cancel_requested_at IS NOT NULL";

pub(super) const LOCK_RUN: &str =
    concat!("SELECT ", run!(), " FROM runs WHERE tenant = $1 AND id = $2 FOR UPDATE");

/// A run that nobody drives is queued: whoever claims it ends it. No row: it has ended, or there is
/// no such run.
pub(super) const REQUEST_CANCEL: &str = concat!(
    "UPDATE runs SET cancel_requested_at = COALESCE(cancel_requested_at, clock_timestamp()), \
     cancel_reason = COALESCE(cancel_reason, $3), \
     status = CASE WHEN status = 'running' THEN status ELSE 'queued' END, \
     available_at = CASE WHEN status <> 'running' THEN clock_timestamp() END \
     WHERE tenant = $1 AND id = $2 AND finished_at IS NULL RETURNING ",
    run!(),
    ", pg_notify($4, $5)::text"
);

pub(super) const REGISTER: &str = "INSERT INTO replicas (id) VALUES ($1) ON CONFLICT (id) \
     DO UPDATE SET started_at = excluded.started_at, heartbeat_at = excluded.heartbeat_at, dead = false";

pub(super) const HEARTBEAT: &str =
    "UPDATE replicas SET heartbeat_at = clock_timestamp() WHERE id = $1 AND NOT dead RETURNING id";

pub(super) const LOCK_STALE: &str = "SELECT id FROM replicas WHERE NOT dead AND id <> $2 \
     AND heartbeat_at < clock_timestamp() - $1 * interval '1 microsecond' FOR UPDATE SKIP LOCKED";

pub(super) const BURY: &str = "UPDATE replicas SET dead = true WHERE id = ANY($1)";

/// At once, so that a replica which registers again does not find itself the owner of what it lost.
pub(super) const DISOWN: &str =
    "UPDATE runs SET owner = 'dead ' || owner WHERE status = 'running' AND owner = ANY($1)";

/// Rows of replicas that nobody misses any more.
pub(super) const FORGET: &str =
    "DELETE FROM replicas WHERE dead AND heartbeat_at < clock_timestamp() - interval '1 day'";

/// Statement one of a takeover.
pub(super) const LOCK_ORPHANS: &str = "SELECT id FROM runs WHERE status = 'running' \
     AND owner NOT IN (SELECT id FROM replicas WHERE NOT dead) LIMIT $1 FOR UPDATE SKIP LOCKED";

/// Statement two. What becomes of the run is decided by whoever claims it.
pub(super) const REQUEUE: &str = "UPDATE runs SET status = 'queued', owner = NULL, \
     available_at = clock_timestamp(), crash_count = crash_count + 1 WHERE id = ANY($1)";

/// When a bucket will be full if nothing is taken now. What is further than any clock or wait
/// explains, because the limit was changed or a clock set back, is brought near again.
macro_rules! full {
    () => {
        "greatest(least(l.tat, excluded.at + $3 + 10000000000), excluded.at)"
    };
}

/// What it gives of the tokens asked for.
macro_rules! given {
    () => {
        concat!("least($4, greatest(0, ($3 - (", full!(), " - excluded.at)) / $2))")
    };
}

/// `$2` is the time in which a token comes back, `$3` that in which a bucket fills, `$4` the tokens
/// asked for.
pub(super) const TAKE_TOKENS: &str = concat!(
    "INSERT INTO rate_limits AS l (key, at, granted, tat) \
     SELECT $1, now, least($4, $3 / $2), now + least($4, $3 / $2) * $2 \
     FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint AS now) AS clock \
     ON CONFLICT (key) DO UPDATE SET at = excluded.at, granted = ",
    given!(),
    ", tat = ",
    full!(),
    " + $2 * ",
    given!(),
    " RETURNING at, tat, granted"
);
