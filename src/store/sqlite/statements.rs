//! The statements of the SQLite store.
//!
//! Lists of rows are bound as one JSON array each and unpacked by `json_each`, so that a batch is
//! one statement a table. Booleans are 0 or 1, times microseconds, documents text: `SELECT *` is
//! what [`crate::store::decode`] reads.

use crate::store::listing::Dialect;

pub(super) const DIALECT: Dialect = Dialect {
    runs: "SELECT * FROM runs",
    audit: "SELECT * FROM audit_log",
    approvals: APPROVALS,
    keys: "SELECT * FROM api_keys",
    time: ("", ""),
    uuid: ("", ""),
    label: (
        "EXISTS (SELECT 1 FROM json_each(metadata) AS m WHERE m.key = ",
        " AND m.value = ",
        ")",
    ),
};

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

pub(super) const ABOUT: &str = "SELECT sqlite_version() AS version,
    EXISTS (SELECT 1 FROM sqlite_master WHERE name = '_sqlx_migrations') AS is_migrated";

pub(super) const MIGRATED: &str = "SELECT count(*) FROM _sqlx_migrations WHERE success";

pub(super) const DEFINE: &str = "INSERT INTO definitions (hash, body, used_at) VALUES ($1, $2, $3) ON CONFLICT (hash) DO UPDATE SET used_at = $3";

/// The fence: only rows that are still ours and stand exactly where the write begins. The `+` keeps
/// SQLite from looking through everything that is ours instead of looking up each id.
pub(super) const UPDATE_RUNS: &str = "
UPDATE runs SET
    next_seq = w.value ->> 'next_seq',
    status = w.value ->> 'status',
    owner = CASE WHEN w.value ->> 'status' = 'running' THEN owner END,
    started_at = COALESCE(started_at, w.value ->> 'started_at'),
    attempts = w.value ->> 'attempts',
    iterations = w.value ->> 'iterations',
    tool_calls_made = w.value ->> 'tool_calls_made',
    model = w.value ->> 'model',
    tools_used = w.value ->> 'tools_used',
    warnings = w.value ->> 'warnings',
    callback_errors = w.value ->> 'callback_errors',
    consumption = w.value ->> 'consumption',
    input_tokens = w.value ->> '$.usage.input_tokens',
    output_tokens = w.value ->> '$.usage.output_tokens',
    cached_input_tokens = w.value ->> '$.usage.cached_input_tokens',
    cache_write_tokens = w.value ->> '$.usage.cache_write_tokens',
    reasoning_tokens = w.value ->> '$.usage.reasoning_tokens',
    cost_micro_usd = w.value ->> '$.usage.cost_micro_usd',
    estimated = w.value ->> '$.usage.estimated',
    output = w.value ->> '$.end.output',
    raw_response = w.value ->> '$.end.raw_response',
    error = w.value ->> '$.end.error',
    termination_reason = w.value ->> '$.end.termination_reason',
    partial = COALESCE(w.value ->> '$.end.partial', 0),
    latency_ms = w.value ->> '$.end.latency_ms',
    finished_at = w.value ->> '$.end.finished_at'
FROM json_each($2) AS w
WHERE w.value ->> '$.new.agent' IS NULL AND runs.id = w.value ->> 'id' AND +runs.owner = $1
    AND runs.epoch = w.value ->> 'epoch' AND +runs.status = 'running'
    AND runs.next_seq = w.value ->> 'first_seq'
RETURNING id";

