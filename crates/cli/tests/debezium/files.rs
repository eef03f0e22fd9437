//! Files that cannot be honoured.
