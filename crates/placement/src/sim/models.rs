//! Named devices. Numbers are from data sheets and the papers' figures (Fig. 2, Table V), rounded; sizes are
//! small, so that runs are short.

use super::device::{Cost, Model, Seek, Stall};
use crate::Tier;

const GIB: u64 = 1 << 30;

const fn cost(base_us: f64, kib_us: f64) -> Cost {
    Cost { base_us, kib_us }
}

/// NVM: 64 bytes in a third of a microsecond, 4 channels of 2 GB/s read and 0.6 GB/s written.
#[must_use]
pub const fn nvm() -> Model {
    Model {
        name: "NVM",
        tier: Tier::Nvm,
        total_bytes: GIB,
        parallel: 4,
        read: cost(0.5, 0.5),
        write: cost(0.5, 1.7),
        seek: None,
        stall: None,
    }
}

/// A present-day NVMe drive: 80 µs a read, 20 µs a write, 16 channels.
#[must_use]
pub const fn nvme() -> Model {
    Model {
        name: "NVMe",
        tier: Tier::Ssd,
        total_bytes: GIB,
        parallel: 16,
        read: cost(75.0, 1.2),
        write: cost(18.0, 3.0),
        seek: None,
        stall: Some(Stall {
            every_bytes: 256 << 20,
            us: 3000.0,
        }),
    }
}

/// A good SATA SSD (Intel X25-M): 250 MB/s read, 80 MB/s written, four channels read at once.
#[must_use]
pub const fn good_ssd() -> Model {
    Model {
        name: "good SSD",
        tier: Tier::Ssd,
        total_bytes: GIB,
        parallel: 4,
        read: cost(90.0, 15.0),
        write: cost(250.0, 48.0),
        seek: None,
        stall: Some(Stall {
            every_bytes: 32 << 20,
            us: 40_000.0,
        }),
    }
}

/// A middling SSD (MemoRight GT): quick reads, writes of 4 KiB in a few milliseconds.
#[must_use]
pub const fn fair_ssd() -> Model {
    Model {
        name: "fair SSD",
        tier: Tier::Ssd,
        total_bytes: GIB,
        parallel: 1,
        read: cost(150.0, 9.0),
        write: cost(2500.0, 12.0),
        seek: None,
        stall: None,
    }
}

/// A poor SSD (Transcend TS16GSSD25S): small writes as slow as a disk's, large ones slower.
#[must_use]
pub const fn poor_ssd() -> Model {
    Model {
        name: "poor SSD",
        tier: Tier::Ssd,
        total_bytes: GIB,
        parallel: 1,
        read: cost(250.0, 28.0),
        write: cost(11_000.0, 45.0),
        seek: None,
        stall: None,
    }
}

const fn disk(name: &'static str, seek: Seek, kib_us: f64) -> Model {
    Model {
        name,
        tier: Tier::Hdd,
        total_bytes: 4 * GIB,
        parallel: 1,
        read: cost(100.0, kib_us),
        write: cost(100.0, kib_us),
        seek: Some(seek),
        stall: None,
    }
}

/// A 7,200 rpm SATA disk (Samsung SP2504C): 65 MB/s.
#[must_use]
pub const fn sata_disk() -> Model {
    let seek = Seek {
        least_us: 800.0,
        most_us: 15_000.0,
        turn_us: 8333.0,
    };
    disk("7,200 rpm disk", seek, 15.0)
}

/// A 15,000 rpm SCSI disk (Fujitsu MBA3073NP): 120 MB/s.
#[must_use]
pub const fn scsi_disk() -> Model {
    let seek = Seek {
        least_us: 300.0,
        most_us: 7000.0,
        turn_us: 4000.0,
    };
    disk("15,000 rpm disk", seek, 8.0)
}

/// All models.
#[must_use]
pub fn all() -> Vec<Model> {
    vec![
        nvm(),
        nvme(),
        good_ssd(),
        fair_ssd(),
        poor_ssd(),
        sata_disk(),
        scsi_disk(),
    ]
}