/// A run that holds its session comes after all that wait for it; that there is one, and that its
/// turn was nobody's, is the indexes' to say.
pub(super) const INSERT_RUNS: &str = "
INSERT INTO runs (
    id, epoch, next_seq, status, owner, available_at, started_at, attempts, iterations, tool_calls_made, model,
    tools_used, warnings, callback_errors, consumption, tenant, subject, input_tokens, output_tokens, cached_input_tokens,
    cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated, output, raw_response, error, termination_reason,
    partial, latency_ms, finished_at, agent, agent_version, definition_hash, kind, scopes, inputs, overrides,
    session_id, parent_run_id, metadata, created_at, idempotency_key, request_hash, traceparent, session_place,
    session_turn
)
SELECT
    value ->> 'id', value ->> 'epoch', value ->> 'next_seq', value ->> 'status',
    CASE WHEN value ->> 'status' = 'running' THEN $1 END, CASE WHEN value ->> 'status' = 'queued' THEN $3 END,
    value ->> 'started_at', value ->> 'attempts', value ->> 'iterations', value ->> 'tool_calls_made',
    value ->> 'model', value ->> 'tools_used', value ->> 'warnings', value ->> 'callback_errors', value ->> 'consumption', value ->> 'tenant',
    value ->> 'subject', value ->> '$.usage.input_tokens', value ->> '$.usage.output_tokens',
    value ->> '$.usage.cached_input_tokens', value ->> '$.usage.cache_write_tokens',
    value ->> '$.usage.reasoning_tokens', value ->> '$.usage.cost_micro_usd', value ->> '$.usage.estimated',
    value ->> '$.end.output', value ->> '$.end.raw_response', value ->> '$.end.error',
    value ->> '$.end.termination_reason', COALESCE(value ->> '$.end.partial', 0), value ->> '$.end.latency_ms',
    value ->> '$.end.finished_at', value ->> '$.new.agent', value ->> '$.new.agent_version',
    value ->> '$.new.definition_hash', value ->> '$.new.kind', value ->> '$.new.scopes', value ->> '$.new.inputs',
    value ->> '$.new.overrides', value ->> '$.new.session_id', value ->> '$.new.parent_run_id',
    value ->> '$.new.metadata', value ->> '$.new.created_at', value ->> '$.new.idempotency_key',
    value ->> '$.new.request_hash', value ->> '$.new.traceparent', value ->> '$.new.session_place',
    value ->> '$.new.session_turn'
FROM json_each($2) WHERE value ->> '$.new.agent' IS NOT NULL AND (
    value ->> '$.new.session_place' IS NOT 'holds'
    OR NOT EXISTS (SELECT 1 FROM runs r WHERE r.tenant = value ->> 'tenant'
        AND r.session_id = value ->> '$.new.session_id' AND r.status = 'queued' AND r.session_place <> 'holds')
)
ON CONFLICT DO NOTHING
RETURNING id";

pub(super) const INSERT_EVENTS: &str = "
INSERT INTO run_events (run_id, seq, epoch, at, type, data)
SELECT value ->> 'run_id', value ->> 'seq', value ->> 'epoch', value ->> 'at', value ->> 'kind', value ->> 'data'
FROM json_each($1)";

pub(super) const INSERT_ITERATIONS: &str = "
INSERT INTO iterations (
    run_id, attempt, number, seq, started_at, latency_ms, retries, fallback, provider, model, finish_reason,
    input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated
)
SELECT
    value ->> 'run_id', value ->> 'attempt', value ->> 'number', value ->> 'seq', value ->> 'started_at',
    value ->> 'latency_ms', value ->> 'retries', value ->> 'fallback', value ->> 'provider', value ->> 'model',
    value ->> 'finish_reason', value ->> '$.usage.input_tokens', value ->> '$.usage.output_tokens',
    value ->> '$.usage.cached_input_tokens', value ->> '$.usage.cache_write_tokens',
    value ->> '$.usage.reasoning_tokens', value ->> '$.usage.cost_micro_usd', value ->> '$.usage.estimated'
FROM json_each($1)";

pub(super) const INSERT_CALLS: &str = "
INSERT INTO tool_calls (
    run_id, call_id, attempt, iteration, ordinal, tool, proposed_seq, result_seq,
    state, effect, decision, reason, is_error, cached, started_at, finished_at, duration_ms
)
SELECT
    value ->> 'run_id', value ->> 'call_id', value ->> '$.proposed.attempt', value ->> '$.proposed.iteration',
    value ->> '$.proposed.ordinal', value ->> '$.proposed.tool', value ->> '$.proposed.seq', value ->> 'result_seq',
    value ->> 'state', value ->> 'effect', value ->> 'decision', value ->> 'reason', value ->> 'is_error',
    value ->> 'cached', value ->> 'started_at', value ->> 'finished_at', value ->> 'duration_ms'
FROM json_each($1) WHERE value ->> '$.proposed.tool' IS NOT NULL";

