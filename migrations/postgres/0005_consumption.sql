-- What tool calls took of the run's budget: files, lines, commands, network requests. Absent: nothing.
ALTER TABLE runs ADD COLUMN consumption json;
