//! What a cache store reads from its devices: objects in a segment, and every structure about them. Owns what
//! must hold whatever the bytes say: a store opens or is refused, every look ends, what is found has the key
//! that was asked for, and, as long as nobody forged an object, a body that was put under it.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use varve_cache::device::{Device, MemoryDevice, MovingDevice};
use varve_cache::store::object::{KEY_MAX, Record, TAGS_MAX, head_bytes, read_frame, write_frame};
use varve_cache::store::{Area, Superblock};
use varve_cache::{Cache, Options, Policy, PutOptions, Related, Scope, StorePlan};

const STORE_ID: u64 = 7;
const LEN: u64 = 3 << 20;
const PAGE: usize = 4096;
/// Bytes of a page that is sealed at its end.
const CONTENT: usize = PAGE - 16;
const KEYS: u64 = 160;

fn crc_without(bytes: &[u8], hole: std::ops::Range<usize>) -> u32 {
    let crc = crc32c::crc32c(&bytes[..hole.start]);
    let crc = crc32c::crc32c_append(crc, &vec![0; hole.len()]);
    crc32c::crc32c_append(crc, &bytes[hole.end..])
}

fn set_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn get_u16(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// Makes magic, store, lengths and checksums of the object at the beginning right. Gives how long it is.
fn mend(bytes: &mut [u8]) -> Option<usize> {
    if bytes.len() < head_bytes(0, 0) {
        return None;
    }
    let mut model = Vec::new();
    Record::new(STORE_ID, 1, b"", &[]).rewrite_head(&mut model);
    bytes[..4].copy_from_slice(&model[..4]);
    bytes[8..16].copy_from_slice(&model[8..16]);
    let tags = get_u16(bytes, 78) % (TAGS_MAX + 1);
    let key_len = get_u16(bytes, 76) % (KEY_MAX + 1);
    bytes[78..80].copy_from_slice(&(tags as u16).to_le_bytes());
    bytes[76..78].copy_from_slice(&(key_len as u16).to_le_bytes());
    let head = head_bytes(key_len, tags);
    let rest = bytes.len().checked_sub(head)?;
    let inline = u32::from_le_bytes(bytes[68..72].try_into().ok()?) as usize % (rest + 1);
    set_u32(bytes, 68, inline as u32);
    if bytes[64].is_multiple_of(2) {
        // Content that is as long as what lies beside the head, or longer.
        set_u32(bytes, 64, 0);
        let body = u64::from_le_bytes(bytes[40..48].try_into().ok()?) % (1 << 40);
        bytes[40..48].copy_from_slice(&body.max(inline as u64).to_le_bytes());
    }
    let inline_crc = crc32c::crc32c(&bytes[head..head + inline]);
    set_u32(bytes, 72, inline_crc);
    let crc = crc_without(&bytes[..head], 4..8);
    set_u32(bytes, 4, crc);
    Some(head + inline)
}

/// A segment: objects one after the other, with checksums as they are and made right; then the same bytes as
/// frames.
pub fn cache_objects(data: &[u8]) -> bool {
    let mut taken = false;
    let mut bytes = data.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &mut bytes[at..];
        if let Some(record) = Record::parse(STORE_ID, rest) {
            let _ = record.inline(rest);
        }
        let Some(len) = mend(rest) else { break };
        if let Some(mut record) = Record::parse(STORE_ID, rest) {
            assert!(record.key.len() <= KEY_MAX && record.tags.len() <= TAGS_MAX);
            assert!(record.content_len() >= u64::from(record.head.inline_len));
            let inline = record.inline(rest).expect("its checksum was made right").to_vec();
            let mut again = Vec::new();
            record.write(&inline, &mut again);
            assert_eq!(again, rest[..len], "what was read is written the same");
            taken = true;
        }
        at += len.next_multiple_of(512);
    }
    for (index, frame) in data.chunks(512).enumerate() {
        let (version, index) = (frame.len() as u64, index as u32);
        assert!(read_frame(version, index, frame, frame.len()).is_none_or(|read| read.len() == frame.len()));
        let mut made = Vec::new();
        write_frame(version, index, frame, &mut made);
        assert_eq!(read_frame(version, index, &made, frame.len()), Some(frame));
        assert_eq!(read_frame(version + 1, index, &made, frame.len()), None);
    }
    taken
}

