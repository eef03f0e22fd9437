//! How much WAL an idle outbox retains while other tables are written, compared with Debezium with its defaults on the same
//! server: both at once, each on its own slot, with the same connector file.

use std::{
    collections::VecDeque,
    path::Path,
    time::{Duration, Instant},
};

use airtight_testkit::postgres::TestDb;
use serde_json::json;
use sqlx::PgPool;

use crate::contenders::{Airtight, Arena, Contender, Debezium, Tables};

const LOOK: Duration = Duration::from_millis(200);
/// How long after the last write the slots are looked at again.
const AFTERWARDS: Duration = Duration::from_secs(30);

pub(crate) async fn run(db: &TestDb, binary: &Path, megabytes: u64) {
    let arena = Arena::new(db, Tables::All).await;
    let mut debezium = Debezium::new(&arena).await;
    let mut airtight = Airtight::new(&arena, binary);
    arena.prime(&mut airtight).await;
    arena.prime(&mut debezium).await;
    let mut watches = ["airtight", "debezium"].map(|who| Watch::new(who, arena.slot(who)));

    let neighbour = "CREATE TABLE public.neighbour (n bigint, filler text)";
    sqlx::query(neighbour).execute(&arena.pool).await.expect("a table");
    let writer = tokio::spawn(write(arena.pool.clone(), megabytes));
    let mut clock = WalClock::default();
    let mut ended: Option<Instant> = None;
    while ended.is_none_or(|ended| ended.elapsed() < AFTERWARDS) {
        clock.tick(&arena.pool).await;
        for watch in &mut watches {
            watch.look(&arena.pool, &clock, ended).await;
        }
        if ended.is_none() && writer.is_finished() {
            ended = Some(Instant::now());
        }
        tokio::time::sleep(LOOK).await;
    }
    let written = writer.await.expect("the writer");
    println!("{megabytes} MB of other WAL in {:.0} s, nothing in the outbox", written.as_secs_f64());
    for watch in &watches {
        watch.print();
    }
    let figures: serde_json::Map<_, _> =
        watches.iter().map(|watch| (watch.who.to_owned(), watch.json())).collect();
    println!("{}", json!({"bench": "wal", "megabytes": megabytes, "slots": figures}));
    airtight.stop().await;
    debezium.stop().await;
    arena.clear().await;
}

/// A megabyte at a time.
async fn write(pool: PgPool, megabytes: u64) -> Duration {
    let begun = Instant::now();
    let row =
        "INSERT INTO public.neighbour SELECT n, repeat(md5(n::text), 30) FROM generate_series(1, 1000) n";
    for _ in 0..megabytes {
        sqlx::query(row).execute(&pool).await.expect("writing");
    }
    begun.elapsed()
}

/// When which position was written, so that a position has an age.
#[derive(Default)]
struct WalClock {
    seen: VecDeque<(i64, Instant)>,
}

impl WalClock {
    async fn tick(&mut self, pool: &PgPool) {
        let now: i64 = sqlx::query_scalar("SELECT (pg_current_wal_lsn() - '0/0')::bigint")
            .fetch_one(pool)
            .await
            .expect("a position");
        if self.seen.back().is_none_or(|(last, _)| now > *last) {
            self.seen.push_back((now, Instant::now()));
        }
    }

    /// How long ago the first thing was written that is beyond this position.
    fn behind(&self, position: i64) -> Duration {
        self.seen.iter().find(|(lsn, _)| *lsn > position).map_or(Duration::ZERO, |(_, at)| at.elapsed())
    }
}

/// What a slot did.
struct Watch {
    who: &'static str,
    slot: String,
    oldest: Duration,
    most_behind: i64,
    kept: i64,
    released: Option<Duration>,
}

impl Watch {
    /// What a slot may keep once all is quiet.
    const LITTLE: i64 = 64 << 20;

    fn new(who: &'static str, slot: String) -> Self {
        Self { who, slot, oldest: Duration::ZERO, most_behind: 0, kept: 0, released: None }
    }

    async fn look(&mut self, pool: &PgPool, clock: &WalClock, ended: Option<Instant>) {
        let positions = "SELECT (confirmed_flush_lsn - '0/0')::bigint, \
             (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint, (pg_current_wal_lsn() - restart_lsn)::bigint \
             FROM pg_replication_slots WHERE slot_name = $1";
        let (confirmed, behind, kept): (i64, i64, i64) =
            sqlx::query_as(positions).bind(&self.slot).fetch_one(pool).await.expect("the slot");
        self.kept = kept;
        match ended {
            None => {
                self.oldest = self.oldest.max(clock.behind(confirmed));
                self.most_behind = self.most_behind.max(behind);
            }
            Some(ended) if kept < Self::LITTLE => {
                self.released.get_or_insert_with(|| ended.elapsed());
            }
            Some(_) => {}
        }
    }

    fn print(&self) {
        let when = self.released.map_or_else(
            || format!("never under 64 MB in {} s", AFTERWARDS.as_secs()),
            |time| format!("under 64 MB {:.1} s after the last write", time.as_secs_f64()),
        );
        println!(
            "{}: confirmed position at most {:.1} s and {} MB behind while others wrote; {when}, {} MB kept in the end",
            self.who,
            self.oldest.as_secs_f64(),
            self.most_behind >> 20,
            self.kept >> 20
        );
    }

    fn json(&self) -> serde_json::Value {
        json!({"behind_s": self.oldest.as_secs_f64(), "behind_mb": self.most_behind >> 20, "kept_mb": self.kept >> 20,
            "released_s": self.released.map(|time| time.as_secs_f64())})
    }
}
