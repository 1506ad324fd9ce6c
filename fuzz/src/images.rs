//! Images of machines and what is kept of them (`varve dedup cluster`), which anybody may have made. Owns
//! what must hold whatever the bytes say: reading ends, twice the same, with a profile that is sound, and a
//! manifest that is taken in can be clustered.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use varve_similarity::image::{Form, Profile};
use varve_similarity::input::{InputError, Limits, read};
use varve_similarity::manifest::{Manifest, VERSION};
use varve_similarity::measure::Held;
use varve_similarity::similar::{Difference, nearest};

/// Bounds that small inputs reach.
fn limits() -> Limits {
    Limits {
        time: Duration::from_secs(9),
        memory_bytes: 1 << 30,
        depth: 8,
        entries: 2000,
        expansion: 60,
        elements: 256,
    }
}

/// What is as long as the corpus' disks has zeros behind it, so that they can be kept without.
const DISK_BYTES: std::ops::Range<usize> = 24 << 10..68 << 10;

fn profile(data: &[u8]) -> Result<Profile, InputError> {
    let mut bytes = data.to_vec();
    if DISK_BYTES.contains(&bytes.len()) {
        bytes.resize(DISK_BYTES.end, 0);
    }
    read("fuzzed", Rc::new(bytes), &limits())
}

/// Raw disks with partitions and ext4, qcow2, tar, compressed tar, OCI archives, lists of packages.
pub fn images(data: &[u8]) -> bool {
    let (Ok(once), Ok(again)) = (profile(data), profile(data)) else {
        return false;
    };
    assert!(once.is_sound());
    assert_eq!(once, again);
    once.files > 0 || !once.packages.is_empty() || once.form != Form::Blocks
}

/// Bytes of a manifest before its body.
#[cfg(test)]
const HEAD_BYTES: usize = 24;

/// A manifest's body, behind a head that is made right.
fn sealed(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"VARVECLU".to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(crc32c::crc32c(body).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// A manifest of clusters, as it is and with its checksum made right.
pub fn clusters(data: &[u8]) -> bool {
    let path = Path::new("fuzzed");
    let _ = Manifest::from_bytes(data, path);
    let Ok(manifest) = Manifest::from_bytes(&sealed(data), path) else {
        return false;
    };
    assert_eq!(
        Manifest::from_bytes(&manifest.to_bytes(), path).ok().as_ref(),
        Some(&manifest)
    );
    let mut tree = manifest.tree();
    let views: Vec<_> = manifest
        .images()
        .filter_map(|(id, _)| tree.view(id).cloned())
        .collect();
    let held = Held::of(views.iter().map(|view| &**view));
    assert!(held.saved() >= -1e-6 * held.apart.max(1.0), "{held:?}");
    if let Some(view) = views.first() {
        assert_eq!(nearest(&manifest, view, None).len(), manifest.len());
    }
    for (_, listed) in manifest.images().take(2) {
        let _ = Difference::of(&listed.profile, &Profile::default());
    }
    let ids: Vec<_> = manifest.images().map(|(id, _)| id).collect();
    assert_eq!(tree.len(), ids.len());
    for id in &ids {
        assert!(tree.remove(*id));
    }
    assert!(tree.is_empty());
    true
}

/// Bodies of manifests of no, one and three images.
#[cfg(test)]
pub fn manifests() -> Vec<Vec<u8>> {
    use varve_similarity::manifest::Listed;
    use varve_similarity::measure::Weigh;
    use varve_similarity::tree::Settings;
    let of = |count: u64| {
        let mut manifest = Manifest::new(Settings::default(), Weigh::Mix);
        for n in 0..count {
            let mut profile = match count {
                1 => Profile::default(),
                _ => profile(&list(n)).expect("a list of packages"),
            };
            profile.name = format!("image {n}");
            profile.sketches.blocks = profile.sketches.packages.clone();
            let stamp = (n, 7);
            manifest.insert(Listed { profile, stamp });
        }
        manifest.to_bytes()[HEAD_BYTES..].to_vec()
    };
    [0, 1, 3].map(of).to_vec()
}

/// A list of packages, each number another.
#[cfg(test)]
pub fn list(n: u64) -> Vec<u8> {
    format!("libc6 2.36-9 amd64 12000000\nbash 5.2 amd64 7000000\nown-{n} 1.{n} all 1024\n").into_bytes()
}
