-- A definition may be deleted when no run refers to it and nobody has started one with it lately, so
-- what matters is when it was last used.
ALTER TABLE definitions RENAME COLUMN created_at TO used_at;
