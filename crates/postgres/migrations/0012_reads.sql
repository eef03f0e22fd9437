-- Relays read the queue by slot, whatever streams they read: a cursor passes other streams once. These indexes cost every
-- publish, and no statement needs them any more.
DROP INDEX IF EXISTS {schema}.{index:claim_stream};
DROP INDEX IF EXISTS {schema}.{index:waiting_stream};

-- Reserved for delayed events: not delivered before this time. Nothing reads it yet.
ALTER TABLE {outbox} ADD COLUMN not_before timestamptz;
