-- By what a consumer knows the log again that it has followed. An offset says that everything up to it is settled;
-- that is no longer true once the numbers up to it are drawn again (TRUNCATE … RESTART IDENTITY, setval, a restore).
ALTER TABLE {schema}.consumer
    -- The newest event up to the offset, by its number and its id.
    ADD COLUMN witness_seq bigint,
    ADD COLUMN witness_id text,
    -- The file of the sequence, which is another one after RESTART.
    ADD COLUMN witness_file bigint,
    -- A relay has seen it while it ran. Only a seek takes it back.
    ADD COLUMN set_back boolean NOT NULL DEFAULT false;
