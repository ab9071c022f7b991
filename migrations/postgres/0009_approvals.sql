-- What parked runs wait for, and what became of it. `seq` is the number of the event that asks: the request itself, or
-- the start of a call whose outcome a crash left unknown. `resolution` is the answer as the run that goes on reads it.
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
    arguments       json        NOT NULL,
    status          text        NOT NULL,
    decided_at      timestamptz,
    decided_by      text,
    decision_reason text,
    resolution      json,
    PRIMARY KEY (run_id, seq),
    CONSTRAINT answer_fits CHECK ((status IN ('pending', 'void')) = (resolution IS NULL))
);
CREATE INDEX approvals_listed ON approvals (tenant, status, at DESC, call_id DESC);
CREATE INDEX approvals_due ON approvals (expires_at) WHERE status = 'pending';
