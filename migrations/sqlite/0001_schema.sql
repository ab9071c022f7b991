-- The same tables as in migrations/postgres, which explains them. Times are microseconds since
-- 1970 UTC, ids are lower-case text, documents are JSON text, booleans 0 or 1.

CREATE TABLE replicas (
    id           TEXT    PRIMARY KEY NOT NULL,
    lease        INTEGER NOT NULL,
    started_at   INTEGER NOT NULL,
    heartbeat_at INTEGER NOT NULL,
    dead         INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE definitions (
    hash    TEXT    PRIMARY KEY NOT NULL,
    body    TEXT    NOT NULL,
    used_at INTEGER NOT NULL
) STRICT;

CREATE TABLE runs (
    id                  TEXT    PRIMARY KEY NOT NULL,
    created_at          INTEGER NOT NULL,
    parent_run_id       TEXT,
    tenant              TEXT    NOT NULL,
    subject             TEXT    NOT NULL,
    scopes              TEXT,
    agent               TEXT    NOT NULL,
    agent_version       TEXT    NOT NULL,
    engine_version      TEXT    NOT NULL,
    format              INTEGER NOT NULL,
    definition_hash     TEXT    NOT NULL,
    kind                TEXT    NOT NULL,
    session_id          TEXT,
    inputs              TEXT    NOT NULL,
    overrides           TEXT    NOT NULL,
    metadata            TEXT    NOT NULL,
    idempotency_key     TEXT,
    request_hash        TEXT,
    traceparent         TEXT,
    webhook             TEXT,
    session_place       TEXT,
    session_turn        INTEGER,
    priority            INTEGER NOT NULL DEFAULT 0,
    delayed             INTEGER NOT NULL DEFAULT 0,

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
    waited_ms           INTEGER NOT NULL DEFAULT 0,
    latency_ms          INTEGER,
    available_at        INTEGER,
    started_at          INTEGER,
    finished_at         INTEGER,
    waiting_since       INTEGER,
    cancel_requested_at INTEGER,
    estimated           INTEGER NOT NULL DEFAULT 0,
    partial             INTEGER NOT NULL DEFAULT 0,
    mixed_usage         INTEGER NOT NULL DEFAULT 0,
    status              TEXT    NOT NULL,
    owner               TEXT,
    model               TEXT,
    cancel_reason       TEXT,
    termination_reason  TEXT,
    tools_used          TEXT,
    warnings            TEXT,
    labels              TEXT,
    consumption         TEXT,
    error               TEXT,

    CONSTRAINT status_fits CHECK (
        (status = 'running') = (owner IS NOT NULL)
        AND (status = 'queued') = (available_at IS NOT NULL)
        AND (status IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)
    )
) STRICT;

CREATE INDEX runs_listed ON runs (tenant, created_at DESC, id DESC);
CREATE INDEX runs_by_agent ON runs (tenant, agent, created_at DESC, id DESC);
CREATE INDEX runs_owned ON runs (owner, tenant) WHERE status = 'running';
CREATE INDEX runs_by_status ON runs (tenant, status, created_at DESC, id DESC)
    WHERE status IN ('queued', 'awaiting_approval', 'awaiting_tool_results', 'needs_review', 'failed', 'cancelled');
CREATE INDEX runs_by_reason ON runs (tenant, termination_reason, created_at DESC, id DESC)
    WHERE termination_reason <> 'completed';
-- With the parent, so that child runs are passed over without their rows.
CREATE INDEX runs_by_session ON runs (tenant, session_id, created_at DESC, id DESC, parent_run_id)
    WHERE session_id IS NOT NULL;
CREATE INDEX runs_by_parent ON runs (tenant, parent_run_id, created_at DESC, id DESC) WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_mixed_usage ON runs (tenant, created_at) WHERE mixed_usage;
CREATE UNIQUE INDEX runs_idempotency ON runs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE INDEX runs_queue ON runs (available_at, id)
    WHERE status = 'queued' AND (session_place IS NULL OR session_place = 'holds') AND NOT delayed;
CREATE INDEX runs_queue_by_tenant ON runs (tenant, priority DESC, available_at, id)
    WHERE status = 'queued' AND (session_place IS NULL OR session_place = 'holds') AND NOT delayed;
CREATE INDEX runs_session_waiting ON runs (tenant, session_id, session_place, available_at, id)
    WHERE status = 'queued' AND session_place <> 'holds';
CREATE INDEX runs_delayed ON runs (available_at) WHERE status = 'queued' AND delayed;
CREATE INDEX runs_begun ON runs (available_at, id) WHERE status = 'queued' AND started_at IS NOT NULL;
CREATE INDEX runs_to_cancel ON runs (cancel_requested_at) WHERE status = 'queued' AND cancel_requested_at IS NOT NULL;
CREATE UNIQUE INDEX runs_session_held ON runs (tenant, session_id) WHERE session_place = 'holds' AND finished_at IS NULL;
CREATE UNIQUE INDEX runs_session_turn ON runs (tenant, session_id, session_turn) WHERE session_turn IS NOT NULL;
CREATE INDEX runs_children ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL AND finished_at IS NULL;

-- Sessions, for their lists; triggers keep the rows. Child runs do not count.
CREATE TABLE sessions (
    tenant      TEXT    NOT NULL,
    session_id  TEXT    NOT NULL,
    agent       TEXT    NOT NULL,
    last_run_at INTEGER NOT NULL,
    last_run_id TEXT    NOT NULL,
    created_at  INTEGER NOT NULL,
    run_count   INTEGER NOT NULL,
    PRIMARY KEY (tenant, session_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_listed ON sessions (tenant, last_run_at DESC, last_run_id DESC);
CREATE INDEX sessions_by_agent ON sessions (tenant, agent, last_run_at DESC, last_run_id DESC);
CREATE TRIGGER add_run_to_session AFTER INSERT ON runs
WHEN new.session_id IS NOT NULL AND new.parent_run_id IS NULL BEGIN
    INSERT INTO sessions (tenant, session_id, agent, last_run_at, last_run_id, created_at, run_count)
    VALUES (new.tenant, new.session_id, new.agent, new.created_at, new.id, new.created_at, 1)
    ON CONFLICT (tenant, session_id) DO UPDATE SET
        run_count = run_count + 1,
        created_at = min(created_at, excluded.created_at),
        agent = CASE WHEN (excluded.last_run_at, excluded.last_run_id) > (last_run_at, last_run_id)
            THEN excluded.agent ELSE agent END,
        last_run_at = max(last_run_at, excluded.last_run_at),
        last_run_id = CASE WHEN (excluded.last_run_at, excluded.last_run_id) > (last_run_at, last_run_id)
            THEN excluded.last_run_id ELSE last_run_id END;
END;
CREATE TRIGGER remove_run_from_session AFTER DELETE ON runs
WHEN old.session_id IS NOT NULL AND old.parent_run_id IS NULL BEGIN
    UPDATE sessions SET run_count = run_count - 1 WHERE tenant = old.tenant AND session_id = old.session_id;
    DELETE FROM sessions WHERE tenant = old.tenant AND session_id = old.session_id AND run_count <= 0;
    UPDATE sessions SET created_at = (SELECT r.created_at FROM runs r WHERE r.tenant = old.tenant
        AND r.session_id = old.session_id AND r.parent_run_id IS NULL ORDER BY r.created_at, r.id LIMIT 1)
    WHERE tenant = old.tenant AND session_id = old.session_id AND created_at = old.created_at;
    UPDATE sessions SET (agent, last_run_at, last_run_id) = (SELECT r.agent, r.created_at, r.id FROM runs r
        WHERE r.tenant = old.tenant AND r.session_id = old.session_id AND r.parent_run_id IS NULL
        ORDER BY r.created_at DESC, r.id DESC LIMIT 1)
    WHERE tenant = old.tenant AND session_id = old.session_id AND last_run_id = old.id;
END;

-- The labels of runs, one a row, which triggers keep. PostgreSQL has an index of documents instead.
CREATE TABLE run_labels (
    tenant     TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    value      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    run_id     TEXT    NOT NULL,
    PRIMARY KEY (tenant, key, value, created_at, run_id)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER run_added AFTER INSERT ON runs WHEN new.metadata <> '{}' BEGIN
    INSERT INTO run_labels (tenant, key, value, created_at, run_id)
    SELECT new.tenant, m.key, m.value, new.created_at, new.id FROM json_each(new.metadata) AS m;
END;
CREATE TRIGGER run_deleted AFTER DELETE ON runs WHEN old.metadata <> '{}' BEGIN
    DELETE FROM run_labels WHERE tenant = old.tenant AND created_at = old.created_at AND run_id = old.id
    AND (key, value) IN (SELECT m.key, m.value FROM json_each(old.metadata) AS m);
END;

CREATE TABLE run_events (
    run_id    TEXT    NOT NULL,
    seq       INTEGER NOT NULL,
    first_seq INTEGER NOT NULL,
    epoch     INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    events    TEXT    NOT NULL,
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
    repeated            INTEGER NOT NULL,
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
    approval_seq INTEGER,
    result_seq   INTEGER,
    started_at   INTEGER,
    finished_at  INTEGER,
    duration_ms  INTEGER,
    is_error     INTEGER NOT NULL,
    cached       INTEGER NOT NULL,
    state        TEXT    NOT NULL,
    tool         TEXT    NOT NULL,
    effect       TEXT,
    decision     TEXT,
    reason       TEXT,
    PRIMARY KEY (run_id, call_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit_log (
    tenant      TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    id          TEXT    NOT NULL,
    -- Of a record that was written late: when the decision was made. `at` is then when it was written.
    decided_at  INTEGER,
    action      TEXT    NOT NULL,
    run_id      TEXT,
    call_id     TEXT,
    duration_ms INTEGER,
    result_bytes INTEGER,
    subject     TEXT    NOT NULL,
    tool        TEXT,
    rule        TEXT,
    decision    TEXT    NOT NULL,
    reason      TEXT,
    outcome     TEXT    NOT NULL,
    arguments   TEXT    NOT NULL,
    labels      TEXT,
    definition_hash TEXT,
    pattern     TEXT,
    agent       TEXT,
    session_id  TEXT,
    PRIMARY KEY (tenant, at, id)
) STRICT;
CREATE INDEX audit_by_run ON audit_log (run_id) WHERE run_id IS NOT NULL;
CREATE INDEX audit_acts ON audit_log (tenant, action, at DESC, id DESC) WHERE action <> 'tool_call';
CREATE INDEX audit_by_tool ON audit_log (tenant, tool, at DESC, id DESC);
CREATE INDEX audit_by_agent ON audit_log (tenant, agent, at DESC, id DESC) WHERE agent IS NOT NULL;
CREATE INDEX audit_by_session ON audit_log (tenant, session_id, at DESC, id DESC) WHERE session_id IS NOT NULL;
CREATE INDEX audit_by_subject ON audit_log (tenant, subject, at DESC, id DESC);
CREATE INDEX audit_by_outcome ON audit_log (tenant, outcome, at DESC, id DESC) WHERE outcome <> 'succeeded';
CREATE INDEX audit_refused ON audit_log (tenant, decision, at DESC, id DESC) WHERE decision <> 'allowed';
CREATE INDEX audit_by_rule ON audit_log (tenant, rule, at DESC, id DESC) WHERE rule <> 'none';

CREATE TABLE audit_stretches (
    tenant    TEXT    NOT NULL,
    number    INTEGER NOT NULL,
    first_at  INTEGER NOT NULL,
    last_at   INTEGER NOT NULL,
    closed_at INTEGER NOT NULL,
    records   INTEGER NOT NULL,
    members   BLOB    NOT NULL,
    previous  BLOB    NOT NULL,
    hash      BLOB    NOT NULL,
    signature BLOB,
    PRIMARY KEY (tenant, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX audit_stretches_by_age ON audit_stretches (tenant, last_at);

CREATE TABLE usage_added (
    id                  INTEGER PRIMARY KEY,
    tenant              TEXT    NOT NULL,
    hour                INTEGER NOT NULL,
    agent               TEXT    NOT NULL,
    model               TEXT    NOT NULL,
    runs                INTEGER NOT NULL,
    input_tokens        INTEGER NOT NULL,
    output_tokens       INTEGER NOT NULL,
    cached_input_tokens INTEGER NOT NULL,
    cache_write_tokens  INTEGER NOT NULL,
    reasoning_tokens    INTEGER NOT NULL,
    cost_micro_usd      INTEGER,
    estimated           INTEGER NOT NULL
) STRICT;

CREATE TABLE usage_sums (
    tenant              TEXT    NOT NULL,
    span                TEXT    NOT NULL,
    at                  INTEGER NOT NULL,
    agent               TEXT    NOT NULL,
    model               TEXT    NOT NULL,
    runs                INTEGER NOT NULL,
    input_tokens        INTEGER NOT NULL,
    output_tokens       INTEGER NOT NULL,
    cached_input_tokens INTEGER NOT NULL,
    cache_write_tokens  INTEGER NOT NULL,
    reasoning_tokens    INTEGER NOT NULL,
    cost_micro_usd      INTEGER,
    estimated           INTEGER NOT NULL,
    PRIMARY KEY (tenant, span, at, agent, model)
) STRICT, WITHOUT ROWID;

CREATE TABLE past_usage (
    tenant              TEXT    NOT NULL,
    hour                INTEGER NOT NULL,
    agent               TEXT    NOT NULL,
    model               TEXT    NOT NULL,
    runs                INTEGER NOT NULL,
    input_tokens        INTEGER NOT NULL,
    output_tokens       INTEGER NOT NULL,
    cached_input_tokens INTEGER NOT NULL,
    cache_write_tokens  INTEGER NOT NULL,
    reasoning_tokens    INTEGER NOT NULL,
    cost_micro_usd      INTEGER,
    estimated           INTEGER NOT NULL,
    PRIMARY KEY (tenant, hour, agent, model)
) STRICT, WITHOUT ROWID;

CREATE TABLE approvals (
    run_id          TEXT    NOT NULL,
    seq             INTEGER NOT NULL,
    call_id         TEXT    NOT NULL,
    tenant          TEXT    NOT NULL,
    at              INTEGER NOT NULL,
    expires_at      INTEGER,
    kind            TEXT    NOT NULL,
    tool            TEXT    NOT NULL,
    reason          TEXT    NOT NULL,
    -- The child run whose end is waited for.
    child_run_id    TEXT,
    status          TEXT    NOT NULL,
    decided_at      INTEGER,
    decided_by      TEXT,
    decision_reason TEXT,
    -- What can be large comes last, so that nothing is read behind it, and the table has row ids:
    -- without them a search reads whole rows to compare their keys.
    -- What a tool asks for in the middle of a call, without what it wants to have back.
    input           TEXT,
    resolution      TEXT,
    arguments       TEXT    NOT NULL,
    PRIMARY KEY (run_id, seq),
    CONSTRAINT answer_fits CHECK ((status IN ('pending', 'void')) = (resolution IS NULL))
) STRICT;
CREATE INDEX approvals_listed ON approvals (tenant, status, at DESC, call_id DESC);
CREATE INDEX approvals_due ON approvals (expires_at) WHERE status = 'pending';
CREATE INDEX approvals_of_parents ON approvals (child_run_id) WHERE status = 'pending' AND child_run_id IS NOT NULL;

CREATE TABLE webhook_outbox (
    run_id          TEXT    NOT NULL,
    seq             INTEGER NOT NULL,
    id              TEXT    NOT NULL,
    tenant          TEXT    NOT NULL,
    lane            TEXT    NOT NULL,
    event           TEXT    NOT NULL,
    at              INTEGER NOT NULL,
    status          TEXT    NOT NULL,
    due_at          INTEGER NOT NULL,
    retry_until     INTEGER NOT NULL,
    attempts        INTEGER NOT NULL,
    tries           INTEGER NOT NULL,
    attempted_at    INTEGER,
    response_status INTEGER,
    error           TEXT,
    asked_again     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX webhook_outbox_due ON webhook_outbox (lane, due_at) WHERE status = 'pending';
CREATE INDEX webhook_outbox_by_id ON webhook_outbox (id);
CREATE INDEX webhook_outbox_listed ON webhook_outbox (tenant, at DESC, id DESC);
CREATE INDEX webhook_outbox_by_status ON webhook_outbox (tenant, status, at DESC, id DESC) WHERE status <> 'delivered';

CREATE TABLE api_keys (
    id                    TEXT    PRIMARY KEY NOT NULL,
    tenant                TEXT    NOT NULL,
    name                  TEXT    NOT NULL,
    scopes                TEXT,
    secret_hash           BLOB    NOT NULL,
    created_at            INTEGER NOT NULL,
    created_by            TEXT,
    expires_at            INTEGER,
    revoked_at            INTEGER,
    last_used_at          INTEGER,
    rate_limit_per_minute INTEGER,
    rate_limit_burst      INTEGER
) STRICT;
CREATE INDEX api_keys_listed ON api_keys (tenant, created_at DESC, id DESC);
CREATE INDEX api_keys_by_creator ON api_keys (created_by) WHERE created_by IS NOT NULL;

CREATE TABLE secrets (
    name  TEXT PRIMARY KEY NOT NULL,
    value BLOB NOT NULL
) STRICT;

CREATE TABLE ended_tokens (
    id         TEXT    PRIMARY KEY NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE rate_limits (
    key     TEXT    PRIMARY KEY NOT NULL,
    tat     INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    granted INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE run_places (
    id              TEXT    PRIMARY KEY NOT NULL,
    tenant          TEXT    NOT NULL,
    subject         TEXT    NOT NULL,
    run_id          TEXT    NOT NULL,
    idempotency_key TEXT,
    owner           TEXT    NOT NULL,
    taken_at        INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX run_places_by_tenant ON run_places (tenant);

CREATE TABLE observations (
    id         INTEGER PRIMARY KEY,
    run_id     TEXT    NOT NULL,
    seq        INTEGER NOT NULL,
    tenant     TEXT    NOT NULL,
    agent      TEXT    NOT NULL,
    session_id TEXT,
    at         INTEGER NOT NULL,
    kind       TEXT    NOT NULL,
    content    TEXT    NOT NULL,
    labels     TEXT,
    UNIQUE (run_id, seq)
) STRICT;
CREATE INDEX observations_by_time ON observations (tenant, at, run_id, seq);
CREATE INDEX observations_by_agent ON observations (tenant, agent, at, run_id, seq);
CREATE INDEX observations_by_session ON observations (tenant, session_id, at, run_id, seq) WHERE session_id IS NOT NULL;

-- The index of words, which triggers keep.
CREATE VIRTUAL TABLE observation_words USING fts5 (content, content = 'observations', content_rowid = 'id', tokenize = 'porter unicode61 remove_diacritics 0');
CREATE TRIGGER observation_added AFTER INSERT ON observations BEGIN
    INSERT INTO observation_words (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER observation_deleted AFTER DELETE ON observations BEGIN
    INSERT INTO observation_words (observation_words, rowid, content) VALUES ('delete', old.id, old.content);
END;

CREATE TABLE budgets (
    root_run_id         TEXT    PRIMARY KEY NOT NULL,
    max_tokens          INTEGER,
    max_micro_usd       INTEGER,
    max_tool_calls      INTEGER NOT NULL,
    max_iterations      INTEGER NOT NULL,
    max_files           INTEGER NOT NULL,
    max_lines           INTEGER NOT NULL,
    max_requests        INTEGER,
    reserved_tokens     INTEGER NOT NULL DEFAULT 0,
    reserved_micro_usd  INTEGER NOT NULL DEFAULT 0,
    reserved_tool_calls INTEGER NOT NULL DEFAULT 0,
    reserved_iterations INTEGER NOT NULL DEFAULT 0,
    reserved_files      INTEGER NOT NULL DEFAULT 0,
    reserved_lines      INTEGER NOT NULL DEFAULT 0,
    reserved_requests   INTEGER NOT NULL DEFAULT 0,
    spent_tokens        INTEGER NOT NULL DEFAULT 0,
    spent_micro_usd     INTEGER NOT NULL DEFAULT 0,
    spent_tool_calls    INTEGER NOT NULL DEFAULT 0,
    spent_iterations    INTEGER NOT NULL DEFAULT 0,
    spent_files         INTEGER NOT NULL DEFAULT 0,
    spent_lines         INTEGER NOT NULL DEFAULT 0,
    spent_requests      INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE budget_holds (
    run_id              TEXT    NOT NULL,
    root_run_id         TEXT    NOT NULL,
    reserved_tokens     INTEGER NOT NULL DEFAULT 0,
    reserved_micro_usd  INTEGER NOT NULL DEFAULT 0,
    reserved_tool_calls INTEGER NOT NULL DEFAULT 0,
    reserved_iterations INTEGER NOT NULL DEFAULT 0,
    reserved_files      INTEGER NOT NULL DEFAULT 0,
    reserved_lines      INTEGER NOT NULL DEFAULT 0,
    reserved_requests   INTEGER NOT NULL DEFAULT 0,
    spent_tokens        INTEGER NOT NULL DEFAULT 0,
    spent_micro_usd     INTEGER NOT NULL DEFAULT 0,
    spent_tool_calls    INTEGER NOT NULL DEFAULT 0,
    spent_iterations    INTEGER NOT NULL DEFAULT 0,
    spent_files         INTEGER NOT NULL DEFAULT 0,
    spent_lines         INTEGER NOT NULL DEFAULT 0,
    spent_requests      INTEGER NOT NULL DEFAULT 0,
    ended               INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, root_run_id)
) STRICT;
CREATE INDEX budget_holds_open ON budget_holds (run_id) WHERE ended = 0;

CREATE TABLE workspaces (
    tenant  TEXT    PRIMARY KEY NOT NULL,
    version INTEGER NOT NULL,
    purged  INTEGER NOT NULL
) STRICT;

CREATE TABLE workspace_files (
    tenant      TEXT    NOT NULL,
    path        TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    object      TEXT,
    hash        TEXT,
    size        INTEGER,
    mode        INTEGER,
    modified_ns INTEGER,
    target      TEXT,
    version     INTEGER NOT NULL,
    write_id    TEXT,
    at          INTEGER NOT NULL,
    PRIMARY KEY (tenant, path)
) STRICT;
CREATE INDEX workspace_files_by_version ON workspace_files (tenant, version);
CREATE INDEX workspace_files_by_object ON workspace_files (object) WHERE object IS NOT NULL;
CREATE INDEX workspace_files_gone ON workspace_files (at) WHERE kind = 'gone';

CREATE TABLE workspace_objects (
    object  TEXT    PRIMARY KEY NOT NULL,
    tenant  TEXT    NOT NULL,
    hash    TEXT    NOT NULL,
    state   TEXT    NOT NULL,
    used_at INTEGER NOT NULL
) STRICT;
CREATE INDEX workspace_objects_by_hash ON workspace_objects (tenant, hash);
CREATE INDEX workspace_objects_unused ON workspace_objects (used_at) WHERE state <> 'stored';
