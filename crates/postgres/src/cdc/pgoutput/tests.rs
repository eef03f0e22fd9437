use proptest::prelude::*;

use super::*;

/// Writes messages the way the server does.
fn encode(message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    let string = |out: &mut Vec<u8>, text: &str| {
        out.extend_from_slice(text.as_bytes());
        out.push(0);
    };
    match message {
        Message::Begin { final_lsn, commit_time, xid } => {
            out.push(b'B');
            out.extend(final_lsn.0.to_be_bytes());
            out.extend(commit_time.to_be_bytes());
            out.extend(xid.to_be_bytes());
        }
        Message::Commit { lsn, end_lsn, commit_time } => {
            out.extend([b'C', 0]);
            out.extend(lsn.0.to_be_bytes());
            out.extend(end_lsn.0.to_be_bytes());
            out.extend(commit_time.to_be_bytes());
        }
        Message::Origin { lsn, name } => {
            out.push(b'O');
            out.extend(lsn.0.to_be_bytes());
            string(&mut out, name);
        }
        Message::Relation(relation) => {
            out.push(b'R');
            out.extend(relation.id.to_be_bytes());
            string(&mut out, &relation.schema);
            string(&mut out, &relation.name);
            out.push(b'd');
            out.extend(i16::try_from(relation.columns.len()).unwrap().to_be_bytes());
            for column in &relation.columns {
                out.push(column.key.into());
                string(&mut out, &column.name);
                out.extend(column.type_oid.to_be_bytes());
                out.extend(column.type_modifier.to_be_bytes());
            }
        }
        Message::Type { oid, schema, name } => {
            out.push(b'Y');
            out.extend(oid.to_be_bytes());
            string(&mut out, schema);
            string(&mut out, name);
        }
        Message::Insert { relation, tuple } => {
            out.push(b'I');
            out.extend(relation.to_be_bytes());
            out.push(b'N');
            out.extend(encode_tuple(&tuple.values().collect::<Vec<_>>()));
        }
        Message::Update { relation } => {
            out.push(b'U');
            out.extend(relation.to_be_bytes());
            out.push(b'O');
            out.extend(encode_tuple(&[Value::Null, Value::Text("old".into())]));
            out.push(b'N');
            out.extend(encode_tuple(&[Value::Unchanged, Value::Binary("new".into())]));
        }
        Message::Delete { relation } => {
            out.push(b'D');
            out.extend(relation.to_be_bytes());
            out.push(b'K');
            out.extend(encode_tuple(&[Value::Text("1".into()), Value::Null]));
        }
        Message::Truncate { relations } => {
            out.push(b'T');
            out.extend(u32::try_from(relations.len()).unwrap().to_be_bytes());
            out.push(3);
            out.extend(relations.iter().flat_map(|relation| relation.to_be_bytes()));
        }
        Message::Logical { transactional, lsn, prefix, content } => {
            out.extend([b'M', u8::from(*transactional)]);
            out.extend(lsn.0.to_be_bytes());
            string(&mut out, prefix);
            out.extend(u32::try_from(content.len()).unwrap().to_be_bytes());
            out.extend_from_slice(content);
        }
    }
    out
}

fn encode_tuple(values: &[Value]) -> Vec<u8> {
    let mut out = i16::try_from(values.len()).unwrap().to_be_bytes().to_vec();
    out.extend(encode_values(values));
    out
}

fn encode_values(values: &[Value]) -> Vec<u8> {
    let mut out = Vec::new();
    for value in values {
        let (kind, bytes) = match value {
            Value::Null => (b'n', None),
            Value::Unchanged => (b'u', None),
            Value::Text(bytes) => (b't', Some(bytes)),
            Value::Binary(bytes) => (b'b', Some(bytes)),
        };
        out.push(kind);
        if let Some(bytes) = bytes {
            out.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
            out.extend_from_slice(bytes);
        }
    }
    out
}

fn tuple(values: &[Value]) -> Tuple {
    Tuple { raw: encode_values(values).into(), columns: values.len() }
}

