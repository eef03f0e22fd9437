-- How far each relay of a queue has handed out events, for each key slot with events in flight. The newest counts: see
-- `sql/mark.sql`. Inserted and deleted all the time, so vacuumed often.
CREATE TABLE {schema}.mark (
    relay uuid NOT NULL,
    page  bigint NOT NULL,
    slots smallint[] NOT NULL,
    seqs  bigint[] NOT NULL,
    PRIMARY KEY (relay, page)
) WITH (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.1);

-- Relays of earlier versions claim rows of a queue. Those of this version read them, and neither would respect the other. A
-- relay of an earlier version that starts on a queue after its migration is refused here, by the name of its group.
CREATE OR REPLACE FUNCTION {schema}.refuse_claims() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF NEW.grp NOT LIKE '%/reads:%' AND NEW.grp NOT LIKE 'log:%' AND NEW.grp NOT LIKE 'cdc:%'
        AND EXISTS (SELECT FROM {schema}.migration m WHERE m.version = 13
                    AND NEW.outbox = {literal:schema} || '.' || m.outbox) THEN
        RAISE EXCEPTION '% was migrated for a newer airtight: this relay is of an earlier version', NEW.outbox
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Start the relay with the newer airtight.';
    END IF;
    RETURN NEW;
END $body$;
CREATE TRIGGER relay_refuse_claims BEFORE INSERT ON {schema}.relay
    FOR EACH ROW EXECUTE FUNCTION {schema}.refuse_claims();
