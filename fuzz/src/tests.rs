//! The short run: the corpus, what a sound pool would hold, and seeded changes of both. Without coverage;
//! libFuzzer has that.
#![allow(clippy::unwrap_used)]

use super::pool::Pool;
use super::trees::{HASH, HEAD_BYTES, INNER, OWNER, ROOT_BYTES, TAIL_BYTES, VALUE, WHOLE};
use super::{HEADER_SIZE, LIVE_HEADER_SIZE, TARGETS};
use std::path::{Path, PathBuf};
use varve_extent_tree::{Directory, ExtentTree, MetaIo, MetaRead, TreeError, Xattrs};
use varve_format::inode::{Inode, InodeSlot};
use varve_format::journal::RangeHeader;
use varve_format::session::{GrantRow, SessionRow, SessionState};
use varve_format::state::POOL_STATE_SIZE;
use varve_format::superblock::Superblock;
use varve_format::{
    BLOCK_HEADER_SIZE, Block, BlockKind, BlockNo, DirRoot, Dirent, EntryMeta, Extent, ExtentFlags, FileBlock,
    FileKind, Ino, InodeAttr, InodeKey, LeaseNo, LogOp, LogSeq, Seal, SessionId, Tier, Top, TreeRoot,
    XattrRoot, init_block,
};
use varve_ipc::{ClientKind, ForwardedOp, Hello, LeaseMode, Near, Request, Response, Tell, Want};
use zerocopy::{FromZeros, IntoBytes};

/// Targets that open a pool or a store for each input, and how many times fewer inputs they get.
const POOLS: [&str; 6] = [
    "unit_rows",
    "unit_footers",
    "pool_state",
    "cache_store",
    "far_checkpoint",
    "far_addresses",
];
const FEWER: u64 = 20;

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

/// Operations as entries of a log have them.
fn operations() -> Vec<Vec<u8>> {
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
    let numbered = (1..).zip(&ops);
    let entry = |(seq, op): (u64, &LogOp<'_>)| {
        let mut body = Vec::new();
        op.encode_body(&mut body);
        let meta = EntryMeta {
            seq: LogSeq(seq),
            ..EntryMeta::default()
        };
        [op.header(&meta, body.len()).as_bytes(), &body, op.data()].concat()
    };
    numbered.map(entry).collect()
}

/// The beginning of a log.
fn entries() -> Vec<u8> {
    let mut log = vec![0; LIVE_HEADER_SIZE];
    for entry in operations() {
        log.extend(entry);
        log.resize(log.len().next_multiple_of(HEADER_SIZE), 0);
    }
    log
}

/// Blocks that a tree is made in.
#[derive(Default)]
struct Maker(Vec<(BlockKind, Box<Block>)>);

#[derive(Debug)]
struct Refused;

impl From<TreeError> for Refused {
    fn from(_: TreeError) -> Self {
        Self
    }
}

impl MetaRead for Maker {
    type Error = Refused;

    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R, Refused> {
        Ok(f(&self.0[block.0 as usize - 1].1))
    }
}

impl MetaIo for Maker {
    fn update<R>(&mut self, block: BlockNo, f: impl FnOnce(&mut Block) -> R) -> Result<R, Refused> {
        Ok(f(&mut self.0[block.0 as usize - 1].1))
    }

    fn alloc(&mut self, _: Option<BlockNo>, kind: BlockKind, owner: Ino) -> Result<BlockNo, Refused> {
        let no = BlockNo(self.0.len() as u64 + 1);
        let mut block: Box<Block> = Box::new([0; 4096]);
        init_block(&mut block, kind, owner, no);
        self.0.push((kind, block));
        Ok(no)
    }

    fn free(&mut self, _: BlockNo) -> Result<(), Refused> {
        Err(Refused)
    }

    fn promote(&mut self, _: BlockNo) -> Result<BlockNo, Refused> {
        Err(Refused)
    }

    fn demote(&mut self, _: BlockNo) -> Result<Option<BlockNo>, Refused> {
        Ok(None)
    }
}

impl Maker {
    /// The root and the blocks as an input has them.
    fn input(&self, root: &[u8]) -> Vec<u8> {
        let mut out = root.to_vec();
        out.resize(ROOT_BYTES, 0);
        for (kind, block) in &self.0 {
            let body = &block[BLOCK_HEADER_SIZE..];
            let (head, rest) = body.split_at(HEAD_BYTES);
            let (middle, tail) = rest.split_at(rest.len() - TAIL_BYTES);
            let whole = middle.iter().any(|byte| *byte != 0);
            let says = match kind {
                BlockKind::ExtentNode | BlockKind::DirNode | BlockKind::XattrNode => INNER,
                BlockKind::XattrValue => VALUE,
                _ => 0,
            };
            out.push(says | if whole { WHOLE } else { 0 });
            if whole {
                out.extend_from_slice(body);
            } else {
                out.extend_from_slice(head);
                out.extend_from_slice(tail);
            }
        }
        out
    }
}