pub(super) const UPDATE_CALLS: &str = "
UPDATE tool_calls SET
    state = w.value ->> 'state',
    effect = COALESCE(w.value ->> 'effect', effect),
    decision = COALESCE(w.value ->> 'decision', decision),
    reason = COALESCE(w.value ->> 'reason', reason),
    is_error = w.value ->> 'is_error',
    cached = w.value ->> 'cached',
    started_at = COALESCE(w.value ->> 'started_at', started_at),
    finished_at = COALESCE(w.value ->> 'finished_at', finished_at),
    duration_ms = COALESCE(w.value ->> 'duration_ms', duration_ms),
    result_seq = COALESCE(w.value ->> 'result_seq', result_seq)
FROM json_each($1) AS w
WHERE w.value ->> '$.proposed.tool' IS NULL
    AND tool_calls.run_id = w.value ->> 'run_id' AND tool_calls.call_id = w.value ->> 'call_id'";

pub(super) const INSERT_AUDIT: &str = "
INSERT INTO audit_log (
    tenant, at, id, run_id, call_id, duration_ms, subject, tool, rule, decision, reason, outcome, arguments
)
SELECT
    value ->> 'tenant', value ->> 'at', value ->> 'id', value ->> 'run_id', value ->> 'call_id',
    value ->> 'duration_ms', value ->> 'subject', value ->> 'tool', value ->> 'rule', value ->> 'decision',
    value ->> 'reason', value ->> 'outcome', value ->> 'arguments'
FROM json_each($1)";

pub(super) const INSERT_OBSERVATIONS: &str = "
INSERT INTO observations (run_id, seq, tenant, agent, session_id, at, kind, content)
SELECT value ->> 'run_id', value ->> 'seq', value ->> 'tenant', value ->> 'agent', value ->> 'session_id', value ->> 'at',
    value ->> 'kind', value ->> 'content'
FROM json_each($1)";

/// Runs that are counted; `$4` may be NULL for all agents.
macro_rules! counted {
    () => {
        "r.tenant = $1 AND r.created_at >= $2 AND r.created_at < $3 AND ($4 IS NULL OR r.agent = $4)"
    };
}

/// Quantiles are those of the durations of executed calls.
pub(super) const TOOL_STATS: &str = concat!(
    "WITH calls AS (SELECT t.* FROM runs r JOIN tool_calls t ON t.run_id = r.id WHERE ",
    counted!(),
    " AND t.state <> 'proposed'), \
     timed AS (SELECT tool, duration_ms, row_number() OVER (PARTITION BY tool ORDER BY duration_ms) AS place, \
     count(*) OVER (PARTITION BY tool) AS total FROM calls \
     WHERE started_at IS NOT NULL AND duration_ms IS NOT NULL AND NOT cached), \
     quantiles AS (SELECT tool, min(duration_ms) FILTER (WHERE place * 100 >= 50 * total) AS p50_ms, \
     min(duration_ms) FILTER (WHERE place * 100 >= 95 * total) AS p95_ms, \
     min(duration_ms) FILTER (WHERE place * 100 >= 99 * total) AS p99_ms FROM timed GROUP BY tool) \
     SELECT c.tool, count(*) AS calls, sum(c.state IN ('failed', 'unknown')) AS errors, \
     sum(c.state = 'denied') AS blocked, q.p50_ms, q.p95_ms, q.p99_ms \
     FROM calls c LEFT JOIN quantiles q ON q.tool = c.tool GROUP BY c.tool ORDER BY c.tool"
);

/// A cost is known where that of every answer is.
pub(super) const USAGE_STATS: &str = concat!(
    "SELECT strftime('%Y-%m-%d', r.created_at / 1000000, 'unixepoch') AS day, r.agent, \
     i.provider || '/' || i.model AS model, count(DISTINCT r.id) AS runs, sum(i.input_tokens) AS input_tokens, \
     sum(i.output_tokens) AS output_tokens, sum(i.cached_input_tokens) AS cached_input_tokens, \
     sum(i.cache_write_tokens) AS cache_write_tokens, sum(i.reasoning_tokens) AS reasoning_tokens, \
     CASE WHEN count(*) = count(i.cost_micro_usd) THEN sum(i.cost_micro_usd) END AS cost_micro_usd, \
     max(i.estimated) AS estimated FROM runs r JOIN iterations i ON i.run_id = r.id WHERE ",
    counted!(),
    " GROUP BY 1, 2, 3 ORDER BY 1 DESC, 2, 3"
);

