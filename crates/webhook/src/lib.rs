//! airtight webhook
