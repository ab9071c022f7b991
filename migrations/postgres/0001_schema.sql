-- The journal (run_events) is the truth; the other rows of a run are made from it in the same
-- transaction and point back to it by seq instead of copying payloads.
-- Documents are JSON as `text`: the exact bytes matter, they are written by us and not looked into.

CREATE TABLE replicas (
    id           text        PRIMARY KEY,
    -- For how many microseconds a heartbeat counts.
    lease        bigint      NOT NULL,
    started_at   timestamptz NOT NULL,
    heartbeat_at timestamptz NOT NULL,
    dead         boolean     NOT NULL DEFAULT false
);

-- What runs execute, stored once per distinct text. One may be deleted when no run refers to it and
-- none was started with it lately.
CREATE TABLE definitions (
    hash    text        PRIMARY KEY,
    body    text        NOT NULL,
    used_at timestamptz NOT NULL
);

-- What never changes comes first, so that the WAL of an update leaves it out; the fill factor
-- leaves room for new versions on the same page.
CREATE TABLE runs (
    id                  uuid        PRIMARY KEY,
    created_at          timestamptz NOT NULL,
    parent_run_id       uuid,
    tenant              text        NOT NULL,
    subject             text        NOT NULL,
    scopes              text,
    agent               text        NOT NULL,
    agent_version       text        NOT NULL,
    -- The version of the service that wrote the row's beginning.
    engine_version      text        NOT NULL,
    -- The newest format of a version that has owned the run: versions that cannot read it leave it alone.
    format              bigint      NOT NULL,
    definition_hash     text        NOT NULL,
    kind                text        NOT NULL,
    session_id          text,
    inputs              text        NOT NULL,
    overrides           text        NOT NULL,
    metadata            jsonb       NOT NULL,
    -- The caller's key for safe retries, and the hex SHA-256 of the request that it came with.
    idempotency_key     text,
    request_hash        text,
    -- The caller's W3C `traceparent` header.
    traceparent         text,
    -- Where events of the run are sent; a child run has its parent's.
    webhook             text,
    -- One run at a time per session. `holds`: the live run that has the session; `next`, `waits`:
    -- queued runs that wait for it, in the order of these names and then of acceptance. Absent for
    -- runs without a session and for those that another run delegated to.
    session_place       text,
    -- Runs that held a session are numbered 1, 2, 3 … in it, by the starter: where another was
    -- faster, even one that has ended since, the number is taken.
    session_turn        bigint,
    -- From -100 to 100, in the queue of its tenant: higher ones are taken first.
    priority            bigint      NOT NULL DEFAULT 0,
    -- Whether the time has yet to come before which its caller does not want it taken. Of runs
    -- without a session: in the line for a session they are behind those whose time has come.
    delayed             boolean     NOT NULL DEFAULT false,

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
    -- Of the time since started_at, what was waiting for people, callers and children.
    waited_ms           bigint      NOT NULL DEFAULT 0,
    latency_ms          bigint,
    available_at        timestamptz,
    started_at          timestamptz,
    finished_at         timestamptz,
    waiting_since       timestamptz,
    cancel_requested_at timestamptz,
    estimated           boolean     NOT NULL DEFAULT false,
    partial             boolean     NOT NULL DEFAULT false,
    -- Whether the usage above is more than that of one model's responses.
    mixed_usage         boolean     NOT NULL DEFAULT false,
    status              text        NOT NULL,
    owner               text,
    model               text,
    cancel_reason       text,
    termination_reason  text,
    tools_used          text,
    warnings            text,
    labels              text,
    -- What tool calls took of the run's budget: files, lines, commands, network requests.
    consumption         text,
    error               text,

    CONSTRAINT status_fits CHECK (
        (status = 'running') = (owner IS NOT NULL)
        AND (status = 'queued') = (available_at IS NOT NULL)
        AND (status IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)
    )
) WITH (fillfactor = 60);

-- A run that simply completes enters three of these: the two lists, and runs_owned while it runs.
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
CREATE INDEX runs_by_metadata ON runs USING gin (metadata jsonb_path_ops) WHERE metadata <> '{}';
CREATE INDEX runs_mixed_usage ON runs (tenant, created_at) WHERE mixed_usage;
CREATE UNIQUE INDEX runs_idempotency ON runs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- The queue, those that wait for their session, and those that were asked to cancel meanwhile.
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
-- Runs that other runs started and that have not ended: found by the run that waits for them, when
-- it is cancelled or has ended without them.
CREATE INDEX runs_children ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL AND finished_at IS NULL;