/// `$4`: words with operators between them.
pub(super) const RECALL: &str = "SELECT o.kind, o.content, o.at FROM observation_words w \
     JOIN observations o ON o.id = w.rowid WHERE observation_words MATCH $4 AND o.tenant = $1 AND o.agent = $2 \
     AND o.run_id <> $3 ORDER BY bm25(observation_words), o.at DESC, o.seq LIMIT $5";

/// Whether an earlier try has stored a write: its last event is in the journal.
pub(super) const STORED_EARLIER: &str =
    "SELECT 1 FROM run_events WHERE run_id = $1 AND seq = $2 AND epoch = $3 AND at = $4";

pub(super) const RUN: &str = "SELECT * FROM runs WHERE tenant = $1 AND id = $2";

pub(super) const EVENTS: &str = "SELECT * FROM run_events WHERE run_id = $2 AND seq > $3 \
     AND EXISTS (SELECT 1 FROM runs WHERE id = $2 AND tenant = $1) ORDER BY seq LIMIT $4";

/// `$2`: ids, a JSON array.
pub(super) const JOURNALS: &str = "SELECT * FROM run_events WHERE run_id IN \
     (SELECT id FROM runs WHERE tenant = $1 AND id IN (SELECT value FROM json_each($2))) ORDER BY run_id, seq";

/// `$3`: how many of the ended runs.
pub(super) const SESSION: &str = concat!(
    "SELECT f.agent, f.created_at, l.created_at AS last_run_at, \
     (SELECT json_group_array(id) FROM (SELECT id FROM (\
     SELECT id, session_place, available_at FROM runs WHERE tenant = $1 AND session_id = $2 \
     AND session_place = 'holds' AND finished_at IS NULL \
     UNION ALL SELECT id, session_place, available_at FROM runs WHERE tenant = $1 AND session_id = $2 AND ",
    waits!(""),
    ") ORDER BY session_place, available_at, id)) AS live, \
     (SELECT COALESCE(max(session_turn), 0) FROM runs WHERE tenant = $1 AND session_id = $2 \
     AND session_turn IS NOT NULL) AS turn, \
     (SELECT json_group_array(id) FROM (SELECT id FROM (SELECT id, session_turn FROM runs \
     WHERE tenant = $1 AND session_id = $2 AND session_turn IS NOT NULL AND finished_at IS NOT NULL AND iterations > 0 \
     ORDER BY session_turn DESC LIMIT $3) ORDER BY session_turn)) AS ended \
     FROM (SELECT agent, created_at FROM runs WHERE tenant = $1 AND session_id = $2 AND parent_run_id IS NULL \
     ORDER BY created_at, id LIMIT 1) f CROSS JOIN (SELECT created_at FROM runs WHERE tenant = $1 \
     AND session_id = $2 AND parent_run_id IS NULL ORDER BY created_at DESC, id DESC LIMIT 1) l"
);

pub(super) const EVENTS_AT: &str = "SELECT * FROM run_events WHERE run_id = $1 AND seq IN (SELECT value FROM json_each($2)) ORDER BY seq";

pub(super) const ITERATIONS: &str = "SELECT * FROM iterations WHERE run_id = $2 \
     AND EXISTS (SELECT 1 FROM runs WHERE id = $2 AND tenant = $1) ORDER BY attempt, number LIMIT $3 OFFSET $4";

pub(super) const TOOL_CALLS: &str = "SELECT * FROM tool_calls WHERE run_id = $2 \
     AND EXISTS (SELECT 1 FROM runs WHERE id = $2 AND tenant = $1) ORDER BY proposed_seq, ordinal LIMIT $3 OFFSET $4";

pub(super) const KEY: &str = "SELECT * FROM api_keys WHERE id = $1";

pub(super) const DEFINITION: &str = "SELECT body FROM definitions WHERE hash = $1";

pub(super) const HAS_KEYS: &str = "SELECT 1 FROM api_keys LIMIT 1";

pub(super) const INSERT_KEY: &str = "INSERT INTO api_keys (id, tenant, name, scopes, secret_hash, created_at, \
     expires_at, revoked_at, rate_limit_per_minute, rate_limit_burst) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT DO NOTHING";

pub(super) const REVOKE_KEY: &str =
    "UPDATE api_keys SET revoked_at = COALESCE(revoked_at, $3) WHERE tenant = $1 AND id = $2";

