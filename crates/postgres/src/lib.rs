//! airtight postgres