-- Sessions, for their lists: one with 20,000 runs is read like one with a single run. Triggers keep the rows, so
-- that they are right whichever version of the service starts or deletes a run. Child runs do not count.
CREATE TABLE sessions (
    tenant      text        NOT NULL,
    session_id  text        NOT NULL,
    -- Of the newest run, as are `last_run_at` and `last_run_id`.
    agent       text        NOT NULL,
    last_run_at timestamptz NOT NULL,
    last_run_id uuid        NOT NULL,
    -- When the oldest run that is left was accepted.
    created_at  timestamptz NOT NULL,
    run_count   bigint      NOT NULL,
    PRIMARY KEY (tenant, session_id)
) WITH (fillfactor = 60);
CREATE INDEX sessions_listed ON sessions (tenant, last_run_at DESC, last_run_id DESC);
CREATE INDEX sessions_by_agent ON sessions (tenant, agent, last_run_at DESC, last_run_id DESC);

CREATE FUNCTION add_run_to_session() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sessions AS s (tenant, session_id, agent, last_run_at, last_run_id, created_at, run_count)
    VALUES (NEW.tenant, NEW.session_id, NEW.agent, NEW.created_at, NEW.id, NEW.created_at, 1)
    ON CONFLICT (tenant, session_id) DO UPDATE SET
        run_count = s.run_count + 1,
        created_at = least(s.created_at, NEW.created_at),
        agent = CASE WHEN (NEW.created_at, NEW.id) > (s.last_run_at, s.last_run_id) THEN NEW.agent ELSE s.agent END,
        last_run_at = greatest(s.last_run_at, NEW.created_at),
        last_run_id = CASE WHEN (NEW.created_at, NEW.id) > (s.last_run_at, s.last_run_id) THEN NEW.id
            ELSE s.last_run_id END;
    RETURN NULL;
END
$$;
CREATE TRIGGER add_run_to_session AFTER INSERT ON runs FOR EACH ROW
    WHEN (NEW.session_id IS NOT NULL AND NEW.parent_run_id IS NULL) EXECUTE FUNCTION add_run_to_session();

CREATE FUNCTION remove_runs_from_sessions() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Locked in the order in which new runs lock them. DISTINCT keeps copies of whole runs out of the plan.
    PERFORM FROM sessions s WHERE (s.tenant, s.session_id) IN
        (SELECT DISTINCT d.tenant, d.session_id FROM deleted d
        WHERE d.session_id IS NOT NULL AND d.parent_run_id IS NULL)
        ORDER BY s.session_id COLLATE "C", s.tenant COLLATE "C" FOR UPDATE;
    UPDATE sessions s SET run_count = s.run_count - d.runs FROM
        (SELECT tenant, session_id, count(*) AS runs FROM deleted
        WHERE session_id IS NOT NULL AND parent_run_id IS NULL GROUP BY tenant, session_id) d
        WHERE s.tenant = d.tenant AND s.session_id = d.session_id;
    DELETE FROM sessions s WHERE s.run_count <= 0 AND (s.tenant, s.session_id) IN
        (SELECT DISTINCT d.tenant, d.session_id FROM deleted d
        WHERE d.session_id IS NOT NULL AND d.parent_run_id IS NULL);
    UPDATE sessions s SET created_at = o.created_at, agent = n.agent, last_run_at = n.created_at, last_run_id = n.id
        FROM (SELECT DISTINCT tenant, session_id FROM deleted
            WHERE session_id IS NOT NULL AND parent_run_id IS NULL) d
        CROSS JOIN LATERAL (SELECT r.agent, r.created_at, r.id FROM runs r WHERE r.tenant = d.tenant
            AND r.session_id = d.session_id AND r.parent_run_id IS NULL
            ORDER BY r.created_at DESC, r.id DESC LIMIT 1) n
        CROSS JOIN LATERAL (SELECT r.created_at FROM runs r WHERE r.tenant = d.tenant
            AND r.session_id = d.session_id AND r.parent_run_id IS NULL
            ORDER BY r.created_at, r.id LIMIT 1) o
        WHERE s.tenant = d.tenant AND s.session_id = d.session_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER remove_runs_from_sessions AFTER DELETE ON runs REFERENCING OLD TABLE AS deleted
    FOR EACH STATEMENT EXECUTE FUNCTION remove_runs_from_sessions();

