//! The table itself.

use crate::support::Fixture;

#[tokio::test]
async fn events_come_in_order_and_offsets_last() {
    let Some(f) = Fixture::create("smoke").await else { return };
    for n in 1..=10 {
        f.publish(&format!("k{}", n % 3), n).await;
    }
    let reader = f.reader("one").await;
    assert_eq!(reader.seqs(10).await, (1..=10).collect::<Vec<i64>>());
    reader.close().await;
    f.publish("k", 11).await;
    let again = f.reader("one").await;
    assert_eq!(again.seqs(1).await, [11]);
    let other = f.reader("two").await;
    assert_eq!(other.seqs(11).await.len(), 11);
}