/// Segments as a sound store has them.
#[cfg(test)]
pub(crate) fn segments() -> Vec<Vec<u8>> {
    let object = |key: &[u8], tags: &[u64], inline: &[u8], body_len: u64| {
        let mut record = Record::new(STORE_ID, 9, key, tags);
        record.head.body_len = body_len;
        let mut bytes = Vec::new();
        record.write(inline, &mut bytes);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    };
    vec![
        object(b"key", &[], b"content", 7),
        [
            object(b"http://example.org/", &[1, 2], b"content", 100_000),
            object(b"k", &[3], &[5; 700], 700),
        ]
        .concat(),
    ]
}

fn key(n: u64) -> Vec<u8> {
    format!("k{n}").into_bytes()
}

fn body(n: u64, version: u64) -> Vec<u8> {
    let len = match n % 40 {
        0 => 150_000,
        _ => 300 + 40 * (n as usize % 50),
    };
    let word = (n << 8 | version).to_le_bytes();
    word.iter().copied().cycle().take(len).collect()
}

fn options() -> Options {
    Options {
        hot_bytes: 64 << 10,
        flush_interval: Duration::from_secs(1 << 30),
        clock: Arc::new(|| 1_000_000),
        ..Options::default()
    }
}

/// A policy, and whether its store is on a file of a pool, with a device aside.
type Case = (Policy, bool);

/// On a device each policy, and on a pool those that do something else there.
fn cases() -> Vec<Case> {
    let on_pool = Policy::ALL.into_iter().filter(|policy| policy.leaves_index());
    let alone = Policy::ALL.into_iter().map(|policy| (policy, false));
    alone.chain(on_pool.map(|policy| (policy, true))).collect()
}

/// A store's device on a medium.
fn device((_, on_pool): Case, medium: Arc<MemoryDevice>) -> Arc<dyn Device> {
    match on_pool {
        true => Arc::new(MovingDevice::new(medium)),
        false => medium,
    }
}

/// A sound store of a policy, with a journal that has to be read.
struct Sound {
    image: MemoryDevice,
    layout: Superblock,
}

fn sound(case: Case) -> &'static Sound {
    static ALL: OnceLock<HashMap<Case, Sound>> = OnceLock::new();
    let all = ALL.get_or_init(|| cases().into_iter().map(|case| (case, make(case))).collect());
    &all[&case]
}

fn make(case: Case) -> Sound {
    let (policy, _) = case;
    let medium = Arc::new(MemoryDevice::new(LEN));
    let device = device(case, medium.clone());
    let mut plan = StorePlan::new(policy);
    (plan.segment_bytes, plan.object_bytes, plan.block_bytes) = (128 << 10, 2048, 4096);
    let formatted = Cache::format_with(&[&*device as &dyn Device], &plan, true, [3; 16]);
    formatted.expect("it is large enough");
    let mut image = None;
    for life in 0..2 {
        let opened = Cache::open(vec![device.clone()], &options(), false);
        let (cache, _) = opened.expect("it is sound");
        for n in 0..KEYS {
            let tag = [(n % 4) as u8];
            let options = PutOptions {
                tags: &[&tag],
                ..PutOptions::default()
            };
            let done = cache.put(&key(n), &body(n, life), options);
            done.expect("keys are short");
        }
        let group: Vec<_> = (0..4).map(|n| (key(n), body(n, life))).collect();
        let group: Vec<_> = group
            .iter()
            .map(|(key, body)| Related {
                key,
                body,
                options: PutOptions::default(),
            })
            .collect();
        cache.put_related(&group).expect("keys are short");
        cache.purge(Scope::Tag(&[3])).expect("memory does not fail");
        // The second life ends by a kill.
        image = Some(medium.copy());
    }
    Sound {
        layout: Superblock::read(&*device).expect("it is sound").0,
        image: image.expect("there were lives"),
    }
}