/// Every second block of a file.
fn extents(count: u64) -> Vec<Extent> {
    let extent = |at: u64| Extent {
        file_block: FileBlock(at * 2),
        len: 1,
        tier: Tier::ALL[at as usize % 3],
        block: BlockNo(100 + at * 3),
        flags: ExtentFlags::empty(),
    };
    (0..count).map(extent).collect()
}

fn file(count: u64) -> Vec<u8> {
    let (mut io, mut root) = (Maker::default(), TreeRoot::EMPTY);
    let tree = ExtentTree::of(OWNER);
    for extent in extents(count) {
        let range = extent.file_block..extent.end();
        tree.replace(&mut io, &mut root, range, &[extent]).unwrap();
    }
    io.input(root.as_bytes())
}

fn directory(count: u64, len: usize) -> Vec<u8> {
    let none = Top {
        height: 0,
        block: BlockNo(0),
        nodes: 0,
    };
    let (mut io, mut root) = (Maker::default(), DirRoot::new(&none, 0));
    let tree = Directory::of(OWNER, HASH);
    for at in 0..count {
        let name = format!("{at:0len$}").into_bytes();
        let entry = Dirent {
            key: InodeKey::new(20 + at, 1),
            kind: FileKind::Regular,
            name: if at == 0 { b"name" } else { &name },
        };
        tree.insert(&mut io, &mut root, &entry).unwrap();
    }
    io.input(root.as_bytes())
}

fn attributes(lens: &[usize]) -> Vec<u8> {
    let none = Top {
        height: 0,
        block: BlockNo(0),
        nodes: 0,
    };
    let (mut io, mut root) = (Maker::default(), XattrRoot::new(&none, 0, 0));
    let tree = Xattrs::of(OWNER, HASH);
    for (at, len) in lens.iter().enumerate() {
        let name = format!("user.{at}");
        tree.set(&mut io, &mut root, name.as_bytes(), &vec![7; *len])
            .unwrap();
    }
    io.input(root.as_bytes())
}

fn images() -> Vec<Vec<u8>> {
    let used = |mode: u32| {
        let inode = Inode::new(InodeAttr::new(InodeKey::new(9, 3), mode, 0));
        InodeSlot::Used(Box::new(inode)).encode(Ino(9)).unwrap().to_vec()
    };
    [0o100_644, 0o040_755, 0o120_777].map(used).to_vec()
}

fn session_rows() -> Vec<Vec<u8>> {
    let row = SessionRow {
        id: SessionId(5),
        uid: 1,
        pid: 2,
        pid_start: 3,
        token: 4,
        state: SessionState::Sealed(Seal {
            last: LogSeq(30),
            missing: vec![varve_format::SeqRange {
                first: LogSeq(3),
                last: LogSeq(4),
            }],
        }),
        digested: LogSeq(2),
        last_forwarded: varve_format::LastForwarded::default(),
        log_bytes: 1 << 20,
        created_ns: 0,
        flags: 0,
    };
    let grant = GrantRow {
        session: SessionId(5),
        lease: LeaseNo(7),
        key: InodeKey::ROOT,
        rights: 3,
        first_seq: LogSeq(1),
        last_seq: None,
        batch: 0,
    };
    vec![row.encode().unwrap().to_vec(), grant.encode().unwrap().to_vec()]
}