fn any_message() -> impl Strategy<Value = Message> {
    let name = || "[a-zé \"]{0,12}";
    let lsn = || any::<u64>().prop_map(Lsn);
    let column = (name(), any::<u32>(), any::<i32>(), any::<bool>()).prop_map(
        |(name, type_oid, type_modifier, key)| RelationColumn { name, type_oid, type_modifier, key },
    );
    let bytes = || prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from);
    let value = prop_oneof![
        Just(Value::Null),
        Just(Value::Unchanged),
        bytes().prop_map(Value::Text),
        bytes().prop_map(Value::Binary)
    ];
    prop_oneof![
        (lsn(), any::<i64>(), any::<u32>()).prop_map(|(final_lsn, commit_time, xid)| Message::Begin {
            final_lsn,
            commit_time,
            xid
        }),
        (lsn(), lsn(), any::<i64>()).prop_map(|(lsn, end_lsn, commit_time)| Message::Commit {
            lsn,
            end_lsn,
            commit_time
        }),
        (lsn(), name()).prop_map(|(lsn, name)| Message::Origin { lsn, name }),
        (any::<u32>(), name(), name(), prop::collection::vec(column, 0..6)).prop_map(
            |(id, schema, name, columns)| Message::Relation(Relation { id, schema, name, columns })
        ),
        (any::<u32>(), name(), name()).prop_map(|(oid, schema, name)| Message::Type { oid, schema, name }),
        (any::<u32>(), prop::collection::vec(value, 0..8))
            .prop_map(|(relation, values)| Message::Insert { relation, tuple: tuple(&values) }),
        any::<u32>().prop_map(|relation| Message::Update { relation }),
        any::<u32>().prop_map(|relation| Message::Delete { relation }),
        prop::collection::vec(any::<u32>(), 0..6).prop_map(|relations| Message::Truncate { relations }),
        (any::<bool>(), lsn(), name(), bytes()).prop_map(|(transactional, lsn, prefix, content)| {
            Message::Logical { transactional, lsn, prefix, content }
        }),
    ]
}