/// The structures that an input can change: their places, and how each is sealed.
fn areas((_, on_pool): Case, layout: &Superblock) -> [(Vec<Area>, Seal); 7] {
    let mut positions = layout.positions_file;
    if on_pool {
        // Behind its head.
        positions.off = MovingDevice::main_bytes(LEN) + PAGE as u64;
    }
    let superblock = Area {
        off: 0,
        len: 2 * PAGE as u64,
    };
    let part = |area: Area, from: u64| Area {
        off: area.off + from * PAGE as u64,
        len: area.len - from * PAGE as u64,
    };
    let heads = layout.checkpoint.map(|area| Area {
        len: 2 * PAGE as u64,
        ..area
    });
    [
        (vec![superblock], Seal::Superblock),
        (layout.journal.to_vec(), Seal::Journal),
        (heads.to_vec(), Seal::CheckpointHead),
        (layout.checkpoint.map(|area| part(area, 2)).to_vec(), Seal::Page),
        (vec![positions], Seal::Page),
        (vec![layout.table], Seal::Object),
        (vec![layout.log], Seal::Object),
    ]
}

#[derive(Clone, Copy, PartialEq)]
enum Seal {
    Superblock,
    Journal,
    CheckpointHead,
    Page,
    Object,
}

/// Makes the checksum of a page right.
fn seal(kind: Seal, page: &mut [u8], store_id: u64, number: u64) {
    match kind {
        Seal::Superblock => {
            let end = size_of::<Superblock>() - 4;
            let crc = crc32c::crc32c(&page[..end]);
            set_u32(page, end, crc);
        }
        Seal::Journal => {
            let crc = crc_without(page, 4..8);
            set_u32(page, 4, crc);
        }
        Seal::CheckpointHead => {
            let crc = crc_without(&page[..88], 4..8);
            set_u32(page, 4, crc);
        }
        Seal::Page => {
            page[CONTENT..CONTENT + 8].copy_from_slice(&number.to_le_bytes());
            let sequence = page[CONTENT + 8..CONTENT + 12].to_vec();
            let crc = crc32c::crc32c(&page[..CONTENT]);
            let crc = crc32c::crc32c_append(crc, &store_id.to_le_bytes());
            let crc = crc32c::crc32c_append(crc, &sequence);
            let crc = crc32c::crc32c_append(crc, &number.to_le_bytes());
            set_u32(page, CONTENT + 12, crc);
        }
        Seal::Object => {
            let head = head_bytes(get_u16(page, 76), get_u16(page, 78)).min(PAGE);
            let crc = crc_without(&page[..head], 4..8);
            set_u32(page, 4, crc);
        }
    }
}

/// One change of an input: a structure, a page of it, a place in the page, what comes there, and whether the
/// checksum is made right.
struct Change<'d> {
    area: u8,
    page: u8,
    at: u16,
    bytes: &'d [u8],
}

fn changes(mut data: &[u8]) -> Vec<Change<'_>> {
    let mut found = Vec::new();
    while let Some(([area, page, low, high, len], rest)) = data.split_first_chunk::<5>() {
        let (bytes, after) = rest.split_at(usize::from(*len).min(rest.len()));
        found.push(Change {
            area: *area,
            page: *page,
            at: u16::from_le_bytes([*low, *high]),
            bytes,
        });
        data = after;
    }
    found
}

