//! The conformance suite for sources, on the canonical table and on a foreign one without lease or retry
//! columns, and on the table of `support/transfer.rs`, against a real PostgreSQL; and once more through a transaction pooler.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

mod support;

mod canonical {
    airtight_testkit::source_conformance!(|name| async move {
        crate::support::Canonical::create(&format!("canonical_{name}")).await
    });
}

mod foreign {
    airtight_testkit::source_conformance!(|name| async move {
        crate::support::Foreign::create(&format!("foreign_{name}")).await
    });
}

mod transfer {
    airtight_testkit::source_conformance!(|name| async move {
        crate::support::transfer(&format!("transfer_{name}")).await
    });
}

mod pooled {
    airtight_testkit::source_conformance!(|name| async move { crate::support::pooled(name).await });
}
