-- Runs that other runs started and that have not ended: found by the run that waits for them, when it is cancelled or
-- has ended without them.
CREATE INDEX runs_children ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL AND finished_at IS NULL;
