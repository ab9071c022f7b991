-- What runs of agents with a memory said and did, in short, for later runs to recall: the event `seq` of a run in words.
-- `words` splits at punctuation as queries do, so that a path is found by its parts.
CREATE TABLE observations (
    run_id     uuid        NOT NULL,
    seq        bigint      NOT NULL,
    tenant     text        NOT NULL,
    agent      text        NOT NULL,
    session_id text,
    at         timestamptz NOT NULL,
    kind       text        NOT NULL,
    content    text        NOT NULL,
    words      tsvector    GENERATED ALWAYS AS
        (to_tsvector('english', regexp_replace(content, '[[:punct:]]+', ' ', 'g'))) STORED,
    PRIMARY KEY (run_id, seq)
);
CREATE INDEX observations_by_word ON observations USING gin (words);

-- Runs that held a session are numbered 1, 2, 3 … in it. Whoever starts one says which it is: where another was faster,
-- even one that has ended since, the number is taken.
ALTER TABLE runs ADD COLUMN session_turn bigint;
CREATE UNIQUE INDEX runs_session_turn ON runs (tenant, session_id, session_turn) WHERE session_turn IS NOT NULL;
