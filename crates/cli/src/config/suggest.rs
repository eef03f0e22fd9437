//! The nearest known word, for a typing error.

/// The word of `known` that `word` was probably meant to be, if any is near enough.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = word.to_lowercase().replace('-', "_");
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, candidate), candidate))
        // A third of the letters wrong is a typing error; more is another word.
        .filter(|(distance, candidate)| *distance <= (candidate.len().max(lower.len()) / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// `; did you mean …?` when there is such a word, else all of them.
pub(crate) fn hint(word: &str, known: &[&str], what: &str) -> String {
    match nearest(word, known.iter().copied()) {
        Some(near) => format!("; did you mean `{near}`?"),
        None => format!("; {what} are {}", listed(known)),
    }
}

/// `` `a`, `b` and `c` ``.
pub(crate) fn listed(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["batch", "backoff", "max_attempts"];
        assert_eq!(nearest("batc", known), Some("batch"));
        assert_eq!(nearest("Max-Attempt", known), Some("max_attempts"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(hint("colour", &["a", "b"], "known keys"), "; known keys are `a` and `b`");
    }
}