pub(super) const IDEMPOTENT_RUN: &str =
    "SELECT id, request_hash, created_at FROM runs WHERE tenant = $1 AND idempotency_key = $2";

pub(super) const FORGET_KEY: &str = "UPDATE runs SET idempotency_key = NULL, request_hash = NULL \
     WHERE tenant = $1 AND idempotency_key = $2 AND created_at < $3";

pub(super) const QUEUED: &str = concat!(
    "SELECT (SELECT count(*) FROM runs WHERE ",
    in_line!(),
    ") + (SELECT count(*) FROM runs WHERE ",
    waits!(""),
    ")"
);

/// First in each line for a session: those whose turn it is if nobody holds it.
pub(super) const CLAIM: &str = concat!(
    "WITH RECURSIVE heads (id) AS (SELECT * FROM (SELECT id FROM runs WHERE ",
    waits!(""),
    " ORDER BY tenant, session_id, session_place, available_at, id LIMIT 1) \
     UNION ALL SELECT (SELECT r.id FROM runs r WHERE ",
    waits!("r."),
    " AND (r.tenant, r.session_id) > (h.tenant, h.session_id) \
     ORDER BY r.tenant, r.session_id, r.session_place, r.available_at, r.id LIMIT 1) \
     FROM heads JOIN runs h ON h.id = heads.id) \
     UPDATE runs SET status = 'running', owner = $1, epoch = epoch + 1, available_at = NULL, \
     session_place = CASE WHEN session_place IS NOT NULL THEN 'holds' END, \
     session_turn = CASE WHEN session_place <> 'holds' THEN (SELECT COALESCE(max(r.session_turn), 0) + 1 FROM runs r \
     WHERE r.tenant = runs.tenant AND r.session_id = runs.session_id AND r.session_turn IS NOT NULL) \
     ELSE session_turn END \
     WHERE id IN (SELECT id FROM (\
     SELECT id, available_at FROM runs w WHERE id IN (SELECT id FROM heads) \
     AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.tenant = w.tenant AND r.session_id = w.session_id \
     AND r.session_place = 'holds' AND r.finished_at IS NULL) \
     UNION ALL SELECT * FROM (SELECT id, available_at FROM runs WHERE ",
    in_line!(),
    " AND available_at <= $3 ORDER BY available_at, id LIMIT $2)) ORDER BY available_at, id LIMIT $2) \
     RETURNING *, (SELECT body FROM definitions WHERE hash = definition_hash) AS definition"
);

pub(super) const CLAIM_RUN: &str = "UPDATE runs SET status = 'running', owner = $1, epoch = epoch + 1, \
     available_at = NULL WHERE id = $2 AND status = 'queued' AND available_at <= $3 \
     RETURNING *, (SELECT body FROM definitions WHERE hash = definition_hash) AS definition";

/// What a run started, and what that started, as far as it has not ended.
pub(super) const DESCENDANTS: &str = "WITH RECURSIVE tree (id) AS (SELECT id FROM runs \
     WHERE parent_run_id = $1 AND finished_at IS NULL UNION SELECT child.id FROM tree JOIN runs child \
     ON child.parent_run_id = tree.id AND child.finished_at IS NULL) SELECT id FROM tree";

/// Runs whose parent has ended without them.
pub(super) const STRAYS: &str = "SELECT child.tenant, child.id FROM runs child WHERE child.parent_run_id IS NOT NULL \
     AND child.finished_at IS NULL AND child.cancel_requested_at IS NULL AND EXISTS \
     (SELECT 1 FROM runs parent WHERE parent.id = child.parent_run_id AND parent.finished_at IS NOT NULL) LIMIT $1";

/// `$2`: now.
pub(super) const RELEASE: &str = "UPDATE runs SET status = 'queued', owner = NULL, available_at = $2 \
     WHERE status = 'running' AND owner = $1";

pub(super) const OWNED: &str = "SELECT id, epoch FROM runs WHERE status = 'running' AND owner = $1";

/// `$4`: the crashes to count, none or one; `$5`: now.
pub(super) const GIVE_BACK: &str = "UPDATE runs SET status = 'queued', owner = NULL, crash_count = crash_count + $4, \
     available_at = $5 + $4 * min(crash_count, 60) * 1000000 \
     WHERE status = 'running' AND owner = $1 AND id = $2 AND epoch = $3";

