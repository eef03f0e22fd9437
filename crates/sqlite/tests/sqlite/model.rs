//! Random work by relays that come, fail and vanish: whatever happens, order holds and everything arrives.
//!
//! The rule is checked from outside, on what the table says before each claim: a claimed event has no earlier
//! unfinished one of its key (of all, in total order), but for those that go out with it or that the same relay
//! holds already.

use std::collections::{HashMap, HashSet};

use airtight_core::{
    NewEvent, Order, Verdict,
    admin::{Admin, Filter},
    queue::{QueueStore, RowClaim},
};
use airtight_sqlite::SqliteOutbox;
use uuid::Uuid;

use crate::common::{Fixture, Hand, dead, member, retry};

/// A small generator: the same seed, the same story.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % sides
    }
}

/// A relay and what it holds, in order: claim, key, place.
struct Player {
    hand: Hand,
    holds: Vec<(RowClaim, String, usize)>,
}

struct Game {
    fixture: Fixture,
    outbox: SqliteOutbox,
    order: Order,
    block_on_dead: bool,
    due: &'static str,
    dice: Dice,
    players: Vec<Player>,
}

impl Game {
    async fn join(&mut self) {
        let mut member = member(self.order);
        member.block_on_dead = self.block_on_dead;
        let hand = Hand::join(&self.outbox, member).await;
        self.players.push(Player { hand, holds: Vec::new() });
        self.share().await;
    }

    /// Partitions go to whoever may have them: freely where nothing is held.
    async fn share(&mut self) {
        let count = self.players.len();
        for (n, player) in self.players.iter_mut().enumerate() {
            let total = player.hand.member.partitions;
            let mine: Vec<u16> = (0..total).filter(|p| usize::from(*p) % count == n).collect();
            if player.holds.is_empty() {
                let give: Vec<u16> =
                    player.hand.partitions.iter().copied().filter(|p| !mine.contains(p)).collect();
                player.hand.store.members().give(&player.hand.member, &give).await.unwrap();
                player.hand.partitions.retain(|p| !give.contains(p));
            }
            let taken = player.hand.store.members().take(&player.hand.member, &mine).await.unwrap();
            player.hand.partitions.extend(taken);
        }
    }

    async fn publish(&mut self) {
        for _ in 0..=self.dice.roll(6) {
            let key = format!("k{}", self.dice.roll(4));
            let event = NewEvent::new("s", "T", "A", key).json(&1).unwrap();
            Admin::publish(&self.outbox, &[event]).await.unwrap();
        }
    }

    async fn claim(&mut self, who: usize, events: usize) -> usize {
        let before = self.outbox.list(&Filter { limit: 100_000, ..Filter::default() }).await.unwrap();
        let places: HashMap<&str, usize> =
            before.iter().enumerate().map(|(n, row)| (row.id.as_str(), n)).collect();
        let player = &mut self.players[who];
        player.hand.tokens = player.holds.iter().map(|(claim, ..)| claim.token).collect();
        let got = player.hand.claim(events).await;
        let held: HashSet<usize> = player.holds.iter().map(|(.., place)| *place).collect();
        let mut out: HashSet<usize> = HashSet::new();
        for row in &got.claimed.rows {
            let event = row.event.as_ref().unwrap();
            let place = places[event.id.as_str()];
            for (n, earlier) in before[..place].iter().enumerate() {
                if self.order != Order::Total && earlier.aggregate_id != event.aggregate_id {
                    continue;
                }
                let finished = match earlier.state.as_str() {
                    "done" => true,
                    "dead" | "unknown" => !self.block_on_dead,
                    _ => false,
                };
                assert!(
                    finished || out.contains(&n) || held.contains(&n),
                    "{:?}: {} went out before {} ({}, due {:?}, held {})",
                    self.order,
                    event.id,
                    earlier.id,
                    earlier.state,
                    earlier.next_retry_at,
                    earlier.held
                );
            }
            assert!(!held.contains(&place), "it is out already");
            out.insert(place);
            let claim = RowClaim { key: row.key.clone(), token: got.token };
            player.holds.push((claim, event.aggregate_id.clone(), place));
        }
        player.holds.sort_by_key(|(.., place)| *place);
        got.claimed.rows.len()
    }

