-- What callers need around a run: safe retries, traces. Also drops a column that was never filled.

ALTER TABLE runs
    DROP COLUMN deadline_at,
    ADD COLUMN idempotency_key text,
    -- Hex SHA-256 of the request that the key came with.
    ADD COLUMN request_hash text,
    -- The caller's W3C `traceparent` header.
    ADD COLUMN traceparent text;

CREATE UNIQUE INDEX runs_idempotency ON runs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
