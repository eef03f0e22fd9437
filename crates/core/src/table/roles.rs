//! Checks that the words of a status column distinguish its roles.
//!
//! A row that is both done and new would be delivered again and again, so such a mapping is refused before anything
//! is claimed. Which values the column can hold is checked by the store.

use super::{Condition, Role, StatusSpec, TableSpec, Test};
use crate::{Code, Error, Result};

impl StatusSpec {
    /// The roles that the table has words for, by the names that configs give them.
    pub fn roles(&self) -> Vec<(&'static str, &Role)> {
        let all = [
            ("new", Some(&self.new)),
            ("retrying", Some(&self.retrying)),
            ("processing", self.processing.as_ref()),
            ("done", Some(&self.done)),
            ("dead", Some(&self.dead)),
            ("unknown", self.unknown.as_ref()),
        ];
        all.into_iter().filter_map(|(name, role)| Some((name, role?))).collect()
    }

    /// Pairs of roles that must differ. An event that failed may have the same word as a new one.
    pub fn distinct(&self) -> impl Iterator<Item = [(&'static str, &Role); 2]> {
        let roles = self.roles();
        let pairs = (0..roles.len()).flat_map(|left| (left + 1..roles.len()).map(move |right| (left, right)));
        let pairs: Vec<_> = pairs.map(|(left, right)| [roles[left], roles[right]]).collect();
        pairs.into_iter().filter(|[left, right]| (left.0, right.0) != ("new", "retrying"))
    }
}

impl TableSpec {
    /// Refuses a mapping in which one row can have two roles.
    pub fn check_roles(&self) -> Result<()> {
        let Some(status) = &self.status else { return Ok(()) };
        for [(left, one), (right, other)] in status.distinct() {
            if one.word != other.word || !meets_both(one.when.as_ref(), other.when.as_ref()) {
                continue;
            }
            let how = match (&one.when, &other.when) {
                (None, None) => "",
                _ => ", and a row can meet the conditions of both",
            };
            return Err(Error::permanent(
                Code::BAD_STATUS_WORDS,
                format!(
                    "{}: the roles `{left}` and `{right}` cannot be told apart: both are `{}` in {}{how}, so events would be \
                     delivered again and again, or never",
                    self.display_name(),
                    one.word,
                    status.column,
                ),
            )
            .with_remedy(
                "give each a word of its own, or a `when` that excludes the other's, such as `less = 5` and `at_least = 5` \
                 of the same column",
            ));
        }
        Ok(())
    }

    /// Refuses a limit of attempts at which a failed event would be in another role than `retrying`, since its count
    /// no longer meets that role's condition.
    pub fn check_attempts(&self, max_attempts: u32) -> Result<()> {
        let Some(status) = &self.status else { return Ok(()) };
        let Some(when) = &status.retrying.when else { return Ok(()) };
        // A condition on a column that nobody counts in stays as it is.
        if self.count_column() != Some(when.column.as_str()) {
            return Ok(());
        }
        // After the first failure the count is 1, after the last but one a try less than the limit.
        let last = i64::from(max_attempts) - 1;
        let fits = match when.test {
            Test::Less => last < when.value,
            Test::AtLeast => last < 1 || when.value <= 1,
            Test::Equal => last < 1 || (last == 1 && when.value == 1),
        };
        if fits {
            return Ok(());
        }
        let remedy = match when.test {
            Test::Less if when.value >= 1 => format!(
                "set max_attempts to {0} at most, or `less` and its counterpart of `dead` to {max_attempts}",
                when.value
            ),
            _ => format!("use `less = {max_attempts}`, and `at_least = {max_attempts}` for `dead`"),
        };
        Err(Error::permanent(
            Code::BAD_STATUS_WORDS,
            format!(
                "{}: `retrying` needs {} {} {}, but with max_attempts = {max_attempts} events are tried again until it is \
                 {last}: they would be taken for something else before",
                self.display_name(),
                when.column,
                when.test.sql(),
                when.value,
            ),
        )
        .with_remedy(remedy))
    }
}

/// Whether one row can meet both conditions; none is always met.
fn meets_both(one: Option<&Condition>, other: Option<&Condition>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return true };
    if one.column != other.column {
        return true;
    }
    let ((low, high), (other_low, other_high)) = (range(one), range(other));
    low.max(other_low) <= high.min(other_high)
}

/// The values that meet a condition.
fn range(condition: &Condition) -> (i64, i64) {
    match condition.test {
        Test::Less => (i64::MIN, condition.value.saturating_sub(1)),
        Test::AtLeast => (condition.value, i64::MAX),
        Test::Equal => (condition.value, condition.value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Count;

    fn spec(retrying: Role, dead: Role) -> TableSpec {
        let mut spec = TableSpec::canonical(None, "t");
        spec.count = Some(Count::Retries("n".into()));
        let status = spec.status.as_mut().unwrap();
        (status.retrying, status.dead) = (retrying, dead);
        spec
    }

    fn when(test: Test, value: i64) -> Role {
        Role::when("FAILED", Condition { column: "n".into(), test, value })
    }

    #[test]
    fn roles_of_one_word_need_conditions_that_exclude_each_other() {
        use Test::{AtLeast, Equal, Less};
        TableSpec::canonical(None, "outbox").check_roles().unwrap();
        TableSpec::relay_log().check_roles().unwrap();
        for (retrying, dead, apart) in [
            (Role::word("FAILED"), Role::word("DEAD"), true),
            (Role::word("FAILED"), Role::word("FAILED"), false),
            (Role::word("FAILED"), when(AtLeast, 5), false),
            (when(Less, 5), when(AtLeast, 5), true),
            (when(Less, 5), when(AtLeast, 4), false),
            (when(Less, 5), when(Equal, 5), true),
            (when(Less, 5), when(Equal, 4), false),
            (when(Equal, 1), when(Equal, 2), true),
            (when(Equal, 2), when(AtLeast, 2), false),
            (when(Less, 5), when(Less, 9), false),
        ] {
            let spec = spec(retrying, dead);
            assert_eq!(spec.check_roles().is_ok(), apart, "{spec:?}");
        }
        let other = Role::when("FAILED", Condition { column: "m".into(), test: AtLeast, value: 5 });
        assert!(spec(when(Less, 5), other).check_roles().is_err(), "another column excludes nothing");
    }

    #[test]
    fn a_failed_event_must_stay_one_until_its_last_attempt() {
        use Test::{AtLeast, Equal, Less};
        for (retrying, max_attempts, fits) in [
            (Role::word("FAILED"), 10, true),
            (when(Less, 5), 5, true),
            (when(Less, 5), 2, true),
            (when(Less, 5), 6, false),
            (when(AtLeast, 1), 9, true),
            (when(AtLeast, 2), 9, false),
            (when(Equal, 1), 2, true),
            (when(Equal, 1), 3, false),
            (when(Equal, 7), 1, true),
        ] {
            let spec = spec(retrying, Role::word("DEAD"));
            assert_eq!(spec.check_attempts(max_attempts).is_ok(), fits, "{max_attempts} {spec:?}");
        }
    }
}
