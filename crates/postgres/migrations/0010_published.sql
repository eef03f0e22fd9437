-- What the publication had when the reader's position was stored: its own number and version, the table's number, and the
-- entries by which it has the table. Decoding goes by the catalogues of each transaction's own time, so whatever was
-- committed while a publication lacked something is skipped, and a position is worth nothing beside other contents.
-- NULL for a reader of an older airtight: then what is there now counts from now on.
ALTER TABLE {schema}.slot ADD COLUMN published jsonb;