/// A store with some pages changed: the first byte says which policy, `changes` read the others. Whether it
/// opened with something in it.
pub fn cache_store(data: &[u8]) -> bool {
    let Some((first, rest)) = data.split_first() else {
        return false;
    };
    let all = cases();
    let case = all[usize::from(*first) % all.len()];
    let policy = case.0;
    let Sound { image, layout } = sound(case);
    let image = Arc::new(image.copy());
    let areas = areas(case, layout);
    let mut forged = false;
    for change in changes(rest).iter().take(16) {
        let (places, kind) = &areas[usize::from(change.area & 0x7f) % areas.len()];
        for place in places.iter().filter(|place| place.len > 0) {
            let number = u64::from(change.page) % (place.len / PAGE as u64);
            let off = place.off + number * PAGE as u64;
            let mut page = vec![0; PAGE];
            image.read_at(off, &mut page).expect("it is within the device");
            let at = usize::from(change.at) % PAGE;
            let len = change.bytes.len().min(PAGE - at);
            page[at..at + len].copy_from_slice(&change.bytes[..len]);
            if change.area & 0x80 == 0 {
                let is_aside = place.off >= layout.log.off + layout.log.len;
                let id = if is_aside {
                    layout.positions_id()
                } else {
                    layout.store_id
                };
                seal(*kind, &mut page, id, number);
                forged |= *kind == Seal::Object || *kind == Seal::Superblock;
            }
            image.write_at(off, &page).expect("it is within the device");
        }
    }
    let devices = || vec![device(case, image.clone())];
    let mut there = 0;
    // Twice: what the first look writes is read by the second.
    for life in 2..4 {
        let Ok((cache, _)) = Cache::open(devices(), &options(), false) else {
            return false;
        };
        for n in 0..KEYS {
            let Some(hit) = cache.get(&key(n)) else { continue };
            there += 1;
            assert_eq!(hit.key(), key(n));
            if hit.body_len() > 1 << 20 {
                let _ = hit.read(0..100);
                continue;
            }
            let found = hit.body();
            let mut right = (0..=life).map(|version| body(n, version));
            assert!(
                forged
                    || found.is_err()
                    || right.any(|right| found.as_ref().is_ok_and(|found| *found == right)),
                "{policy}: key {n} gives bytes that were never put"
            );
        }
        let (mut seen, mut count) = (0, 0);
        let _ = cache.scan(|info| {
            seen += info.key.len();
            count += 1;
        });
        assert!(count <= LEN / 512 && seen <= LEN as usize);
        if !forged {
            let _ = cache.check();
        }
        for n in 0..8 {
            let done = cache.put(&key(n), &body(n, life), PutOptions::default());
            done.expect("keys are short");
            if let Some(found) = cache.get_body(&key(n)) {
                assert_eq!(found, body(n, life), "{policy}: what was put just now");
            }
        }
        let _ = cache.remove(&key(9)).and_then(|()| cache.purge(Scope::Tag(&[2])));
        assert!(cache.get(&key(9)).is_none());
        let _ = cache.close();
    }
    there > 0
}

/// Changes that leave the store as it was.
#[cfg(test)]
pub(crate) fn pages() -> Vec<Vec<u8>> {
    let all = cases();
    let mut inputs: Vec<Vec<u8>> = (0..all.len() as u8).map(|case| vec![case]).collect();
    for (area, policy) in [
        (0, 4),
        (1, 4),
        (2, 7),
        (3, 5),
        (4, 5),
        (5, 2),
        (6, 6),
        (0, 9),
        (4, 9),
    ] {
        let case = all[usize::from(policy)];
        let (places, _) = &areas(case, &sound(case).layout)[usize::from(area)];
        assert!(places[0].len > 0, "a policy that has it");
        inputs.push(vec![policy, area, 0, 0, 0, 0]);
        if area >= 4 {
            // Damage that costs an object or two.
            inputs.push(vec![policy, area | 0x80, 1, 20, 0, 2, 0xab, 0xcd]);
        }
    }
    inputs
}
