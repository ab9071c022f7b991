-- The same table as in migrations/postgres, which explains it.
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
    arguments       TEXT    NOT NULL,
    status          TEXT    NOT NULL,
    decided_at      INTEGER,
    decided_by      TEXT,
    decision_reason TEXT,
    resolution      TEXT,
    PRIMARY KEY (run_id, seq),
    CONSTRAINT answer_fits CHECK ((status IN ('pending', 'void')) = (resolution IS NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX approvals_listed ON approvals (tenant, status, at DESC, call_id DESC);
CREATE INDEX approvals_due ON approvals (expires_at) WHERE status = 'pending';
