-- The same table as in migrations/postgres, which explains it.
CREATE TABLE rate_limits (
    key     TEXT    PRIMARY KEY NOT NULL,
    tat     INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    granted INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
