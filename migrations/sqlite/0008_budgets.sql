-- The same as in migrations/postgres, which explains it.
CREATE INDEX runs_children ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL AND finished_at IS NULL;