-- One row a write of a run: the events first_seq to seq as a JSON array of {"at", "type", "data"}, at in microseconds.
CREATE TABLE run_events (
    run_id    uuid        NOT NULL,
    seq       bigint      NOT NULL,
    first_seq bigint      NOT NULL,
    epoch     bigint      NOT NULL,
    at        timestamptz NOT NULL,
    events    text        NOT NULL,
    PRIMARY KEY (run_id, seq)
) WITH (toast_tuple_target = 8160);

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
    -- The answer to an earlier call was lost; the columns above count that too, as an estimate.
    repeated            boolean     NOT NULL,
    provider            text        NOT NULL,
    model               text        NOT NULL,
    finish_reason       text        NOT NULL,
    PRIMARY KEY (run_id, attempt, number)
);

-- Arguments are in the event proposed_seq, at position ordinal, unless the event approval_seq has others; the result is in
-- the event result_seq.
CREATE TABLE tool_calls (
    run_id       uuid        NOT NULL,
    call_id      uuid        NOT NULL,
    attempt      bigint      NOT NULL,
    iteration    bigint      NOT NULL,
    ordinal      bigint      NOT NULL,
    proposed_seq bigint      NOT NULL,
    approval_seq bigint,
    result_seq   bigint,
    started_at   timestamptz,
    finished_at  timestamptz,
    duration_ms  bigint,
    is_error     boolean     NOT NULL,
    cached       boolean     NOT NULL,
    state        text        NOT NULL,
    tool         text        NOT NULL,
    effect       text,
    decision     text,
    reason       text,
    PRIMARY KEY (run_id, call_id)
);

-- Decisions on calls, and acts of administration, which have no call. Rows are only added; they outlive the runs that
-- they name. The key is also the order of the list.
CREATE TABLE audit_log (
    tenant      text        NOT NULL,
    at          timestamptz NOT NULL,
    id          uuid        NOT NULL,
    -- Of a record that was written late: when the decision was made. `at` is then when it was written.
    decided_at  timestamptz,
    action      text        NOT NULL,
    run_id      uuid,
    call_id     uuid,
    duration_ms bigint,
    result_bytes bigint,
    subject     text        NOT NULL,
    tool        text,
    rule        text,
    decision    text        NOT NULL,
    reason      text,
    outcome     text        NOT NULL,
    arguments   text        NOT NULL,
    labels      text,
    -- The definition that the run executes, and the pattern of it that decided.
    definition_hash text,
    pattern     text,
    -- Of the run, which may be deleted before its records are; or what an act was done to.
    agent       text,
    session_id  text,
    PRIMARY KEY (tenant, at, id)
);
CREATE INDEX audit_by_run ON audit_log (run_id) WHERE run_id IS NOT NULL;
CREATE INDEX audit_acts ON audit_log (tenant, action, at DESC, id DESC) WHERE action <> 'tool_call';
CREATE INDEX audit_by_tool ON audit_log (tenant, tool, at DESC, id DESC);
CREATE INDEX audit_by_agent ON audit_log (tenant, agent, at DESC, id DESC) WHERE agent IS NOT NULL;
CREATE INDEX audit_by_session ON audit_log (tenant, session_id, at DESC, id DESC) WHERE session_id IS NOT NULL;
CREATE INDEX audit_by_subject ON audit_log (tenant, subject, at DESC, id DESC);
CREATE INDEX audit_by_outcome ON audit_log (tenant, outcome, at DESC, id DESC) WHERE outcome <> 'succeeded';
CREATE INDEX audit_refused ON audit_log (tenant, decision, at DESC, id DESC) WHERE decision <> 'allowed';
CREATE INDEX audit_by_rule ON audit_log (tenant, rule, at DESC, id DESC) WHERE rule <> 'none';

-- Closed stretches of a tenant's audit log, 1, 2, 3 …: `members` are the ids of its records in their order, 16 bytes each;
-- `hash` is of those records and the hash of the stretch before it.
CREATE TABLE audit_stretches (
    tenant    text        NOT NULL,
    number    bigint      NOT NULL,
    first_at  timestamptz NOT NULL,
    last_at   timestamptz NOT NULL,
    closed_at timestamptz NOT NULL,
    records   bigint      NOT NULL,
    members   bytea       NOT NULL,
    previous  bytea       NOT NULL,
    hash      bytea       NOT NULL,
    signature bytea,
    PRIMARY KEY (tenant, number)
);
CREATE INDEX audit_stretches_by_age ON audit_stretches (tenant, last_at);

