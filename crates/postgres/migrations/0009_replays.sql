-- Which replay a consumer was last asked for, by a seek to an earlier place: a number of its own, and the events that
-- come again by it. Destinations that drop repeats are told by it that these are wanted.
ALTER TABLE {schema}.consumer
    ADD COLUMN replay bigint, ADD COLUMN replay_after bigint, ADD COLUMN replay_through bigint;
