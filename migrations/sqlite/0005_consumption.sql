-- The same column as in migrations/postgres, which explains it.
ALTER TABLE runs ADD COLUMN consumption TEXT;