-- Sums of what models took for runs, by the hour in which the runs were accepted. A NULL cost is not known. `runs` are
-- those in which the model responded.

-- What commits have added since; moved to usage_sums soon.
CREATE TABLE usage_added (
    id                  bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant              text        NOT NULL,
    hour                timestamptz NOT NULL,
    agent               text        NOT NULL,
    -- provider/model
    model               text        NOT NULL,
    runs                bigint      NOT NULL,
    input_tokens        bigint      NOT NULL,
    output_tokens       bigint      NOT NULL,
    cached_input_tokens bigint      NOT NULL,
    cache_write_tokens  bigint      NOT NULL,
    reasoning_tokens    bigint      NOT NULL,
    cost_micro_usd      bigint,
    estimated           boolean     NOT NULL
);

-- `span`: an hour, or the day of that hour in UTC, which has the same sums; `at` is its beginning.
CREATE TABLE usage_sums (
    tenant              text        NOT NULL,
    span                text        NOT NULL,
    at                  timestamptz NOT NULL,
    agent               text        NOT NULL,
    model               text        NOT NULL,
    runs                bigint      NOT NULL,
    input_tokens        bigint      NOT NULL,
    output_tokens       bigint      NOT NULL,
    cached_input_tokens bigint      NOT NULL,
    cache_write_tokens  bigint      NOT NULL,
    reasoning_tokens    bigint      NOT NULL,
    cost_micro_usd      bigint,
    estimated           boolean     NOT NULL,
    PRIMARY KEY (tenant, span, at, agent, model)
);

-- The part of runs that were deleted.
CREATE TABLE past_usage (
    tenant              text        NOT NULL,
    hour                timestamptz NOT NULL,
    agent               text        NOT NULL,
    model               text        NOT NULL,
    runs                bigint      NOT NULL,
    input_tokens        bigint      NOT NULL,
    output_tokens       bigint      NOT NULL,
    cached_input_tokens bigint      NOT NULL,
    cache_write_tokens  bigint      NOT NULL,
    reasoning_tokens    bigint      NOT NULL,
    cost_micro_usd      bigint,
    estimated           boolean     NOT NULL,
    PRIMARY KEY (tenant, hour, agent, model)
);

-- What parked runs wait for, and what became of it. `seq` is the number of the event that asks.
-- `resolution` is the answer as the run that goes on reads it.
-- status: pending, then approved, denied, expired, answered, resolved; or void where the run ended first.
CREATE TABLE approvals (
    run_id          uuid        NOT NULL,
    seq             bigint      NOT NULL,
    call_id         uuid        NOT NULL,
    tenant          text        NOT NULL,
    at              timestamptz NOT NULL,
    expires_at      timestamptz,
    kind            text        NOT NULL,
    tool            text        NOT NULL,
    reason          text        NOT NULL,
    -- The child run whose end is waited for.
    child_run_id    uuid,
    status          text        NOT NULL,
    decided_at      timestamptz,
    decided_by      text,
    decision_reason text,
    -- What a tool asks for in the middle of a call, without what it wants to have back.
    input           text,
    resolution      text,
    arguments       text        NOT NULL,
    PRIMARY KEY (run_id, seq),
    CONSTRAINT answer_fits CHECK ((status IN ('pending', 'void')) = (resolution IS NULL))
);
CREATE INDEX approvals_listed ON approvals (tenant, status, at DESC, call_id DESC);
CREATE INDEX approvals_due ON approvals (expires_at) WHERE status = 'pending';
CREATE INDEX approvals_of_parents ON approvals (child_run_id) WHERE status = 'pending' AND child_run_id IS NOT NULL;

