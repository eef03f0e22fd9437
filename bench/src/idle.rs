//! What `airtight run` costs while nothing happens.

use std::{path::Path, process::Stdio, time::Duration};

use airtight_testkit::postgres::TestDb;
use tokio::process::Command;

use crate::sample;

pub(crate) async fn run(db: &TestDb, binary: &Path, seconds: u64) {
    let _migrated = sample::outbox(db, "outbox").await;
    let mut relay = Command::new(binary)
        .args(["run", "--from", &db.url(), "--to", "null:"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("starting the relay");
    let pid = relay.id().expect("it has just been started");
    // Start-up is not idling.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = cpu_ticks(pid);
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let ticks = cpu_ticks(pid) - before;
    // USER_HZ is 100 on every Linux.
    let percent = ticks as f64 / 100.0 / seconds as f64 * 100.0;
    let megabytes = resident_kb(pid) as f64 / 1024.0;
    relay.kill().await.expect("ending the relay");
    println!("idle for {seconds} s: {megabytes:.1} MB resident, {percent:.2} % of a core");
    println!(
        "{}",
        serde_json::json!({"bench": "idle", "seconds": seconds, "rss_mb": megabytes, "cpu_percent": percent})
    );
}

/// Processor time in seconds, of all threads.
pub(crate) fn cpu_seconds(pid: u32) -> f64 {
    // Linux counts in hundredths, whatever its own clock does.
    cpu_ticks(pid) as f64 / 100.0
}

fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the relay runs");
    // The name in parentheses may hold spaces; fields are counted from its end.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime")
}

pub(crate) fn resident_kb(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the relay runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("VmRSS");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse().ok()).expect("a number")
}
