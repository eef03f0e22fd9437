//! `table.expand.json.payload`: a schema from a JSON text, and the value in it.
//!
//! As Debezium does it: fields that are null and arrays that are empty have no type and are left out; an array whose
//! members differ in type cannot be expanded, and then all of the payload stays text.

use bytes::Bytes;

use super::schema::{Kind, Schema, Value};

/// Jackson's limit.
const MAX_DEPTH: usize = 1_000;

/// What came of it.
#[derive(Debug, PartialEq)]
pub(super) enum Expanded {
    /// The payload as a structure.
    Struct(Schema, Value),
    /// The payload stays what it was.
    Unchanged,
    /// Debezium has a schema (or none, for an empty array), and then fails to fill it: it goes on with the text and the
    /// wrong schema. Only a converter that does not look at schemas can write that.
    Mismatched(Option<Schema>),
}

/// Expands a text. `name` is that of the payload's column, which is in the schemas' names.
pub(super) fn expand(name: &str, text: &[u8], keep_nulls: bool) -> Expanded {
    // Blanks in front are no JSON to Debezium.
    if !matches!(text.first(), Some(b'{' | b'[')) {
        return Expanded::Unchanged;
    }
    let Some(node) = std::str::from_utf8(text).ok().and_then(|text| Parser { text, at: 0 }.value(0)) else {
        return Expanded::Unchanged;
    };
    let Ok(schema) = (Inference { keep_nulls }).schema(Some(name), &node) else { return Expanded::Unchanged };
    match (&schema, &node) {
        (Some(of), Node::Object(_)) => match fill(&node, of) {
            Some(value) => Expanded::Struct(of.clone(), value),
            None => Expanded::Mismatched(schema),
        },
        _ => Expanded::Mismatched(schema),
    }
}

/// JSON, with its fields in order.
#[derive(Debug, Clone, PartialEq)]
enum Node {
    Null,
    Boolean(bool),
    Int(i64),
    /// More digits than 64 bits hold.
    Huge,
    Double(f64),
    Text(String),
    Array(Vec<Node>),
    Object(Vec<(String, Node)>),
}

/// The text has a type that Connect cannot have.
struct Heterogeneous;

struct Inference {
    keep_nulls: bool,
}

impl Inference {
    /// None for what has no type.
    fn schema(&self, key: Option<&str>, node: &Node) -> Result<Option<Schema>, Heterogeneous> {
        let kind = match node {
            Node::Null if self.keep_nulls => Kind::Bytes,
            Node::Null => return Ok(None),
            Node::Boolean(_) => Kind::Boolean,
            Node::Int(number) if i32::try_from(*number).is_ok() => Kind::Int32,
            Node::Int(_) => Kind::Int64,
            Node::Huge | Node::Double(_) => Kind::Float64,
            Node::Text(_) => Kind::String,
            Node::Array(nodes) if nodes.is_empty() => return Ok(None),
            Node::Array(nodes) => Kind::Array(Box::new(self.items(key, nodes)?)),
            Node::Object(members) => return self.object(key, members).map(Some),
        };
        Ok(Some(Schema::new(kind, true)))
    }

    fn object(&self, key: Option<&str>, members: &[(String, Node)]) -> Result<Schema, Heterogeneous> {
        let mut fields = Vec::with_capacity(members.len());
        for (name, node) in members {
            let inner = match key.filter(|key| !key.trim().is_empty()) {
                Some(key) => format!("{key}.{name}"),
                None => name.clone(),
            };
            if let Some(schema) = self.schema(Some(&inner), node)? {
                fields.push((name.clone(), schema));
            }
        }
        let name = key.map(|key| key.to_owned().into());
        Ok(Schema { name, ..Schema::new(Kind::Struct(fields), true) })
    }

    /// The schema of an array's members: that of the first, after a look at the others.
    fn items(&self, key: Option<&str>, nodes: &[Node]) -> Result<Schema, Heterogeneous> {
        let mut present = nodes.iter().filter(|node| **node != Node::Null);
        let Some(first) = present.next() else {
            return self.schema(None, &Node::Null)?.ok_or(Heterogeneous);
        };
        let number = |node: &Node| match node {
            Node::Int(number) => u8::from(i32::try_from(*number).is_err()),
            _ => 2,
        };
        for node in present {
            let alike = match (first, node) {
                (
                    Node::Int(_) | Node::Huge | Node::Double(_),
                    Node::Int(_) | Node::Huge | Node::Double(_),
                ) => number(first) == number(node),
                _ => std::mem::discriminant(first) == std::mem::discriminant(node),
            };
            if !alike {
                return Err(Heterogeneous);
            }
        }
        if !matches!(first, Node::Object(_)) {
            return self.schema(None, first)?.ok_or(Heterogeneous);
        }
        let mut distinct: Vec<Schema> = Vec::new();
        for node in nodes {
            if let Node::Object(members) = node {
                let schema = self.object(key, members)?;
                if !distinct.contains(&schema) {
                    distinct.push(schema);
                }
            }
        }
        distinct.into_iter().reduce(merge).ok_or(Heterogeneous)
    }
}

