//! The short run: the corpus, what a sound pool would hold, and seeded changes of both. Without coverage; libFuzzer has that.
#![allow(clippy::unwrap_used)]

use super::{HEADER_SIZE, LIVE_HEADER_SIZE, TARGETS};
use std::path::Path;
use varve_format::{EntryMeta, InodeKey, LogOp, LogSeq};
use varve_ipc::{ClientKind, Hello, LeaseMode, MediatedOp, Request, Response, Want};
use zerocopy::IntoBytes;

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn entries() -> Vec<u8> {
    let mut log = vec![0; LIVE_HEADER_SIZE];
    let key = InodeKey::new(20, 1);
    let ops = [
        LogOp::Write {
            key,
            offset: 5,
            data: b"some bytes",
        },
        LogOp::Create {
            dir: InodeKey::ROOT,
            name: b"name",
            key,
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            rdev: 0,
            target: b"",
        },
        LogOp::Rename {
            dir: InodeKey::ROOT,
            name: b"name",
            key,
            new_dir: key,
            new_name: b"other",
            victim: Some(key),
            exchange: true,
        },
        LogOp::SetXattr {
            key,
            name: b"user.k",
            value: b"v",
        },
        LogOp::Truncate { key, size: 9 },
        LogOp::Forget { key },
    ];
    for (index, op) in ops.iter().enumerate() {
        let mut body = Vec::new();
        op.encode_body(&mut body);
        let meta = EntryMeta {
            seq: LogSeq(index as u64 + 1),
            ..EntryMeta::default()
        };
        log.extend_from_slice(op.header(&meta, body.len()).as_bytes());
        log.extend_from_slice(&body);
        log.extend_from_slice(op.data());
        log.resize(log.len().next_multiple_of(HEADER_SIZE), 0);
    }
    log
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let message = |kind: u8, bytes: Vec<u8>| [vec![kind], bytes].concat();
    let request = |request: &Request| message(0, postcard::to_allocvec(&(7_u64, request)).unwrap());
    match target {
        "log_scan" | "log_op" => vec![entries(), entries()[LIVE_HEADER_SIZE..].to_vec()],
        "messages" => vec![
            request(&Request::Hello(Hello {
                version: 1,
                kind: ClientKind::Shim,
                read_only: false,
                resume: Some(5),
                held: vec![InodeKey::ROOT],
            })),
            request(&Request::Acquire {
                wants: vec![Want {
                    key: InodeKey::ROOT,
                    mode: LeaseMode::Write,
                }],
            }),
            request(&Request::Mediate(MediatedOp {
                entry: entries(),
                append: true,
                cred: varve_ipc::Cred::root(),
                number: 3,
            })),
            message(1, postcard::to_allocvec(&Response::Bytes(vec![1, 2, 3])).unwrap()),
        ],
        "settings" => vec![
            b"lease_ms = 300\nplacement_high_percent = 80\n".to_vec(),
            b"1.5T\n64G\n0".to_vec(),
            b"shm:2G\n/dev/nvme0n1p3\n16G".to_vec(),
        ],
        _ => vec![vec![0; 600], (0..=255).collect()],
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<_> = files.map(|file| file.path()).collect();
    paths.sort();
    let mut all = seeds(target);
    all.extend(paths.iter().map(|path| std::fs::read(path).unwrap()));
    all
}

fn change(data: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    for _ in 0..=rng.below(5) {
        let at = rng.below(data.len());
        match rng.below(8) {
            0 => data.truncate(at),
            1 => data.extend_from_slice(&other[rng.below(other.len())..]),
            2 if !data.is_empty() => {
                let word = [0, 1, u64::MAX, 1 << 63, rng.next(), 4096][rng.below(6)].to_le_bytes();
                let len = word.len().min(data.len() - at);
                data[at..at + len].copy_from_slice(&word[..len]);
            }
            3 if !data.is_empty() => {
                let len = rng.below(64).min(data.len() - at);
                let part = data[at..at + len].to_vec();
                data.splice(at..at, part);
            }
            4 if !data.is_empty() => {
                let len = rng.below(64).min(data.len() - at);
                data.drain(at..at + len);
            }
            _ if !data.is_empty() => data[at] = rng.next() as u8,
            _ => data.push(rng.next() as u8),
        }
    }
    data.truncate(64 << 10);
}

#[test]
fn parsers_bear_whatever_they_are_given() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let rounds = number("VARVE_PARSER_ROUNDS").unwrap_or(20_000);
    let mut rng = Rng(number("VARVE_SEED").unwrap_or(1));
    for (name, target) in TARGETS {
        let mut all = corpus(name);
        all.iter().for_each(|data| target(data));
        for _ in 0..rounds {
            let mut data = all[rng.below(all.len())].clone();
            let other = all[rng.below(all.len())].clone();
            change(&mut data, &other, &mut rng);
            target(&data);
            if rng.below(20) == 0 && all.len() < 500 {
                all.push(data);
            }
        }
    }
}

#[test]
fn every_target_has_its_program_and_corpus() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, _) in TARGETS {
        let program = std::fs::read_to_string(root.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(program.contains(&format!("varve_fuzz::{name}(data)")));
        let bytes: u64 = std::fs::read_dir(root.join("corpus").join(name))
            .into_iter()
            .flatten()
            .flatten()
            .map(|file| file.metadata().unwrap().len())
            .sum();
        assert!(
            bytes < 256 << 10,
            "the corpus of {name} has {bytes} bytes: it is to be kept small"
        );
    }
    assert_eq!(
        std::fs::read_dir(root.join("fuzz_targets")).unwrap().count(),
        TARGETS.len()
    );
}