/// What was read can be read on; what was refused says where, and that is inside the message.
fn check(bytes: Vec<u8>) -> Result<Option<Message>, TestCaseError> {
    let length = bytes.len();
    match parse(bytes.into()) {
        Ok(message) => {
            if let Message::Insert { tuple, .. } = &message {
                prop_assert_eq!(tuple.values().count(), tuple.len());
            }
            if let Message::Relation(relation) = &message {
                prop_assert!(relation.columns.len() * 10 <= length);
            }
            if let Message::Truncate { relations } = &message {
                prop_assert!(relations.len() * 4 <= length);
            }
            Ok(Some(message))
        }
        Err(error) => {
            prop_assert!(error.at <= length, "{}", error);
            prop_assert!(error.to_string().contains("byte"), "{}", error);
            Ok(None)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn reads_back_what_was_written(message in any_message()) {
        prop_assert_eq!(check(encode(&message))?, Some(message));
    }

    #[test]
    fn survives_any_bytes(kind in prop::sample::select(b"BCORYIUDTMSx".to_vec()),
                          mut bytes in prop::collection::vec(any::<u8>(), 0..200), keep in any::<bool>()) {
        if keep && !bytes.is_empty() {
            bytes[0] = kind;
        }
        check(bytes)?;
    }

    #[test]
    fn a_message_that_is_cut_or_grown_is_refused(message in any_message(), at in any::<prop::sample::Index>(),
                                                 extra in any::<u8>()) {
        let mut bytes = encode(&message);
        let cut = bytes[..at.index(bytes.len())].to_vec();
        prop_assert_eq!(check(cut)?, None);
        bytes.push(extra);
        prop_assert_eq!(check(bytes)?, None);
    }

    #[test]
    fn survives_flipped_bytes(message in any_message(),
                              flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = encode(&message);
        for (at, byte) in flips {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        check(bytes)?;
    }

    #[test]
    fn survives_lengths_that_lie(message in any_message(), at in any::<prop::sample::Index>(),
                                 lie in prop::sample::select(vec![-1_i32, i32::MIN, i32::MAX, 0x7FFF, 0x00FF_FFFF])) {
        let mut bytes = encode(&message);
        let at = at.index(bytes.len());
        for (byte, lie) in bytes[at..].iter_mut().zip(lie.to_be_bytes()) {
            *byte = lie;
        }
        check(bytes)?;
    }
}

#[test]
fn says_what_is_wrong_and_where() {
    let mut insert = vec![b'I', 0, 0, 0, 7, b'N', 0, 2, b't', 0, 0, 0, 2, b'o', b'k'];
    insert.extend([b't', 0x7F, 0xFF, 0xFF, 0xFF, b'x']);
    for (bytes, expected) in [
        (vec![], "pgoutput message, byte 0: it is empty"),
        (vec![b'z'], "pgoutput message `z`, byte 0: no such kind is known"),
        (vec![0xFF], "pgoutput message `\\xff`, byte 0: no such kind is known"),
        (vec![b'S', 0, 0, 0, 1, 1], "`S`, byte 0: it streams a transaction that still runs"),
        (vec![b'P', 0], "`P`, byte 0: it is about a prepared transaction"),
        (insert, "`I`, byte 20: column: 2147483647 bytes wanted, 1 left"),
        (vec![b'I', 0, 0, 0, 7, b'K', 0, 0], "`I`, byte 5: new row: found `K`, want one of `N`"),
        (vec![b'I', 0, 0, 0, 7, b'N', 0xFF, 0xFF], "`I`, byte 6: columns: the count -1 is negative"),
        (
            vec![b'I', 0, 0, 0, 7, b'N', 0, 1, b'x'],
            "`I`, byte 8: column's kind: found `x`, want one of `nutb`",
        ),
        (vec![b'B', 0, 1], "`B`, byte 1: final LSN: 8 bytes wanted, 2 left"),
        (vec![b'Y', 0, 0, 0, 1, b'a', 0xFF, 0], "`Y`, byte 6: schema: it is not UTF-8"),
        (vec![b'Y', 0, 0, 0, 1, b'a'], "`Y`, byte 5: schema: it has no end"),
        (vec![b'T', 0x7F, 0xFF, 0xFF, 0xFF, 0], "`T`, byte 6: relation: 4 bytes wanted, 0 left"),
        (vec![b'T', 0, 0, 0, 0, 0, 9], "`T`, byte 6: 1 bytes are left over"),
    ] {
        let error = parse(bytes.into()).unwrap_err().to_string();
        assert!(error.contains(expected), "`{error}` should say `{expected}`");
    }
}

#[test]
fn an_update_may_come_without_the_old_row() {
    let mut bytes = vec![b'U', 0, 0, 0, 9, b'N'];
    bytes.extend(encode_tuple(&[Value::Text("new".into())]));
    assert_eq!(parse(bytes.into()), Ok(Message::Update { relation: 9 }));
}

#[test]
fn values_and_contents_are_slices_of_the_message() {
    let body = Bytes::from(vec![b'x'; 1000]);
    let message = Message::Insert { relation: 1, tuple: tuple(&[Value::Null, Value::Text(body.clone())]) };
    let bytes = Bytes::from(encode(&message));
    let Ok(Message::Insert { tuple, .. }) = parse(bytes.clone()) else { panic!("not an insert") };
    let Some(Value::Text(value)) = tuple.values().last() else { panic!("not text") };
    assert_eq!(value, body);
    assert!(bytes.as_ptr_range().contains(&value.as_ptr()));

    let message =
        Message::Logical { transactional: true, lsn: Lsn(5), prefix: "airtight".into(), content: body };
    let bytes = Bytes::from(encode(&message));
    let Ok(Message::Logical { content, .. }) = parse(bytes.clone()) else { panic!("not a message") };
    assert!(bytes.as_ptr_range().contains(&content.as_ptr()));
}
