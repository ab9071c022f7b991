-- The same changes as in migrations/postgres, which explains them.

ALTER TABLE runs DROP COLUMN deadline_at;
ALTER TABLE runs ADD COLUMN idempotency_key TEXT;
ALTER TABLE runs ADD COLUMN request_hash TEXT;
ALTER TABLE runs ADD COLUMN traceparent TEXT;

CREATE UNIQUE INDEX runs_idempotency ON runs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
