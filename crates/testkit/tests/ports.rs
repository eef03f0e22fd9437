//! Ports and servers of tests: no two tests get the same port, and a server is up when its own process listens.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use std::{collections::HashSet, net::TcpListener, process::Command, time::Duration};

use airtight_testkit::{
    brokers::process::{Recipe, ServerProcess},
    ports::{self, Port},
};

const CHILD: &str = "AIRTIGHT_TEST_PORTS_CHILD";

/// Of 6,000. Without a reservation the second lot of 200 would meet the first with all but certainty.
#[test]
fn no_two_reservations_are_alike_in_one_process_or_in_two() {
    if std::env::var_os(CHILD).is_some() {
        let ports: Vec<Port> = (0..200).map(|_| Port::reserve()).collect();
        for port in &ports {
            println!("port {port}");
        }
        return;
    }
    let held: Vec<Port> = (0..400).map(|_| Port::reserve()).collect();
    let numbers: HashSet<u16> = held.iter().map(Port::number).collect();
    assert_eq!(numbers.len(), held.len());
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "no_two_reservations_are_alike_in_one_process_or_in_two", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&other.stdout).into_owned();
    let theirs: Vec<u16> = said.lines().filter_map(|line| line.strip_prefix("port ")?.parse().ok()).collect();
    assert_eq!(theirs.len(), 200, "{other:?}");
    assert!(theirs.iter().all(|port| !numbers.contains(port)));
}

#[test]
fn a_port_is_free_for_others_once_it_is_given_back() {
    // Outside of what `reserve` draws from, so that no other test can be quicker.
    let port = (19_000..20_000).find_map(|number| Port::take(number).ok()).unwrap();
    let (number, clone) = (port.number(), port.clone());
    drop(port);
    assert!(Port::take(number).is_err(), "a clone still has it");
    drop(clone);
    assert_eq!(Port::take(number).unwrap().number(), number);
}

#[test]
fn a_process_listens_and_its_neighbour_does_not() {
    let port = Port::reserve();
    let me = std::process::id();
    assert!(!ports::listens(me, port.number()));
    let _listener = TcpListener::bind(("127.0.0.1", port.number())).unwrap();
    assert!(ports::listens(me, port.number()));
    assert!(!ports::listens(1, port.number()), "nor anybody else");
}

#[tokio::test]
async fn another_process_on_the_port_is_not_our_server() {
    let port = Port::reserve();
    let _stranger = TcpListener::bind(("127.0.0.1", port.number())).unwrap();
    let recipe = Recipe {
        program: "sleep".into(),
        args: vec!["60".into()],
        env: Vec::new(),
        port,
        patience: Duration::from_millis(500),
    };
    let started = tokio::spawn(ServerProcess::start(recipe, tempfile::tempdir().unwrap())).await;
    assert!(started.is_err_and(|error| error.is_panic()), "a stranger's port was taken for our server's");
}
