//! Reads a TOML file without serde, so that every error names the file, the line and the key.
//!
//! serde would refuse an unknown key, too, but it would not suggest a similar key, and it would not know the line of a
//! `${ENV}` that cannot be expanded.

use std::{fmt, time::Duration};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{env, suggest, units};

/// What is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigError {
    file: String,
    line: usize,
    message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}

pub(crate) type Result<T> = std::result::Result<T, ConfigError>;

/// Returns the value of an environment variable.
pub(crate) type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The text of a config, its name and its environment.
pub(crate) struct Document<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
    pub(crate) env: &'a Lookup<'a>,
}

impl<'a> Document<'a> {
    pub(crate) fn parse(&self) -> Result<Spanned<DeTable<'a>>> {
        DeTable::parse(self.text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            self.error(at, format!("not valid TOML: {}", error.message().trim().replace('\n', ", ")))
        })
    }

    pub(crate) fn error(&self, offset: usize, message: impl Into<String>) -> ConfigError {
        let before = self.text.as_bytes().iter().take(offset);
        let line = 1 + before.filter(|byte| **byte == b'\n').count();
        ConfigError { file: self.name.to_owned(), line, message: message.into() }
    }
}

/// A table whose keys are all known.
pub(crate) struct Section<'a> {
    doc: &'a Document<'a>,
    table: &'a DeTable<'a>,
    path: String,
    at: usize,
}

impl<'a> Section<'a> {
    /// The whole document, refusing keys that are not `known`.
    pub(crate) fn root(
        doc: &'a Document<'a>,
        table: &'a Spanned<DeTable<'a>>,
        known: &[&str],
    ) -> Result<Self> {
        let section = Self::any(doc, table.get_ref(), String::new(), table.span().start);
        section.refuse_unknown(known)?;
        Ok(section)
    }

    fn any(doc: &'a Document<'a>, table: &'a DeTable<'a>, path: String, at: usize) -> Self {
        Self { doc, table, path, at }
    }

    fn refuse_unknown(&self, known: &[&str]) -> Result<()> {
        for key in self.table.keys() {
            if !known.contains(&key.get_ref().as_ref()) {
                let place = if self.path.is_empty() {
                    "at the top level".to_owned()
                } else {
                    format!("in [{}]", self.path)
                };
                let hint = suggest::hint(key.get_ref(), known, "known keys");
                let message = format!("unknown key `{}` {place}{hint}", key.get_ref());
                return Err(self.doc.error(key.span().start, message));
            }
        }
        Ok(())
    }

    /// The value of a key, if it is there.
    pub(crate) fn get(&self, key: &str) -> Option<Value<'a>> {
        self.table.get(key).map(|node| self.value(key, node))
    }

    /// The value of a key that must be there.
    pub(crate) fn require(&self, key: &str) -> Result<Value<'a>> {
        self.get(key).ok_or_else(|| {
            self.error(format!("`{key}` is missing in [{}]", self.path)) // every required key is in a section
        })
    }

    /// All entries, in the order of the file.
    pub(crate) fn entries(&self) -> Vec<(String, Value<'a>)> {
        let mut entries: Vec<_> = self
            .table
            .iter()
            .map(|(key, node)| (key.span().start, key.get_ref().to_string(), self.value(key.get_ref(), node)))
            .collect();
        entries.sort_by_key(|(at, ..)| *at);
        entries.into_iter().map(|(_, key, value)| (key, value)).collect()
    }

    /// An error about the section as a whole.
    pub(crate) fn error(&self, message: impl Into<String>) -> ConfigError {
        self.doc.error(self.at, message)
    }

    fn value(&self, key: &str, node: &'a Spanned<DeValue<'a>>) -> Value<'a> {
        let path = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        Value { doc: self.doc, node, path }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<String>> {
        self.get(key).map(|value| value.text()).transpose()
    }

    pub(crate) fn duration(&self, key: &str) -> Result<Option<Duration>> {
        self.get(key).map(|value| value.duration()).transpose()
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|value| value.boolean()).transpose()
    }

    /// A whole number of at least `least` that fits the type.
    pub(crate) fn number<T: TryFrom<i64>>(&self, key: &str, least: i64) -> Result<Option<T>> {
        self.get(key).map(|value| value.number(least)).transpose()
    }
}

/// A value and its position in the file.
pub(crate) struct Value<'a> {
    doc: &'a Document<'a>,
    node: &'a Spanned<DeValue<'a>>,
    path: String,
}

impl<'a> Value<'a> {
    /// An error about this value.
    pub(crate) fn error(&self, message: impl fmt::Display) -> ConfigError {
        self.doc.error(self.node.span().start, format!("{}: {message}", self.path))
    }

    fn wrong_type(&self, expected: &str) -> ConfigError {
        self.error(format!("expected {expected}, found {}", kind(self.node.get_ref())))
    }

