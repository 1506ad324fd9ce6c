//! `varve debug`: structures of a stopped pool as they lie on the media, and sessions of a running one.

mod log;
mod session;

use crate::cli::DebugWhat;
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::Path;
use varve_format::inode::{Content, InodeSlot};
use varve_format::superblock::{FEATURES_VERSION, SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock};
use varve_format::{BLOCK_BYTES, FileBlock, Ino, Tier};
use varve_kernelfs::pool::{explain, uuid_text};
use varve_store::{OpenOptions, Store};

/// Entries requested from the store at once.
const PAGE: usize = 512;

/// `varve debug`.
pub fn debug(what: &DebugWhat) -> anyhow::Result<()> {
    match what {
        DebugWhat::Super { pool, json } => superblock(pool, *json),
        DebugWhat::Log { pool, json } => log::print(pool, *json),
        DebugWhat::Session { pool, id, json } => session::print(pool, *id, *json),
        DebugWhat::Inode { pool, ino, json } => {
            with_store(pool, |store| inode(store, Ino::of_number(*ino), *json))
        }
        DebugWhat::Dir { pool, ino, json } => {
            with_store(pool, |store| dir(store, Ino::of_number(*ino), *json))
        }
        DebugWhat::Tree { pool, ino, json } => {
            with_store(pool, |store| tree(store, Ino::of_number(*ino), *json))
        }
    }
}

/// Opens a pool; refuses one that is being served, as it changes during reading.
fn stopped(at: &Path) -> anyhow::Result<Pool> {
    let pool = Pool::open(at)?;
    if pool.has_daemon() {
        bail!(
            "{0} is being served; stop it first (`varve down {0}`)",
            pool.dir().display()
        );
    }
    Ok(pool)
}

fn with_store(at: &Path, work: impl FnOnce(&Store) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let pool = stopped(at)?;
    let _lock = pool.host().lock()?;
    let options = OpenOptions {
        accept_journal_damage: true,
        ..OpenOptions::default()
    };
    let (store, report) = Store::open(pool.host().devices_for_looking()?, options)
        .map_err(|error| explain(pool.host(), error))?;
    if let Some(damage) = report.damage {
        out::note(&format!("varve: {damage}"));
    }
    work(&store)
}

fn superblock(at: &Path, as_json: bool) -> anyhow::Result<()> {
    let pool = stopped(at)?;
    let _lock = pool.host().lock()?;
    let devices = pool.host().devices_for_looking()?;
    let mut copies = Vec::new();
    for block in SUPERBLOCK_BLOCKS {
        let mut bytes = [0; SUPERBLOCK_SIZE];
        devices
            .nvm
            .read(block * BLOCK_BYTES, &mut bytes)
            .context("cannot read the superblock")?;
        copies.push(match Superblock::parse(&bytes) {
            Ok(sb) => fields(&sb),
            Err(error) => json!({ "fault": error.to_string() }),
        });
    }
    if as_json {
        out::line(&format!("{:#}", json!({ "copies": copies })));
        return Ok(());
    }
    for (number, copy) in copies.iter().enumerate() {
        out::line(&format!(
            "copy {number} (NVM block {})",
            SUPERBLOCK_BLOCKS[number]
        ));
        out::line(indented(copy).trim_end());
    }
    Ok(())
}

fn fields(sb: &Superblock) -> Value {
    let area = |area: &varve_format::superblock::Area| json!([area.start.get(), area.blocks.get()]);
    let tiers: serde_json::Map<_, _> = Tier::ALL
        .into_iter()
        .filter(|tier| sb.tier(*tier).blocks.get() > 0)
        .map(|tier| {
            let row = sb.tier(tier);
            let value = json!({
                "blocks": row.blocks.get(),
                "unit_blocks": row.unit_blocks.get(),
                "bitmap": area(&row.bitmap),
                "checksums": area(&row.checksums),
                "units": area(&row.units),
            });
            (tier.name().to_owned(), value)
        })
        .collect();
    let mut all = json!({
        "version": sb.version.get(),
        "sequence": sb.sequence.get(),
        "pool_uuid": uuid_text(&sb.pool_uuid),
        "created_ns": sb.created_ns.get(),
        "state": area(&sb.state),
        "sessions": area(&sb.sessions),
        "grants": area(&sb.grants),
        "first_free": sb.first_free.get(),
        "journal_bytes": sb.journal_bytes.get(),
        "crc32c": format!("{:08x}", sb.crc32c.get()),
        "tiers": tiers,
    });
    // Older versions have no feature word.
    if sb.version.get() >= FEATURES_VERSION {
        all["features"] = sb.features().names().into();
    }
    all
}

