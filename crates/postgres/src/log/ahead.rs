//! Reading ahead: while one page is being delivered, the next ones are read, so that server and relay work at the
//! same time. Bounded in pages and bytes; a page is handed out in slices of the requested size.
//!
//! A page that was read ahead is older when it is used. So it is judged by what was known about holes when its statement
//! began: see [`super::holes`].

use std::sync::Arc;

use airtight_core::Result;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::{
    LogTable, holes,
    read::{self, Ask, Page},
};
use crate::PgOutbox;

/// How many pages wait to be asked for, besides the one that is being read.
const PAGES: usize = 2;

/// The most bytes of one page.
pub(super) const PAGE_BYTES: usize = 4 << 20;

/// Pages that are read before they are asked for.
#[derive(Debug)]
pub(super) struct Ahead {
    /// What they are read by; `after` is where the next one begins.
    ask: Ask,
    /// The rest of a page that was larger than requested.
    rest: Option<Page>,
    pages: mpsc::Receiver<Result<Page>>,
    _task: AbortOnDropHandle<()>,
}

impl Ahead {
    /// Begins to read from `ask` on, until the end, a hole or an error.
    pub(super) fn start(outbox: PgOutbox, table: Arc<LogTable>, ask: Ask, decided_to: i64) -> Self {
        let (sender, pages) = mpsc::channel(PAGES);
        let mut next = ask.clone();
        let task = tokio::spawn(async move {
            loop {
                let page = read::page(&outbox, &table, &next, decided_to).await;
                let on = page.as_ref().is_ok_and(|page| {
                    let reach = holes::reach(next.after, decided_to, page.rows.iter().map(|row| row.seq));
                    next.after = reach.through;
                    page.full && !reach.blocked
                });
                if sender.send(page).await.is_err() || !on {
                    return;
                }
            }
        });
        Self { ask, rest: None, pages, _task: AbortOnDropHandle::new(task) }
    }

    /// The next page, cut to what is asked for, if that is what was read ahead.
    pub(super) async fn page(&mut self, ask: &Ask) -> Option<Page> {
        if !self.ask.is_read_like(ask) || self.ask.after != ask.after {
            return None;
        }
        let mut page = match self.rest.take() {
            Some(rest) => rest,
            // An error is met again by whoever reads for himself.
            None => self.pages.recv().await?.ok()?,
        };
        self.rest = page.cut(ask.limit, ask.bytes);
        self.ask.after = page.rows.last().map_or(self.ask.after, |row| row.seq);
        Some(page)
    }
}