    /// A string, with variables expanded.
    pub(crate) fn text(&self) -> Result<String> {
        let text = self.node.get_ref().as_str().ok_or_else(|| self.wrong_type("a string"))?;
        env::expand(text, self.doc.env).map_err(|error| self.error(error.message()))
    }

    /// A string that is not empty.
    pub(crate) fn name(&self) -> Result<String> {
        let text = self.text()?;
        if text.is_empty() { Err(self.error("is empty")) } else { Ok(text) }
    }

    /// Whether it is a string, rather than a table.
    pub(crate) fn is_text(&self) -> bool {
        self.node.get_ref().is_str()
    }

    /// Whether it is a table.
    pub(crate) fn is_table(&self) -> bool {
        self.node.get_ref().is_table()
    }

    /// A string, a number or a boolean, as text.
    pub(crate) fn scalar(&self) -> Result<String> {
        Ok(match self.node.get_ref() {
            DeValue::String(_) => self.text()?,
            DeValue::Boolean(flag) => flag.to_string(),
            DeValue::Integer(_) => self.number::<i64>(i64::MIN)?.to_string(),
            DeValue::Float(number) => number.as_str().replace('_', ""),
            _ => return Err(self.wrong_type("a string, a number, true or false")),
        })
    }

    pub(crate) fn boolean(&self) -> Result<bool> {
        // `"${LISTEN:-true}"` is a string in TOML, but means a boolean.
        if self.is_text() {
            let text = self.text()?;
            return text.parse().map_err(|_| self.error(format!("expected true or false, found `{text}`")));
        }
        self.node.get_ref().as_bool().ok_or_else(|| self.wrong_type("true or false"))
    }

    pub(crate) fn number<T: TryFrom<i64>>(&self, least: i64) -> Result<T> {
        let number = match self.node.get_ref() {
            DeValue::Integer(number) => {
                i64::from_str_radix(&number.as_str().replace('_', ""), number.radix()).ok()
            }
            DeValue::String(_) => {
                let text = self.text()?;
                let number = text
                    .parse()
                    .map_err(|_| self.error(format!("expected a whole number, found `{text}`")))?;
                Some(number)
            }
            _ => return Err(self.wrong_type("a whole number")),
        };
        let number = number.ok_or_else(|| self.error("the number is too large"))?;
        if number < least {
            return Err(self.error(format!("must be at least {least}, found {number}")));
        }
        T::try_from(number).map_err(|_| self.error(format!("{number} is too large")))
    }

    pub(crate) fn float(&self) -> Result<f64> {
        match self.node.get_ref() {
            DeValue::Float(number) => number.as_str().replace('_', "").parse().ok(),
            DeValue::Integer(number) => number.as_str().replace('_', "").parse().ok(),
            _ => return Err(self.wrong_type("a number")),
        }
        .filter(|number: &f64| number.is_finite())
        .ok_or_else(|| self.error("not a finite number"))
    }

    pub(crate) fn duration(&self) -> Result<Duration> {
        if !self.is_text() {
            return Err(self.wrong_type("a duration in quotes, like \"30s\""));
        }
        units::duration(&self.text()?).map_err(|message| self.error(message))
    }

    pub(crate) fn size(&self) -> Result<usize> {
        if self.is_text() {
            units::size(&self.text()?).map_err(|message| self.error(message))
        } else {
            self.number(0)
        }
    }

    /// One of the given words.
    pub(crate) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T> {
        let text = self.text()?;
        if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == text) {
            return Ok(*meaning);
        }
        let allowed: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let near = suggest::nearest(&text, allowed.iter().copied())
            .map(|near| format!(" (did you mean `{near}`?)"))
            .unwrap_or_default();
        Err(self
            .error(format!("unknown word `{text}`; allowed words are {}{near}", suggest::listed(&allowed))))
    }

    /// The values of an array.
    pub(crate) fn list(&self) -> Result<Vec<Value<'a>>> {
        let items = self.node.get_ref().as_array().ok_or_else(|| self.wrong_type("an array"))?;
        Ok(items
            .iter()
            .enumerate()
            .map(|(index, node)| Value { doc: self.doc, node, path: format!("{}[{index}]", self.path) })
            .collect())
    }

    /// A table whose keys are all known.
    pub(crate) fn section(&self, known: &[&str]) -> Result<Section<'a>> {
        let section = self.names()?;
        section.refuse_unknown(known)?;
        Ok(section)
    }

    /// A table whose keys are names that the user chose.
    pub(crate) fn names(&self) -> Result<Section<'a>> {
        let table = self.node.get_ref().as_table().ok_or_else(|| self.wrong_type("a table"))?;
        Ok(Section::any(self.doc, table, self.path.clone(), self.node.span().start))
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}
