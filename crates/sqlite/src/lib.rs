//! airtight sqlite
