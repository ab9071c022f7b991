-- Runs that were asked to cancel while nobody drove them: claimed before all others.
CREATE INDEX runs_to_cancel ON runs (cancel_requested_at) WHERE status = 'queued' AND cancel_requested_at IS NOT NULL;
