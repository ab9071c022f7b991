-- The same tables as in migrations/postgres, which explains them. Times are microseconds since
-- 1970 UTC, ids are lower-case text, documents are JSON text.

CREATE TABLE replicas (
    id           TEXT    PRIMARY KEY NOT NULL,
    started_at   INTEGER NOT NULL,
    heartbeat_at INTEGER NOT NULL,
    dead         INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE definitions (
    hash       TEXT    PRIMARY KEY NOT NULL,
    body       TEXT    NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE runs (
    id                  TEXT    PRIMARY KEY NOT NULL,
    created_at          INTEGER NOT NULL,
    deadline_at         INTEGER,
    parent_run_id       TEXT,
    tenant              TEXT    NOT NULL,
    subject             TEXT    NOT NULL,
    scopes              TEXT    NOT NULL,
    agent               TEXT    NOT NULL,
    agent_version       TEXT    NOT NULL,
    definition_hash     TEXT    NOT NULL,
    kind                TEXT    NOT NULL CHECK (kind IN ('single', 'iterative')),
    session_id          TEXT,
    inputs              TEXT    NOT NULL,
    overrides           TEXT    NOT NULL,
    metadata            TEXT    NOT NULL,
    idempotency_key     TEXT,
    request_hash        BLOB,
    engine_version      TEXT,

    epoch               INTEGER NOT NULL,
    next_seq            INTEGER NOT NULL,
    attempts            INTEGER NOT NULL DEFAULT 0,
    iterations          INTEGER NOT NULL DEFAULT 0,
    tool_calls_made     INTEGER NOT NULL DEFAULT 0,
    input_tokens        INTEGER NOT NULL DEFAULT 0,
    output_tokens       INTEGER NOT NULL DEFAULT 0,
    cached_input_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens  INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens    INTEGER NOT NULL DEFAULT 0,
    cost_micro_usd      INTEGER,
    crash_count         INTEGER NOT NULL DEFAULT 0,
    latency_ms          INTEGER,
    available_at        INTEGER,
    started_at          INTEGER,
    finished_at         INTEGER,
    cancel_requested_at INTEGER,
    estimated           INTEGER NOT NULL DEFAULT 0,
    partial             INTEGER NOT NULL DEFAULT 0,
    status              TEXT    NOT NULL CHECK (status IN ('queued', 'running', 'awaiting_approval',
                            'awaiting_tool_results', 'needs_review', 'completed', 'failed', 'cancelled')),
    owner               TEXT,
    model               TEXT,
    cancel_reason       TEXT,
    termination_reason  TEXT,
    tools_used          TEXT,
    warnings            TEXT,
    callback_errors     TEXT,
    error               TEXT,
    output              TEXT,
    raw_response        TEXT,

    CONSTRAINT running_has_owner CHECK ((status = 'running') = (owner IS NOT NULL)),
    CONSTRAINT ended_has_time CHECK ((status IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)),
    CONSTRAINT queued_has_turn CHECK ((status = 'queued') = (available_at IS NOT NULL)),
    CONSTRAINT completed_has_output CHECK (status <> 'completed' OR output IS NOT NULL),
    CONSTRAINT failed_has_error CHECK (status NOT IN ('failed', 'cancelled') OR error IS NOT NULL)
) STRICT;

CREATE INDEX runs_listed ON runs (tenant, created_at DESC, id DESC);
CREATE INDEX runs_by_agent ON runs (tenant, agent, created_at DESC, id DESC);
CREATE INDEX runs_owned ON runs (owner) WHERE status = 'running';
CREATE INDEX runs_queue ON runs (available_at, id) WHERE status = 'queued';
CREATE INDEX runs_by_status ON runs (tenant, status, created_at DESC, id DESC)
    WHERE status IN ('queued', 'awaiting_approval', 'awaiting_tool_results', 'needs_review', 'failed', 'cancelled');
CREATE INDEX runs_by_reason ON runs (tenant, termination_reason, created_at DESC, id DESC)
    WHERE termination_reason <> 'completed';
CREATE INDEX runs_by_session ON runs (tenant, session_id, created_at DESC, id DESC) WHERE session_id IS NOT NULL;
CREATE INDEX runs_by_parent ON runs (tenant, parent_run_id, created_at DESC, id DESC) WHERE parent_run_id IS NOT NULL;
CREATE UNIQUE INDEX runs_by_idempotency_key ON runs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE run_events (
    run_id TEXT    NOT NULL,
    seq    INTEGER NOT NULL CHECK (seq > 0),
    epoch  INTEGER NOT NULL,
    at     INTEGER NOT NULL,
    type   TEXT    NOT NULL,
    data   TEXT    NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT;

CREATE TABLE iterations (
    run_id              TEXT    NOT NULL,
    attempt             INTEGER NOT NULL,
    number              INTEGER NOT NULL,
    seq                 INTEGER NOT NULL,
    started_at          INTEGER NOT NULL,
    latency_ms          INTEGER NOT NULL,
    retries             INTEGER NOT NULL,
    input_tokens        INTEGER NOT NULL,
    output_tokens       INTEGER NOT NULL,
    cached_input_tokens INTEGER NOT NULL,
    cache_write_tokens  INTEGER NOT NULL,
    reasoning_tokens    INTEGER NOT NULL,
    cost_micro_usd      INTEGER,
    estimated           INTEGER NOT NULL,
    fallback            INTEGER NOT NULL,
    provider            TEXT    NOT NULL,
    model               TEXT    NOT NULL,
    finish_reason       TEXT    NOT NULL,
    PRIMARY KEY (run_id, attempt, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE tool_calls (
    run_id       TEXT    NOT NULL,
    call_id      TEXT    NOT NULL,
    attempt      INTEGER NOT NULL,
    iteration    INTEGER NOT NULL,
    ordinal      INTEGER NOT NULL,
    proposed_seq INTEGER NOT NULL,
    result_seq   INTEGER,
    started_at   INTEGER,
    finished_at  INTEGER,
    duration_ms  INTEGER,
    is_error     INTEGER NOT NULL,
    cached       INTEGER NOT NULL,
    state        TEXT    NOT NULL CHECK (state IN ('proposed', 'denied', 'awaiting_approval', 'awaiting_client',
                     'dispatched', 'succeeded', 'failed', 'unknown', 'cancelled')),
    tool         TEXT    NOT NULL,
    effect       TEXT    CHECK (effect IN ('read', 'idempotent', 'once')),
    decision     TEXT,
    reason       TEXT,
    PRIMARY KEY (run_id, call_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit_log (
    tenant      TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    id          TEXT    NOT NULL,
    run_id      TEXT    NOT NULL,
    call_id     TEXT    NOT NULL,
    duration_ms INTEGER,
    subject     TEXT    NOT NULL,
    tool        TEXT    NOT NULL,
    rule        TEXT    NOT NULL,
    decision    TEXT    NOT NULL,
    reason      TEXT,
    outcome     TEXT    NOT NULL,
    arguments   TEXT    NOT NULL,
    PRIMARY KEY (tenant, at, id)
) STRICT;
CREATE INDEX audit_by_run ON audit_log (run_id);
CREATE INDEX audit_refused ON audit_log (tenant, decision, at DESC, id DESC) WHERE decision <> 'allowed';

CREATE TABLE api_keys (
    id                    TEXT    PRIMARY KEY NOT NULL,
    tenant                TEXT    NOT NULL,
    name                  TEXT    NOT NULL,
    scopes                TEXT    NOT NULL,
    secret_hash           BLOB    NOT NULL,
    created_at            INTEGER NOT NULL,
    expires_at            INTEGER,
    revoked_at            INTEGER,
    rate_limit_per_minute INTEGER,
    rate_limit_burst      INTEGER
) STRICT;
CREATE INDEX api_keys_listed ON api_keys (tenant, created_at DESC, id DESC);
