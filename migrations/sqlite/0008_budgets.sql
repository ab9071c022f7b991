-- The same as in migrations/postgres, which explains it.
CREATE INDEX runs_children ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL AND finished_at IS NULL;

CREATE TABLE budgets (
    root_run_id         TEXT    PRIMARY KEY NOT NULL,
    max_tokens          INTEGER,
    max_micro_usd       INTEGER,
    max_tool_calls      INTEGER NOT NULL,
    max_iterations      INTEGER NOT NULL,
    reserved_tokens     INTEGER NOT NULL DEFAULT 0,
    reserved_micro_usd  INTEGER NOT NULL DEFAULT 0,
    reserved_tool_calls INTEGER NOT NULL DEFAULT 0,
    reserved_iterations INTEGER NOT NULL DEFAULT 0,
    spent_tokens        INTEGER NOT NULL DEFAULT 0,
    spent_micro_usd     INTEGER NOT NULL DEFAULT 0,
    spent_tool_calls    INTEGER NOT NULL DEFAULT 0,
    spent_iterations    INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE budget_holds (
    run_id              TEXT    PRIMARY KEY NOT NULL,
    root_run_id         TEXT    NOT NULL,
    reserved_tokens     INTEGER NOT NULL DEFAULT 0,
    reserved_micro_usd  INTEGER NOT NULL DEFAULT 0,
    reserved_tool_calls INTEGER NOT NULL DEFAULT 0,
    reserved_iterations INTEGER NOT NULL DEFAULT 0,
    spent_tokens        INTEGER NOT NULL DEFAULT 0,
    spent_micro_usd     INTEGER NOT NULL DEFAULT 0,
    spent_tool_calls    INTEGER NOT NULL DEFAULT 0,
    spent_iterations    INTEGER NOT NULL DEFAULT 0,
    ended               INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX budget_holds_open ON budget_holds (run_id) WHERE ended = 0;
