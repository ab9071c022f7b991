-- Runs that other runs started and that have not ended: found by the run that waits for them, when it is cancelled or
-- has ended without them.
CREATE INDEX runs_children ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL AND finished_at IS NULL;

-- The budget that a run shares with all runs that it starts, and that those start: made when the first of them starts.
-- A NULL cap is none. What a call may take is reserved before it is made, and settled after it.
CREATE TABLE budgets (
    root_run_id         uuid   PRIMARY KEY,
    max_tokens          bigint,
    max_micro_usd       bigint,
    max_tool_calls      bigint NOT NULL,
    max_iterations      bigint NOT NULL,
    reserved_tokens     bigint NOT NULL DEFAULT 0,
    reserved_micro_usd  bigint NOT NULL DEFAULT 0,
    reserved_tool_calls bigint NOT NULL DEFAULT 0,
    reserved_iterations bigint NOT NULL DEFAULT 0,
    spent_tokens        bigint NOT NULL DEFAULT 0,
    spent_micro_usd     bigint NOT NULL DEFAULT 0,
    spent_tool_calls    bigint NOT NULL DEFAULT 0,
    spent_iterations    bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- What each run of a tree has reserved now, and spent in all: a budget is the sum of its holds.
CREATE TABLE budget_holds (
    run_id              uuid   PRIMARY KEY,
    root_run_id         uuid   NOT NULL,
    reserved_tokens     bigint NOT NULL DEFAULT 0,
    reserved_micro_usd  bigint NOT NULL DEFAULT 0,
    reserved_tool_calls bigint NOT NULL DEFAULT 0,
    reserved_iterations bigint NOT NULL DEFAULT 0,
    spent_tokens        bigint NOT NULL DEFAULT 0,
    spent_micro_usd     bigint NOT NULL DEFAULT 0,
    spent_tool_calls    bigint NOT NULL DEFAULT 0,
    spent_iterations    bigint NOT NULL DEFAULT 0,
    -- 1 where the run spends no more.
    ended               bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
CREATE INDEX budget_holds_open ON budget_holds (run_id) WHERE ended = 0;