/// Runs that were asked to cancel while nobody drove them, whatever else they wait for.
pub(super) const CLAIM_CANCELLED: &str = "UPDATE runs SET status = 'running', owner = $1, epoch = epoch + 1, \
     available_at = NULL WHERE id IN (SELECT id FROM runs WHERE status = 'queued' \
     AND cancel_requested_at IS NOT NULL ORDER BY cancel_requested_at LIMIT $2) \
     RETURNING *, (SELECT body FROM definitions WHERE hash = definition_hash) AS definition";

/// Whether there are such runs.
pub(super) const ARE_CANCELLED: &str =
    "SELECT 1 FROM runs WHERE status = 'queued' AND cancel_requested_at IS NOT NULL LIMIT 1";

pub(super) const CANCEL_REQUESTS: &str = "SELECT id, cancel_reason FROM runs \
     WHERE status = 'running' AND owner = $1 AND cancel_requested_at IS NOT NULL";

/// A run that nobody drives is queued: whoever claims it ends it. No row: it has ended, or there is
/// no such run. `$4`: now.
pub(super) const REQUEST_CANCEL: &str = "UPDATE runs SET cancel_requested_at = COALESCE(cancel_requested_at, $4), \
     cancel_reason = COALESCE(cancel_reason, $3), \
     status = CASE WHEN status = 'running' THEN status ELSE 'queued' END, \
     available_at = CASE WHEN status <> 'running' THEN $4 END \
     WHERE tenant = $1 AND id = $2 AND finished_at IS NULL RETURNING *";

pub(super) const REGISTER: &str = "INSERT INTO replicas (id, started_at, heartbeat_at) VALUES ($1, $2, $2) \
     ON CONFLICT (id) DO UPDATE SET started_at = $2, heartbeat_at = $2, dead = 0";

pub(super) const HEARTBEAT: &str =
    "UPDATE replicas SET heartbeat_at = $2 WHERE id = $1 AND NOT dead";

/// `$1`: the replicas that live in this process.
pub(super) const BEAT: &str = "UPDATE replicas SET heartbeat_at = $2 WHERE NOT dead AND id IN (SELECT value FROM json_each($1))";

/// `$1`: the oldest heartbeat that is still good; `$2`: the replicas that live in this process.
pub(super) const BURY: &str = "UPDATE replicas SET dead = 1 \
     WHERE NOT dead AND id <> $3 AND (heartbeat_at < $1 OR id NOT IN (SELECT value FROM json_each($2)))";

/// Rows of replicas that nobody misses any more; `$1`: a day ago.
pub(super) const FORGET: &str = "DELETE FROM replicas WHERE dead AND heartbeat_at < $1";

/// What becomes of the run is decided by whoever claims it; `$1`: now.
pub(super) const REQUEUE_ORPHANS: &str = "UPDATE runs SET status = 'queued', owner = NULL, available_at = $1, \
     crash_count = crash_count + 1 WHERE status = 'running' \
     AND owner NOT IN (SELECT id FROM replicas WHERE NOT dead) RETURNING id";

/// When a bucket will be full if nothing is taken now. What is further than any clock or wait
/// explains, because the limit was changed or a clock set back, is brought near again.
macro_rules! full {
    () => {
        "max(min(l.tat, excluded.at + $3 + 10000000000), excluded.at)"
    };
}

/// What it gives of the tokens asked for.
macro_rules! given {
    () => {
        concat!("min($4, max(0, ($3 - (", full!(), " - excluded.at)) / $2))")
    };
}

/// `$2` is the time in which a token comes back, `$3` that in which a bucket fills, `$4` the tokens
/// asked for; `$5` is now.
pub(super) const TAKE_TOKENS: &str = concat!(
    "INSERT INTO rate_limits AS l (key, at, granted, tat) \
     VALUES ($1, $5, min($4, $3 / $2), $5 + min($4, $3 / $2) * $2) \
     ON CONFLICT (key) DO UPDATE SET at = excluded.at, granted = ",
    given!(),
    ", tat = ",
    full!(),
    " + $2 * ",
    given!(),
    " RETURNING at, tat, granted"
);

const APPROVALS: &str = "SELECT * FROM (SELECT *, call_id AS id, \
     (SELECT agent FROM runs WHERE runs.id = approvals.run_id) AS agent FROM approvals) AS asked";
