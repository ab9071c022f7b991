-- The journal (run_events) is the truth; iterations and tool_calls are made from it in the same
-- transaction and point back to it by seq instead of copying payloads.
-- Free text and documents are `json`, not `jsonb`: the exact bytes matter, and `jsonb` refuses \u0000.

CREATE TABLE replicas (
    id           text        PRIMARY KEY,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    dead         boolean     NOT NULL DEFAULT false
);

-- What runs execute, stored once per distinct text.
CREATE TABLE definitions (
    hash       text        PRIMARY KEY,
    body       text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What never changes comes first, so that the WAL of an update leaves it out; the fill factor
-- leaves room for new versions on the same page.
CREATE TABLE runs (
    id                  uuid        PRIMARY KEY,
    created_at          timestamptz NOT NULL,
    deadline_at         timestamptz,
    parent_run_id       uuid,
    tenant              text        NOT NULL,
    subject             text        NOT NULL,
    scopes              json        NOT NULL,
    agent               text        NOT NULL,
    agent_version       text        NOT NULL,
    definition_hash     text        NOT NULL,
    kind                text        NOT NULL CHECK (kind IN ('single', 'iterative')),
    session_id          text,
    inputs              json        NOT NULL,
    overrides           json        NOT NULL,
    metadata            jsonb       NOT NULL,
    idempotency_key     text,
    request_hash        bytea,
    engine_version      text,

    epoch               bigint      NOT NULL,
    next_seq            bigint      NOT NULL,
    attempts            bigint      NOT NULL DEFAULT 0,
    iterations          bigint      NOT NULL DEFAULT 0,
    tool_calls_made     bigint      NOT NULL DEFAULT 0,
    input_tokens        bigint      NOT NULL DEFAULT 0,
    output_tokens       bigint      NOT NULL DEFAULT 0,
    cached_input_tokens bigint      NOT NULL DEFAULT 0,
    cache_write_tokens  bigint      NOT NULL DEFAULT 0,
    reasoning_tokens    bigint      NOT NULL DEFAULT 0,
    cost_micro_usd      bigint,
    crash_count         bigint      NOT NULL DEFAULT 0,
    latency_ms          bigint,
    available_at        timestamptz,
    started_at          timestamptz,
    finished_at         timestamptz,
    cancel_requested_at timestamptz,
    estimated           boolean     NOT NULL DEFAULT false,
    partial             boolean     NOT NULL DEFAULT false,
    status              text        NOT NULL CHECK (status IN ('queued', 'running', 'awaiting_approval',
                            'awaiting_tool_results', 'needs_review', 'completed', 'failed', 'cancelled')),
    owner               text,
    model               text,
    cancel_reason       text,
    termination_reason  text,
    tools_used          json,
    warnings            json,
    callback_errors     json,
    error               json,
    output              json,
    raw_response        text,

    CONSTRAINT running_has_owner CHECK ((status = 'running') = (owner IS NOT NULL)),
    CONSTRAINT ended_has_time CHECK ((status IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)),
    CONSTRAINT queued_has_turn CHECK ((status = 'queued') = (available_at IS NOT NULL)),
    CONSTRAINT completed_has_output CHECK (status <> 'completed' OR output IS NOT NULL),
    CONSTRAINT failed_has_error CHECK (status NOT IN ('failed', 'cancelled') OR error IS NOT NULL)
) WITH (fillfactor = 60);

-- A run that simply completes enters three of these: the two lists, and runs_owned while it runs.
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
CREATE INDEX runs_by_metadata ON runs USING gin (metadata jsonb_path_ops) WHERE metadata <> '{}';
CREATE UNIQUE INDEX runs_by_idempotency_key ON runs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE run_events (
    run_id uuid        NOT NULL,
    seq    bigint      NOT NULL CHECK (seq > 0),
    epoch  bigint      NOT NULL,
    at     timestamptz NOT NULL,
    type   text        NOT NULL,
    data   json        NOT NULL,
    PRIMARY KEY (run_id, seq)
);

CREATE TABLE iterations (
    run_id              uuid        NOT NULL,
    attempt             bigint      NOT NULL,
    number              bigint      NOT NULL,
    seq                 bigint      NOT NULL,
    started_at          timestamptz NOT NULL,
    latency_ms          bigint      NOT NULL,
    retries             bigint      NOT NULL,
    input_tokens        bigint      NOT NULL,
    output_tokens       bigint      NOT NULL,
    cached_input_tokens bigint      NOT NULL,
    cache_write_tokens  bigint      NOT NULL,
    reasoning_tokens    bigint      NOT NULL,
    cost_micro_usd      bigint,
    estimated           boolean     NOT NULL,
    fallback            boolean     NOT NULL,
    provider            text        NOT NULL,
    model               text        NOT NULL,
    finish_reason       text        NOT NULL,
    PRIMARY KEY (run_id, attempt, number)
);

-- Arguments are in the event proposed_seq, at position ordinal; the result is in the event result_seq.
CREATE TABLE tool_calls (
    run_id       uuid        NOT NULL,
    call_id      uuid        NOT NULL,
    attempt      bigint      NOT NULL,
    iteration    bigint      NOT NULL,
    ordinal      bigint      NOT NULL,
    proposed_seq bigint      NOT NULL,
    result_seq   bigint,
    started_at   timestamptz,
    finished_at  timestamptz,
    duration_ms  bigint,
    is_error     boolean     NOT NULL,
    cached       boolean     NOT NULL,
    state        text        NOT NULL CHECK (state IN ('proposed', 'denied', 'awaiting_approval', 'awaiting_client',
                     'dispatched', 'succeeded', 'failed', 'unknown', 'cancelled')),
    tool         text        NOT NULL,
    effect       text        CHECK (effect IN ('read', 'idempotent', 'once')),
    decision     text,
    reason       text,
    PRIMARY KEY (run_id, call_id)
);

-- The key is also the order of the list.
CREATE TABLE audit_log (
    tenant      text        NOT NULL,
    at          timestamptz NOT NULL,
    id          uuid        NOT NULL,
    run_id      uuid        NOT NULL,
    call_id     uuid        NOT NULL,
    duration_ms bigint,
    subject     text        NOT NULL,
    tool        text        NOT NULL,
    rule        text        NOT NULL,
    decision    text        NOT NULL,
    reason      text,
    outcome     text        NOT NULL,
    arguments   text        NOT NULL,
    PRIMARY KEY (tenant, at, id)
);
CREATE INDEX audit_by_run ON audit_log (run_id);
CREATE INDEX audit_refused ON audit_log (tenant, decision, at DESC, id DESC) WHERE decision <> 'allowed';

CREATE TABLE api_keys (
    id                    text        PRIMARY KEY,
    tenant                text        NOT NULL,
    name                  text        NOT NULL,
    scopes                json        NOT NULL,
    secret_hash           bytea       NOT NULL,
    created_at            timestamptz NOT NULL,
    expires_at            timestamptz,
    revoked_at            timestamptz,
    rate_limit_per_minute bigint,
    rate_limit_burst      bigint
);
CREATE INDEX api_keys_listed ON api_keys (tenant, created_at DESC, id DESC);
