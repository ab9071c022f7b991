-- One run at a time per session. `holds`: the live run that has the session; `next`, `waits`: queued runs that wait for
-- it, in the order of these names and then of acceptance. Absent for runs without a session, for those that another run
-- delegated to, and for those from before this migration.
ALTER TABLE runs ADD COLUMN session_place text;

CREATE UNIQUE INDEX runs_session_held ON runs (tenant, session_id) WHERE session_place = 'holds' AND finished_at IS NULL;
CREATE INDEX runs_session_waiting ON runs (tenant, session_id, session_place, available_at, id)
    WHERE status = 'queued' AND session_place <> 'holds';

-- The queue without those that wait for their session.
DROP INDEX runs_queue;
CREATE INDEX runs_queue ON runs (available_at, id)
    WHERE status = 'queued' AND (session_place IS NULL OR session_place = 'holds');