/// Two ranges, behind how many they are and of how large a medium.
fn ranges() -> Vec<u8> {
    let mut payload = vec![2, 0, 0, 0, 0xff, 0xff];
    for block in [3_u64, 9] {
        let header = RangeHeader {
            block: block.into(),
            offset: 32.into(),
            len: 5.into(),
        };
        payload.extend_from_slice(header.as_bytes());
        payload.extend_from_slice(b"bytes");
    }
    payload
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let message = |kind: u8, bytes: Vec<u8>| [vec![kind], bytes].concat();
    let request = |request: &Request| message(0, postcard::to_allocvec(&(7_u64, request)).unwrap());
    match target {
        "log_scan" => vec![entries()],
        "log_op" => operations(),
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
            request(&Request::AcquireNear {
                wants: vec![Want {
                    key: InodeKey::ROOT,
                    mode: LeaseMode::Read,
                }],
                near: Near {
                    these: vec![InodeKey::ROOT],
                    after: InodeKey::ROOT.ino,
                    count: 4,
                    mode: LeaseMode::Read,
                    tell: Tell {
                        names: true,
                        extents: true,
                    },
                },
            }),
            request(&Request::Forward(ForwardedOp {
                whiteout: false,
                entry: entries(),
                append: true,
                open: true,
                cred: varve_ipc::Cred::root(),
                number: 3,
            })),
            message(1, postcard::to_allocvec(&Response::Bytes(vec![1, 2, 3])).unwrap()),
        ],
        "settings" => vec![
            b"lease_ms = 300\nplacement_high_percent = 90\nplacement_low_percent = 70\n".to_vec(),
            b"1.5T\n64G\n0".to_vec(),
            b"shm:2G\n/dev/nvme0n1p3\n16G".to_vec(),
        ],
        "superblock" => {
            let mut superblock = Superblock::new_zeroed();
            superblock.magic = Superblock::MAGIC;
            superblock.version = 1.into();
            vec![superblock.sealed().as_bytes().to_vec()]
        }
        "journal" => vec![ranges()],
        "extent_nodes" => vec![file(3), file(20), file(400)],
        "dir_nodes" => vec![
            directory(6, 8),
            directory(40, 200),
            attributes(&[5, 300]),
            attributes(&[1000, 1000, 1000, 1000, 1000, 3000]),
        ],
        "inode" => images(),
        "rows" => session_rows(),
        "unit_rows" => {
            let all = Pool::sound().unit_rows();
            vec![all[..16].to_vec(), all[..all.len() / 2].to_vec(), all]
        }
        "device_rows" => crate::devices::seeds(),
        "unit_footers" => {
            let footer = |which: u8| Pool::sound().footer(usize::from(which >> 7), u64::from(which & 0x7f));
            [0, 1, 0x80]
                .map(|which: u8| [vec![which, 0], footer(which)].concat())
                .to_vec()
        }
        "pool_state" => {
            let all = Pool::sound().state();
            let mut job = all.to_vec();
            // The job of a device that the pool does not have.
            (job[POOL_STATE_SIZE], job[POOL_STATE_SIZE + 33]) = (1, 1);
            vec![all[..72].to_vec(), all.to_vec(), job]
        }
        "cache_objects" => crate::cache::segments(),
        "cache_store" => crate::cache::pages(),
        "far_checkpoint" => crate::far_checkpoint::changes(),
        "far_addresses" => crate::far_addresses::changes(),
        "images" => vec![
            crate::images::list(0),
            b"Package: a\nStatus: install ok installed\nVersion: 1\nInstalled-Size: 5\n\n".to_vec(),
            b"C:Q1abc=\nP:musl\nV:1.2\nA:x86_64\nI:600000\n\n".to_vec(),
        ],
        "clusters" => crate::images::manifests(),
        other => panic!("no seeds of {other}"),
    }
}

fn corpus_dir(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let files = std::fs::read_dir(corpus_dir(target))
        .into_iter()
        .flatten()
        .flatten();
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
    let mut shallow = Vec::new();
    for (name, target) in TARGETS {
        let mut all = corpus(name);
        for (index, data) in all.iter().enumerate() {
            let sound = index < seeds(name).len();
            assert!(
                target(data) || !sound,
                "{name}: what a sound pool holds is refused: {index}"
            );
        }
        let rounds = rounds / if POOLS.contains(name) { FEWER } else { 1 };
        let mut taken = 0;
        for _ in 0..rounds {
            let mut data = all[rng.below(all.len())].clone();
            let other = all[rng.below(all.len())].clone();
            change(&mut data, &other, &mut rng);
            taken += u64::from(target(&data));
            if rng.below(20) == 0 && all.len() < 500 {
                all.push(data);
            }
        }
        println!("{name}: {rounds} inputs, {taken} taken in");
        if taken < rounds / 200 {
            shallow.push(name);
        }
    }
    // One that stops at its first check would find nothing.
    assert!(shallow.is_empty(), "hardly anything taken in: {shallow:?}");
}

/// Where libFuzzer begins. `VARVE_WRITE_CORPUS=1` writes it anew.
#[test]
fn corpus_has_what_a_sound_pool_holds() {
    for (name, _) in TARGETS {
        for (index, seed) in seeds(name).iter().enumerate() {
            let path = corpus_dir(name).join(format!("sound-{index}"));
            if std::env::var_os("VARVE_WRITE_CORPUS").is_some() {
                std::fs::write(&path, seed).unwrap();
            }
            assert!(
                std::fs::read(&path).is_ok_and(|bytes| bytes == *seed),
                "{}",
                path.display()
            );
        }
    }
}

/// The corpus has an image of each kind: ext4 alone, in a logical partition and in one of a GPT, qcow2 with
/// compressed clusters, tar as it is and packed, an OCI archive, an RPM database.
#[test]
fn images_of_each_kind_are_taken_in() {
    for kind in [
        "ext4", "mbr", "gpt", "qcow2", "tar", "tar-gzip", "tar-zstd", "oci", "rpm",
    ] {
        let image = std::fs::read(corpus_dir("images").join(kind)).unwrap();
        assert!(super::images(&image), "{kind}");
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
