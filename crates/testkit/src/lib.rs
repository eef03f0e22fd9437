//! airtight testkit
