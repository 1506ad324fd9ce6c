//! Every operation survives encoding and parsing; malformed bytes are refused.
#![allow(clippy::unwrap_used)]
use super::*;
use crate::InodeKey;
use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};

fn round_trip(op: &LogOp<'_>) {
    let mut body = Vec::new();
    op.encode_body(&mut body);
    let meta = EntryMeta {
        seq: LogSeq(9),
        stable_below: LogSeq(4),
        ..EntryMeta::default()
    };
    let header = op.header(&meta, body.len());
    let mut payload = body;
    payload.extend_from_slice(op.data());
    assert_eq!(LogOp::parse(&header, &payload).as_ref(), Ok(op));
    assert_eq!(header.stable_delta.get(), 5);
}

#[test]
fn operations_come_back_equal_when_parsed() {
    let key = InodeKey::new(7, 3);
    let dir = InodeKey::new(1, 1);
    let ops = [
        LogOp::Noop,
        LogOp::Write {
            key,
            offset: 5,
            data: b"hello",
        },
        LogOp::Truncate { key, size: 1 << 40 },
        LogOp::Fallocate {
            key,
            mode: FallocateMode::PunchHole,
            offset: 4096,
            len: 10,
        },
        LogOp::SetAttr {
            key,
            attr: SetAttr {
                mask: SetAttrMask::all(),
                mode: 0o4755,
                uid: 3,
                gid: 4,
                atime_ns: -5,
                mtime_ns: 6,
            },
        },
        LogOp::SetXattr {
            key,
            name: b"user.a",
            value: b"v",
        },
        LogOp::RemoveXattr { key, name: b"user.a" },
        LogOp::Create {
            dir,
            name: b"f",
            key,
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            rdev: 0,
            target: b"",
        },
        LogOp::Create {
            dir,
            name: b"s",
            key,
            mode: 0o120_777,
            uid: 1,
            gid: 2,
            rdev: 0,
            target: b"/x",
        },
        LogOp::Create {
            dir,
            name: b"",
            key,
            mode: 0o100_600,
            uid: 1,
            gid: 2,
            rdev: 0,
            target: b"",
        },
        LogOp::Link { dir, name: b"l", key },
        LogOp::Unlink { dir, name: b"l", key },
        LogOp::Rename {
            dir,
            name: b"a",
            key,
            new_dir: InodeKey::new(2, 2),
            new_name: b"b",
            victim: None,
            exchange: false,
        },
        LogOp::Rename {
            dir,
            name: b"a",
            key,
            new_dir: dir,
            new_name: b"b",
            victim: Some(InodeKey::new(8, 1)),
            exchange: true,
        },
        LogOp::Forget { key },
        LogOp::Unshare {
            key,
            offset: 12_288,
            len: 1 << 33,
        },
        LogOp::Defrag {
            key,
            offset: 4096,
            len: 16 << 20,
        },
        LogOp::Share {
            key,
            offset: 8192,
            source: InodeKey::new(9, 7),
            source_offset: 4096,
            len: 12_288,
            compare: true,
        },
    ];
    for op in &ops {
        round_trip(op);
    }
}

#[test]
fn bad_names_are_refused_when_parsed() {
    for name in [&b"."[..], b"..", b"a/b", b"a\0b"] {
        let op = LogOp::Link {
            dir: InodeKey::ROOT,
            name,
            key: InodeKey::new(2, 1),
        };
        let mut body = Vec::new();
        op.encode_body(&mut body);
        let header = op.header(&EntryMeta::default(), body.len());
        assert!(LogOp::parse(&header, &body).is_err());
    }
}

#[test]
fn live_header_is_refused_when_a_bit_flips() {
    let good = LiveHeader::new([1; 16], [2; 16], SessionId(3));
    assert!(good.is_valid());
    for byte in 0..LIVE_HEADER_SIZE {
        let mut bytes = [0; LIVE_HEADER_SIZE];
        bytes.copy_from_slice(good.as_bytes());
        bytes[byte] ^= 4;
        assert!(!LiveHeader::read_from_bytes(&bytes).unwrap().is_valid());
    }
}

fn any_header() -> impl Strategy<Value = [u8; HEADER_SIZE]> {
    (
        any::<[u8; 32]>(),
        any::<[u8; 32]>(),
        prop_oneof![Just(None), (0_u8..14).prop_map(Some)],
    )
        .prop_map(|(a, b, op)| {
            let mut bytes = [0; HEADER_SIZE];
            bytes[..32].copy_from_slice(&a);
            bytes[32..].copy_from_slice(&b);
            if let Some(op) = op {
                bytes[4] = op;
                bytes[5] = 0;
            }
            bytes
        })
}

proptest! {
    #[test]
    fn parse_never_panics_on_any_bytes(
        header in any_header(),
        payload in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let mut header = EntryHeader::read_from_bytes(&header).unwrap();
        header.payload_len = U32::new(payload.len() as u32);
        header.body_len = U16::new(header.body_len.get() % 401);
        let _ = LogOp::parse(&header, &payload);
    }
}