/// Formats the fields of a JSON object, one a line.
fn indented(value: &Value) -> String {
    let mut text = String::new();
    for (name, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Object(_) => {
                for (inner, value) in value.as_object().into_iter().flatten() {
                    text.push_str(&format!("  {name}.{inner:<12} {value}\n"));
                }
            }
            Value::String(string) => text.push_str(&format!("  {name:<16} {string}\n")),
            other => text.push_str(&format!("  {name:<16} {other}\n")),
        }
    }
    text
}

fn inode(store: &Store, ino: Ino, as_json: bool) -> anyhow::Result<()> {
    let value = match store.slot(ino).with_context(|| format!("inode {ino}"))? {
        InodeSlot::Free(generation) => json!({ "state": "free", "last_generation": generation.0 }),
        InodeSlot::Reserved(generation) => json!({ "state": "reserved", "generation": generation.0 }),
        InodeSlot::Used(inode) => {
            let content = match &inode.content {
                Content::File(root) => json!({ "file": format!("{:?}", root.form()) }),
                Content::Dir(root) => json!({ "directory": format!("{root:?}") }),
                Content::Symlink(target) => json!({ "symlink": String::from_utf8_lossy(target) }),
                Content::SymlinkBlock(block) => json!({ "symlink_block": block.0 }),
            };
            let xattrs = store.xattr_list(ino).context("extended attributes")?;
            let names: Vec<_> = xattrs
                .iter()
                .map(|(name, _)| String::from_utf8_lossy(name).into_owned())
                .collect();
            json!({
                "state": "used",
                "kind": format!("{:?}", inode.attr.kind()),
                "attr": serde_json::to_value(&inode.attr)?,
                "mode_octal": format!("{:o}", inode.attr.mode),
                "content": content,
                "xattrs": names,
                "orphan": inode.orphan.map(|links| [links.prev.0, links.next.0]),
            })
        }
    };
    out::line(&if as_json {
        format!("{value:#}")
    } else {
        format!("inode {ino}\n{}", indented(&value).trim_end())
    });
    Ok(())
}

fn dir(store: &Store, ino: Ino, as_json: bool) -> anyhow::Result<()> {
    let mut entries = Vec::new();
    let mut cookie = 0;
    loop {
        let page = store
            .dir_iter(ino, cookie, PAGE)
            .with_context(|| format!("directory {ino}"))?;
        let Some(last) = page.last() else { break };
        cookie = last.cookie;
        for item in &page {
            let name = String::from_utf8_lossy(&item.name).into_owned();
            let kind = format!("{:?}", item.kind).to_lowercase();
            if as_json {
                entries.push(
                    json!({ "name": name, "ino": item.key.ino.0, "generation": item.key.generation.0,
                    "kind": kind, "cookie": item.cookie }),
                );
            } else {
                out::line(&format!("{:<14} {kind:<10} {name:?}", item.key.to_string()));
            }
        }
    }
    if as_json {
        out::line(&format!("{:#}", json!({ "ino": ino.0, "entries": entries })));
    }
    Ok(())
}

fn tree(store: &Store, ino: Ino, as_json: bool) -> anyhow::Result<()> {
    let mut extents = Vec::new();
    let mut from = FileBlock(0);
    if !as_json {
        out::line("file block       blocks  tier          block  flags");
    }
    loop {
        let page = store
            .map(ino, from, PAGE)
            .with_context(|| format!("extents of inode {ino}"))?;
        let Some(last) = page.last() else { break };
        from = last.end();
        for extent in &page {
            if as_json {
                extents.push(json!({ "file_block": extent.file_block.0, "blocks": extent.len,
                    "tier": extent.tier.name(), "block": extent.block.0, "flags": extent.flags.bits() }));
            } else {
                out::line(&format!(
                    "{:>10} {:>12}  {:<4} {:>14}  {:#x}",
                    extent.file_block.0,
                    extent.len,
                    extent.tier.name(),
                    extent.block.0,
                    extent.flags.bits()
                ));
            }
        }
    }
    if as_json {
        out::line(&format!("{:#}", json!({ "ino": ino.0, "extents": extents })));
    }
    Ok(())
}
