//! `${NAME}` and `${NAME:-default}` in string values.
//!
//! A dollar sign without a brace is not special, because passwords contain dollar signs; `$${` writes `${`.

/// Why a string cannot be expanded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EnvError {
    /// The variable is not set, and there is no default.
    Missing(String),
    /// `${` without `}`.
    Unclosed,
    /// The text between the braces is not a name.
    BadName(String),
}

impl EnvError {
    pub(crate) fn message(&self) -> String {
        match self {
            Self::Missing(name) => format!(
                "environment variable {name} is not set; set it, or write ${{{name}:-…}} to give a default"
            ),
            Self::Unclosed => "`${` without a closing `}`; write `$${` for the characters themselves".into(),
            Self::BadName(name) => format!("`{name}` is not the name of an environment variable"),
        }
    }
}

/// Replaces variables by the values of `lookup`. The values are not expanded again.
pub(crate) fn expand(text: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<String, EnvError> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            out.push_str(&rest[..at]);
            out.push('{');
            rest = &rest[at + 2..];
            continue;
        }
        out.push_str(&rest[..at]);
        let inside = &rest[at + 2..];
        let end = inside.find('}').ok_or(EnvError::Unclosed)?;
        let (name, default) = match inside[..end].split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (&inside[..end], None),
        };
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(EnvError::BadName(name.to_owned()));
        }
        // As in a shell, `:-` also stands in for a variable that is set to nothing.
        match (lookup(name), default) {
            (Some(value), None) => out.push_str(&value),
            (Some(value), Some(_)) if !value.is_empty() => out.push_str(&value),
            (_, Some(default)) => out.push_str(default),
            (None, None) => return Err(EnvError::Missing(name.to_owned())),
        }
        rest = &inside[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Option<String> {
        match name {
            "HOST" => Some("db".into()),
            "EMPTY" => Some(String::new()),
            "TRICK" => Some("${HOST}".into()),
            _ => None,
        }
    }

    #[test]
    fn expands_names_and_defaults() {
        for (text, expected) in [
            ("postgres://${HOST}/x", "postgres://db/x"),
            ("${NOT:-a}${EMPTY:-b}${EMPTY}", "ab"),
            ("pa$$word$", "pa$$word$"),
            ("$${HOST}", "${HOST}"),
            ("${TRICK}", "${HOST}"),
        ] {
            assert_eq!(expand(text, &lookup).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn says_what_is_missing() {
        assert_eq!(expand("${NOT}", &lookup), Err(EnvError::Missing("NOT".into())));
        assert_eq!(expand("${NOT", &lookup), Err(EnvError::Unclosed));
        assert_eq!(expand("${a b}", &lookup), Err(EnvError::BadName("a b".into())));
    }
}
