-- The queue refuses what no relay could deliver.

-- Nothing is measured that is small however it is written: 2,000 bytes of jsonb are less than 16 MiB of text, even if all of
-- them are numbers with the longest exponents. `strict`, since `lax` would look into an array for strings.
CREATE TRIGGER {trigger:refuse} BEFORE INSERT ON {outbox} FOR EACH ROW WHEN (
    (pg_column_size(NEW.payload) > 2000 AND octet_length(NEW.payload::text) > 16777216)
    OR octet_length(NEW.payload_bytes) > 16777216
    OR jsonb_path_exists(NEW.headers, 'strict $.* ? (@.type() <> "string")', '{}', true)
) EXECUTE FUNCTION {schema}.refuse();
