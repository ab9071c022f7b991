-- The same table as in migrations/postgres, which explains it; an index of words beside it, which triggers keep.
CREATE TABLE observations (
    id         INTEGER PRIMARY KEY,
    run_id     TEXT    NOT NULL,
    seq        INTEGER NOT NULL,
    tenant     TEXT    NOT NULL,
    agent      TEXT    NOT NULL,
    session_id TEXT,
    at         INTEGER NOT NULL,
    kind       TEXT    NOT NULL,
    content    TEXT    NOT NULL,
    UNIQUE (run_id, seq)
);
CREATE VIRTUAL TABLE observation_words USING fts5 (content, content = 'observations', content_rowid = 'id', tokenize = 'porter unicode61');
CREATE TRIGGER observation_added AFTER INSERT ON observations BEGIN
    INSERT INTO observation_words (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER observation_deleted AFTER DELETE ON observations BEGIN
    INSERT INTO observation_words (observation_words, rowid, content) VALUES ('delete', old.id, old.content);
END;

ALTER TABLE runs ADD COLUMN session_turn INTEGER;
CREATE UNIQUE INDEX runs_session_turn ON runs (tenant, session_id, session_turn) WHERE session_turn IS NOT NULL;