    /// Settles some of what a player holds the way a relay does: in order, and nothing behind a failure.
    async fn settle(&mut self, who: usize, lucky: bool) {
        let player = &mut self.players[who];
        let holds = std::mem::take(&mut player.holds);
        let mut stopped: HashSet<String> = HashSet::new();
        let mut left: HashSet<String> = HashSet::new();
        let mut verdicts: Vec<(RowClaim, Verdict)> = Vec::new();
        for (claim, key, place) in holds {
            let lane = if self.order == Order::Total { String::new() } else { key.clone() };
            if left.contains(&lane) || (!lucky && self.dice.roll(4) == 0 && !stopped.contains(&lane)) {
                left.insert(lane);
                player.holds.push((claim, key, place));
                continue;
            }
            let verdict = if stopped.contains(&lane) {
                Verdict::Released
            } else if lucky {
                Verdict::Delivered
            } else {
                match self.dice.roll(8) {
                    0 | 1 => retry(),
                    2 => dead(),
                    3 => Verdict::Released,
                    _ => Verdict::Delivered,
                }
            };
            let goes_on = match verdict {
                Verdict::Delivered => true,
                Verdict::Dead { .. } => !self.block_on_dead,
                _ => false,
            };
            if !goes_on {
                stopped.insert(lane);
            }
            verdicts.push((claim, verdict));
        }
        // What was left behind a failure must be given back too.
        let kept = std::mem::take(&mut player.holds);
        for (claim, key, place) in kept {
            let lane = if self.order == Order::Total { String::new() } else { key.clone() };
            if stopped.contains(&lane) {
                verdicts.push((claim, Verdict::Released));
            } else {
                player.holds.push((claim, key, place));
            }
        }
        let rows: Vec<(RowClaim, &Verdict)> =
            verdicts.iter().map(|(claim, verdict)| (claim.clone(), verdict)).collect();
        let applied = player.hand.store.settle(&player.hand.member, &rows).await.unwrap();
        assert!(applied.iter().all(|applied| *applied), "nobody else may have it");
    }

    /// Gone with all it holds.
    async fn crash(&mut self, who: usize) {
        let gone = self.players.remove(who);
        self.fixture
            .exec(&format!(
                "UPDATE airtight_relay SET expires_at = '2000' WHERE id = '{}'",
                gone.hand.member.id
            ))
            .await;
        self.join().await;
        let store = &gone.hand.store;
        let verdict = Verdict::Delivered;
        assert!(!store.members().heartbeat(&gone.hand.member, &[]).await.unwrap().alive);
        // Tokens of nobody: settles that come from the grave under a wrong token change nothing.
        let rows: Vec<(RowClaim, &Verdict)> = gone
            .holds
            .iter()
            .map(|(claim, ..)| (RowClaim { key: claim.key.clone(), token: Uuid::new_v4() }, &verdict))
            .collect();
        assert!(store.settle(&gone.hand.member, &rows).await.unwrap().iter().all(|applied| !applied));
    }

    async fn step(&mut self) {
        let who = self.dice.roll(self.players.len());
        match self.dice.roll(12) {
            0 | 1 => self.publish().await,
            2..=4 => {
                let events = 1 + self.dice.roll(6);
                self.claim(who, events).await;
            }
            5..=7 => self.settle(who, false).await,
            8 => {
                self.fixture.exec(self.due).await;
            }
            9 => {
                self.players[who].hand.unhold().await;
            }
            10 => self.share().await,
            _ if self.dice.roll(4) == 0 => self.crash(who).await,
            _ => {}
        }
    }

    /// From here on all goes well: everything must arrive.
    async fn finish(&mut self) {
        for round in 0.. {
            assert!(round < 500, "{:?}", self.outbox.list(&Filter::default()).await.unwrap());
            self.fixture.exec(self.due).await;
            self.outbox.retry_dead(&Filter::default()).await.unwrap();
            let mut busy = 0;
            for who in 0..self.players.len() {
                self.settle(who, true).await;
                self.players[who].hand.unhold().await;
                busy += self.claim(who, 50).await;
                self.settle(who, true).await;
                // Suspects, one by one.
                self.players[who].hand.tokens.clear();
                let alone = self.players[who].hand.claim_alone().await;
                assert!(alone.claimed.rows.len() <= 1);
                self.players[who].hand.settle(&alone, Verdict::Delivered).await;
                busy += alone.claimed.rows.len();
            }
            self.share().await;
            let rest = self.outbox.status().await.unwrap();
            let done = rest.streams.iter().all(|s| s.pending + s.retrying + s.processing + s.dead == 0);
            if busy == 0 && done {
                return;
            }
        }
    }
}

async fn play(order: Order, block_on_dead: bool, foreign: bool) {
    for seed in 0..6 {
        let (fixture, outbox, due) = if foreign {
            let (fixture, outbox) = crate::foreign::legacy().await;
            (
                fixture,
                outbox,
                "UPDATE airtight_side SET next_retry_at = '2000-01-01T00:00:00.000Z' WHERE next_retry_at < '9000'",
            )
        } else {
            let fixture = Fixture::new().await;
            let outbox = fixture.outbox.clone();
            (fixture, outbox, crate::common::DUE)
        };
        let mut game =
            Game { fixture, outbox, order, block_on_dead, due, dice: Dice(seed), players: Vec::new() };
        game.join().await;
        if order == Order::Key {
            game.join().await;
        }
        for _ in 0..120 {
            game.step().await;
        }
        game.finish().await;
    }
}

#[tokio::test]
async fn key_order_holds_whatever_happens() {
    play(Order::Key, false, false).await;
}

#[tokio::test]
async fn key_order_holds_behind_the_dead() {
    play(Order::Key, true, false).await;
}

#[tokio::test]
async fn key_order_holds_in_a_foreign_table() {
    play(Order::Key, false, true).await;
}

#[tokio::test]
async fn total_order_holds_whatever_happens() {
    play(Order::Total, false, false).await;
}

#[tokio::test]
async fn total_order_holds_behind_the_dead() {
    play(Order::Total, true, false).await;
}
