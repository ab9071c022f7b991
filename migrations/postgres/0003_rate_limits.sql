-- Token buckets that all replicas share. A crash of the database empties this table, which leaves
-- every bucket full; that is worth not writing it to the WAL.
CREATE UNLOGGED TABLE rate_limits (
    key     text   PRIMARY KEY,
    -- Nanoseconds since 1970: when the bucket will be full again.
    tat     bigint NOT NULL,
    -- The last asking: when (as above), and how many tokens were given.
    at      bigint NOT NULL,
    granted bigint NOT NULL
) WITH (fillfactor = 50);