-- Events that receivers of webhooks are told, each written with its event; the body is made of the event when it is sent.
-- Rows of one lane, a tenant and a host, are sent within one bound.
-- status: pending, delivered, failed (given up), disabled (the receiver wants no more of this run).
CREATE TABLE webhook_outbox (
    run_id          uuid        NOT NULL,
    seq             bigint      NOT NULL,
    id              uuid        NOT NULL,
    tenant          text        NOT NULL,
    lane            text        NOT NULL,
    event           text        NOT NULL,
    at              timestamptz NOT NULL,
    status          text        NOT NULL,
    -- When it is sent next; while a replica sends it, when another may.
    due_at          timestamptz NOT NULL,
    -- No try begins later.
    retry_until     timestamptz NOT NULL,
    -- All tries, and those since it was first or last asked for.
    attempts        bigint      NOT NULL,
    tries           bigint      NOT NULL,
    attempted_at    timestamptz,
    response_status bigint,
    error           text,
    -- Whether its receiver, which answered 410, was asked for another delivery of this run since.
    asked_again     boolean     NOT NULL DEFAULT false,
    PRIMARY KEY (run_id, seq)
);
CREATE INDEX webhook_outbox_due ON webhook_outbox (lane, due_at) WHERE status = 'pending';
CREATE INDEX webhook_outbox_by_id ON webhook_outbox (id);
CREATE INDEX webhook_outbox_listed ON webhook_outbox (tenant, at DESC, id DESC);
CREATE INDEX webhook_outbox_by_status ON webhook_outbox (tenant, status, at DESC, id DESC) WHERE status <> 'delivered';

CREATE TABLE api_keys (
    id                    text        PRIMARY KEY,
    tenant                text        NOT NULL,
    name                  text        NOT NULL,
    scopes                text,
    secret_hash           bytea       NOT NULL,
    created_at            timestamptz NOT NULL,
    -- The key that created it; NULL for those that the service itself created.
    created_by            text,
    expires_at            timestamptz,
    revoked_at            timestamptz,
    last_used_at          timestamptz,
    rate_limit_per_minute bigint,
    rate_limit_burst      bigint
);
CREATE INDEX api_keys_listed ON api_keys (tenant, created_at DESC, id DESC);
CREATE INDEX api_keys_by_creator ON api_keys (created_by) WHERE created_by IS NOT NULL;

-- Random values that all replicas share, made by the first that needs them.
CREATE TABLE secrets (
    name  text  PRIMARY KEY,
    value bytea NOT NULL
);

-- Signed tokens that were ended before they expire, e.g. by signing out.
CREATE TABLE ended_tokens (
    id         uuid        PRIMARY KEY,
    expires_at timestamptz NOT NULL
);

-- Token buckets that all replicas share. A crash of the database empties this table, which leaves
-- every bucket full; that is worth not writing it to the WAL.
CREATE UNLOGGED TABLE rate_limits (
    key     text   PRIMARY KEY,
    -- Nanoseconds since 1970: when the bucket will be full again.
    tat     bigint NOT NULL,
    -- The last asking: when (as above), and how many tokens were given.
    at      bigint NOT NULL,
    granted bigint NOT NULL
) WITH (fillfactor = 50);

-- Places within the limits of tenants and keys, of runs that begin and are not stored yet: a run that is stored
-- as running has its place by that.
CREATE TABLE run_places (
    id              uuid        PRIMARY KEY,
    tenant          text        NOT NULL,
    subject         text        NOT NULL,
    run_id          uuid        NOT NULL,
    idempotency_key text,
    owner           text        NOT NULL,
    taken_at        timestamptz NOT NULL
);
CREATE INDEX run_places_by_tenant ON run_places (tenant);

-- What runs of agents with a memory said and did, in short, for later runs to recall: the event `seq` of a run in words.
-- `words` splits at punctuation as queries do, so that a path is found by its parts.
CREATE TABLE observations (
    run_id     uuid        NOT NULL,
    seq        bigint      NOT NULL,
    tenant     text        NOT NULL,
    agent      text        NOT NULL,
    session_id text,
    at         timestamptz NOT NULL,
    kind       text        NOT NULL,
    content    text        NOT NULL,
    labels     text,
    words      tsvector    GENERATED ALWAYS AS
        (to_tsvector('english', regexp_replace(content, '[[:punct:]]+', ' ', 'g'))) STORED,
    PRIMARY KEY (run_id, seq)
);
CREATE INDEX observations_by_time ON observations (tenant, at, run_id, seq);
CREATE INDEX observations_by_agent ON observations (tenant, agent, at, run_id, seq);
CREATE INDEX observations_by_session ON observations (tenant, session_id, at, run_id, seq) WHERE session_id IS NOT NULL;
CREATE INDEX observations_by_word ON observations USING gin (words);

