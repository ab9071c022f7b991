-- The same column and indexes as in migrations/postgres, which explains them.
ALTER TABLE runs ADD COLUMN session_place TEXT;

CREATE UNIQUE INDEX runs_session_held ON runs (tenant, session_id) WHERE session_place = 'holds' AND finished_at IS NULL;
CREATE INDEX runs_session_waiting ON runs (tenant, session_id, session_place, available_at, id)
    WHERE status = 'queued' AND session_place <> 'holds';

DROP INDEX runs_queue;
CREATE INDEX runs_queue ON runs (available_at, id)
    WHERE status = 'queued' AND (session_place IS NULL OR session_place = 'holds');