/// One schema for members with different fields. Debezium merges them in the order of a hash set; here it is that of
/// the array.
fn merge(left: Schema, right: Schema) -> Schema {
    let (Kind::Struct(mut fields), Kind::Struct(more)) = (left.kind, right.kind) else {
        unreachable!("objects")
    };
    for (name, schema) in more {
        match fields.iter_mut().find(|(known, _)| *known == name) {
            None => fields.push((name, schema)),
            // A field that was null so far.
            Some((_, known)) if known.kind == Kind::Bytes && schema.kind != Kind::Bytes => *known = schema,
            Some(_) => {}
        }
    }
    Schema { name: left.name, ..Schema::new(Kind::Struct(fields), false) }
}

/// The value, if it fits.
fn fill(node: &Node, schema: &Schema) -> Option<Value> {
    let value = match (node, &schema.kind) {
        (Node::Null, _) => Value::Null,
        (Node::Boolean(value), _) => Value::Boolean(*value),
        (Node::Int(number), Kind::Int32) => Value::Int(i64::from(i32::try_from(*number).ok()?)),
        // Java has an Integer here where it is small, which is no Long.
        (Node::Int(number), Kind::Int64) if i32::try_from(*number).is_err() => Value::Int(*number),
        (Node::Double(number), Kind::Float64) => Value::Float64(*number),
        (Node::Text(text), _) => Value::Text(Bytes::copy_from_slice(text.as_bytes())),
        (Node::Array(nodes), Kind::Array(items)) => {
            Value::Array(nodes.iter().map(|node| fill(node, items)).collect::<Option<_>>()?)
        }
        (Node::Object(members), Kind::Struct(fields)) => {
            let of = |name: &str| members.iter().find(|(known, _)| known == name).map(|(_, node)| node);
            let values = fields.iter().map(|(name, schema)| fill(of(name).unwrap_or(&Node::Null), schema));
            Value::Struct(values.collect::<Option<_>>()?)
        }
        _ => return None,
    };
    schema.takes(&value).then_some(value)
}

/// Reads the first value of a text, as Jackson does; what follows it is not looked at.
struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn value(&mut self, depth: usize) -> Option<Node> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.blanks();
        match self.peek()? {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => self.string().map(Node::Text),
            b't' => self.word("true", Node::Boolean(true)),
            b'f' => self.word("false", Node::Boolean(false)),
            b'n' => self.word("null", Node::Null),
            _ => self.number(),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Node> {
        let mut members: Vec<(String, Node)> = Vec::new();
        self.at += 1;
        self.blanks();
        if self.eat(b'}') {
            return Some(Node::Object(members));
        }
        loop {
            self.blanks();
            let name = self.string()?;
            self.blanks();
            self.eat(b':').then_some(())?;
            let node = self.value(depth + 1)?;
            // A name that comes again keeps its place and gets the later value.
            match members.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = node,
                None => members.push((name, node)),
            }
            self.blanks();
            if self.eat(b'}') {
                return Some(Node::Object(members));
            }
            self.eat(b',').then_some(())?;
        }
    }

    fn array(&mut self, depth: usize) -> Option<Node> {
        let mut nodes = Vec::new();
        self.at += 1;
        self.blanks();
        if self.eat(b']') {
            return Some(Node::Array(nodes));
        }
        loop {
            nodes.push(self.value(depth + 1)?);
            self.blanks();
            if self.eat(b']') {
                return Some(Node::Array(nodes));
            }
            self.eat(b',').then_some(())?;
        }
    }

    /// Finds the closing quote and leaves the escapes to serde.
    fn string(&mut self) -> Option<String> {
        let begin = self.at;
        self.eat(b'"').then_some(())?;
        loop {
            match self.peek()? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        serde_json::from_str(self.text.get(begin..self.at)?).ok()
    }

    fn number(&mut self) -> Option<Node> {
        let rest = &self.text[self.at..];
        let end =
            rest.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(rest.len());
        let token = &rest[..end];
        self.at += end;
        // Whether it is a number is serde's to say.
        serde_json::from_str::<serde::de::IgnoredAny>(token).ok()?;
        if token.contains(['.', 'e', 'E']) {
            return token.parse().ok().map(Node::Double);
        }
        Some(token.parse().map_or(Node::Huge, Node::Int))
    }

    fn word(&mut self, word: &str, node: Node) -> Option<Node> {
        self.text[self.at..].starts_with(word).then(|| {
            self.at += word.len();
            node
        })
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_texts_stay_text() {
        let deep = "[".repeat(100_000);
        for text in [
            "",
            "{",
            "[1",
            r#"{"a"}"#,
            r#"{"a":tru}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":1e}"#,
            r#"{"é\"#,
            "{\"a\":\"\n\"}",
            &deep,
        ] {
            assert_eq!(expand("payload", text.as_bytes(), false), Expanded::Unchanged, "{text:.20}");
        }
    }
}