-- The budget that a run, the root here, shares with all runs that it starts, and that those start: made when the first of
-- them starts. A child run has one of its own where its agent has own caps of tokens or dollars.
-- A NULL cap is none. What a call may take is reserved before it is made, and settled after it.
CREATE TABLE budgets (
    root_run_id         uuid   PRIMARY KEY,
    max_tokens          bigint,
    max_micro_usd       bigint,
    max_tool_calls      bigint NOT NULL,
    max_iterations      bigint NOT NULL,
    max_files           bigint NOT NULL,
    max_lines           bigint NOT NULL,
    max_requests        bigint,
    reserved_tokens     bigint NOT NULL DEFAULT 0,
    reserved_micro_usd  bigint NOT NULL DEFAULT 0,
    reserved_tool_calls bigint NOT NULL DEFAULT 0,
    reserved_iterations bigint NOT NULL DEFAULT 0,
    reserved_files      bigint NOT NULL DEFAULT 0,
    reserved_lines      bigint NOT NULL DEFAULT 0,
    reserved_requests   bigint NOT NULL DEFAULT 0,
    spent_tokens        bigint NOT NULL DEFAULT 0,
    spent_micro_usd     bigint NOT NULL DEFAULT 0,
    spent_tool_calls    bigint NOT NULL DEFAULT 0,
    spent_iterations    bigint NOT NULL DEFAULT 0,
    spent_files         bigint NOT NULL DEFAULT 0,
    spent_lines         bigint NOT NULL DEFAULT 0,
    spent_requests      bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- What a run has reserved in a budget now, and spent in all: a budget is the sum of its holds. A run has one in the budget
-- of each of its ancestors.
CREATE TABLE budget_holds (
    run_id              uuid   NOT NULL,
    root_run_id         uuid   NOT NULL,
    reserved_tokens     bigint NOT NULL DEFAULT 0,
    reserved_micro_usd  bigint NOT NULL DEFAULT 0,
    reserved_tool_calls bigint NOT NULL DEFAULT 0,
    reserved_iterations bigint NOT NULL DEFAULT 0,
    reserved_files      bigint NOT NULL DEFAULT 0,
    reserved_lines      bigint NOT NULL DEFAULT 0,
    reserved_requests   bigint NOT NULL DEFAULT 0,
    spent_tokens        bigint NOT NULL DEFAULT 0,
    spent_micro_usd     bigint NOT NULL DEFAULT 0,
    spent_tool_calls    bigint NOT NULL DEFAULT 0,
    spent_iterations    bigint NOT NULL DEFAULT 0,
    spent_files         bigint NOT NULL DEFAULT 0,
    spent_lines         bigint NOT NULL DEFAULT 0,
    spent_requests      bigint NOT NULL DEFAULT 0,
    -- 1 where the run spends no more.
    ended               bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, root_run_id)
) WITH (fillfactor = 50);
CREATE INDEX budget_holds_open ON budget_holds (run_id) WHERE ended = 0;

-- Files of workspaces that are kept in an object store: which path of a tenant has which content. Each change gives the
-- tenant a new version, by which replicas find what they do not have.
CREATE TABLE workspaces (
    tenant  text   PRIMARY KEY,
    version bigint NOT NULL,
    -- Nothing is known any more of what was deleted in versions up to this one.
    purged  bigint NOT NULL
) WITH (fillfactor = 50);

-- One path beneath the directory of a tenant. `kind`: file, directory, link; gone where it was deleted.
CREATE TABLE workspace_files (
    tenant      text        NOT NULL,
    path        text        COLLATE "C" NOT NULL,
    kind        text        NOT NULL,
    -- Of a file.
    object      text,
    hash        text,
    size        bigint,
    mode        bigint,
    modified_ns bigint,
    -- Of a link.
    target      text,
    version     bigint      NOT NULL,
    -- Which write made the version; absent where the path was deleted with its run or session.
    write_id    uuid,
    at          timestamptz NOT NULL,
    PRIMARY KEY (tenant, path)
);
CREATE INDEX workspace_files_by_version ON workspace_files (tenant, version);
CREATE INDEX workspace_files_by_object ON workspace_files (object) WHERE object IS NOT NULL;
CREATE INDEX workspace_files_gone ON workspace_files (at) WHERE kind = 'gone';

-- Contents in the object store. `state`: coming before it is there, stored; loose where a path that had it has it no
-- more; dead when it is being deleted, and never used again.
CREATE TABLE workspace_objects (
    object  text        PRIMARY KEY,
    tenant  text        NOT NULL,
    hash    text        NOT NULL,
    state   text        NOT NULL,
    used_at timestamptz NOT NULL
);
CREATE INDEX workspace_objects_by_hash ON workspace_objects (tenant, hash);
CREATE INDEX workspace_objects_unused ON workspace_objects (used_at) WHERE state <> 'stored';
