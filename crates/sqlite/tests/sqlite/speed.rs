//! How fast it is; run by hand: `cargo test -p airtight-sqlite --release speed -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use airtight_core::{NewEvent, Order, Relay, Verdict, admin::Admin, queue::QueueOptions};
use tokio_util::sync::CancellationToken;

use crate::common::{Fixture, Hand};

async fn publish(fixture: &Fixture, count: usize, keys: usize) -> Duration {
    let body = serde_json::json!({"text": "x".repeat(450)});
    let begun = Instant::now();
    for chunk in 0..count / 1_000 {
        let events: Vec<NewEvent> = (0..1_000)
            .map(|n| {
                NewEvent::new("s", "T", "A", format!("k{}", (chunk * 1_000 + n) % keys)).json(&body).unwrap()
            })
            .collect();
        Admin::publish(&fixture.outbox, &events).await.unwrap();
    }
    begun.elapsed()
}

/// Claims and settles until nothing is left; returns how many and the worst claim.
async fn drain(relay: &mut Hand) -> (usize, Duration, Duration) {
    let (mut count, mut worst, begun) = (0, Duration::ZERO, Instant::now());
    let ticks = cpu_ticks();
    loop {
        let claim = Instant::now();
        let got = relay.claim(1_000).await;
        worst = worst.max(claim.elapsed());
        if got.claimed.rows.is_empty() {
            println!("  {} ms of CPU time", (cpu_ticks() - ticks) * 10);
            return (count, begun.elapsed(), worst);
        }
        count += got.claimed.rows.len();
        relay.settle(&got, Verdict::Delivered).await;
        relay.tokens.clear();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn throughput() {
    for order in [Order::None, Order::Key, Order::Total] {
        let fixture = Fixture::new().await;
        let took = publish(&fixture, 50_000, 5_000).await;
        println!("{order:?}: published 50000 in {took:.2?}");
        let mut relay = fixture.relay(order).await;
        let (count, took, worst) = drain(&mut relay).await;
        println!("{order:?}: {count} claimed and settled in {took:.2?}, worst claim {worst:.2?}");
        if order == Order::Total {
            continue;
        }
        // 100,000 wait for a retry, on 100,000 keys, and 50,000 are done.
        publish(&fixture, 100_000, 100_000).await;
        fixture.exec("UPDATE airtight_outbox SET aggregate_id = 'w' || seq, next_retry_at = '2900-01-01T00:00:00.000Z' WHERE status = 'pending'").await;
        publish(&fixture, 20_000, 5_000).await;
        let (count, took, worst) = drain(&mut relay).await;
        println!("{order:?}: with 100000 waiting: {count} in {took:.2?}, worst claim {worst:.2?}");
        // And 100,000 more are held, behind 1,000 keys that wait.
        publish(&fixture, 1_000, 1_000).await;
        fixture.exec("UPDATE airtight_outbox SET next_retry_at = '2900-01-01T00:00:00.000Z' WHERE status = 'pending' AND next_retry_at IS NULL").await;
        publish(&fixture, 100_000, 1_000).await;
        let (count, took, worst) = drain(&mut relay).await;
        println!("{order:?}: {count} with 1000 keys blocked in {took:.2?}, worst claim {worst:.2?}");
        if order == Order::Key {
            let begun = Instant::now();
            assert_eq!(relay.unhold().await, 0);
            println!("{order:?}: unhold of nothing over 100000 held: {:.2?}", begun.elapsed());
        }
        publish(&fixture, 1_000, 1).await;
        let begun = Instant::now();
        relay.claim(10).await;
        println!("{order:?}: one claim then: {:.2?}", begun.elapsed());
        let begun = Instant::now();
        fixture.outbox.status().await.unwrap();
        println!("{order:?}: status: {:.2?}", begun.elapsed());
    }
}

/// CPU time of this process so far, in hundredths of a second.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn idle_cost() {
    let fixture = Fixture::new().await;
    let sink = airtight_core::sinks::memory::MemorySink::new();
    let stop = CancellationToken::new();
    let relay = Relay::new(fixture.outbox.queue(QueueOptions::default()), sink.clone()).run(stop.clone());
    let watch = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (ticks, begun) = (cpu_ticks(), Instant::now());
        tokio::time::sleep(Duration::from_secs(20)).await;
        let share = (cpu_ticks() - ticks) as f64 / begun.elapsed().as_secs_f64();
        println!("idle: {share:.2} % of a core");
        let mut worst = Duration::ZERO;
        for n in 0..50 {
            let begun = Instant::now();
            fixture.publish(&["a"]).await;
            while sink.len() <= n {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            worst = worst.max(begun.elapsed());
        }
        println!("worst of 50 from publish to delivery: {worst:.1?}");
        stop.cancel();
    };
    let (ended, ()) = futures::future::join(relay, watch).await;
    ended.unwrap();
}
