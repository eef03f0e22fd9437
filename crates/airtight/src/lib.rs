//! airtight airtight
