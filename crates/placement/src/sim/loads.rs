//! Loads of the papers and present-day ones, from generators of our own: similar requests, not the original
//! programs.

use super::load::{Load, Pattern, Phase, Stream};

/// A stream of a process: reads or writes of these sizes, with a pattern.
fn stream(percent: u32, read: bool, bytes: &[u32], pattern: Pattern, set: usize) -> Stream {
    Stream {
        percent,
        read,
        bytes: bytes.to_vec(),
        pattern,
        set,
        processes: 0b1111,
    }
}

const fn zipf(theta: f64, hot: u64) -> Pattern {
    Pattern::Zipf { theta, hot }
}

fn one(name: &str, sets: &[u32], seconds: u32, processes: u32, streams: Vec<Stream>) -> Load {
    Load {
        name: name.into(),
        sets: sets.to_vec(),
        phases: vec![Phase {
            seconds,
            processes,
            streams,
        }],
        think_us: 0,
    }
}

/// SPECsfs-like (Fig. 5): one read to four writes, small, by Zipf over 256 MiB.
#[must_use]
pub fn sfs(processes: u32, seconds: u32) -> Load {
    let sizes = [4096, 4096, 8192, 16384];
    let streams = vec![
        stream(20, true, &sizes, zipf(0.9, 1), 0),
        stream(80, false, &sizes, zipf(0.9, 2), 0),
    ];
    one(
        &format!("sfs 1R:4W, {processes} proc"),
        &[4096],
        seconds,
        processes,
        streams,
    )
}

/// IoZone mix (Fig. 9): four processes, of which `readers` read and the others write, each by Zipf in 64 MiB
/// of its own.
#[must_use]
pub fn iozone(readers: u32, seconds: u32) -> Load {
    let streams = (0..4).map(|process: u32| Stream {
        processes: 1 << process,
        ..stream(
            100,
            process < readers,
            &[4096, 8192],
            zipf(0.99, u64::from(process)),
            process as usize,
        )
    });
    let name = format!("iozone {readers}R{}W", 4 - readers);
    one(&name, &[1024; 4], seconds, 4, streams.collect())
}

/// Postmark-like (Tables I, II): files made, read, appended to and removed, by two processes; up to 10 kB or
/// up to 500 kB.
#[must_use]
pub fn postmark(large: bool, seconds: u32) -> Load {
    let sizes: &[u32] = if large {
        &[4096, 65536, 262_144, 491_520]
    } else {
        &[512, 4096, 8192, 10_240]
    };
    let bytes = |most: u32| sizes.iter().map(|bytes| (*bytes).min(most)).collect::<Vec<_>>();
    let mut streams = vec![
        stream(25, false, &bytes(65_536), Pattern::Create, 0),
        stream(45, true, &bytes(65_536), Pattern::Made { theta: 0.6 }, 0),
        stream(30, false, &[2048, 4096], Pattern::Made { theta: 0.6 }, 0),
    ];
    if large {
        streams.push(stream(25, true, &[262_144, 491_520], zipf(0.2, 3), 1));
    }
    let sets: &[u32] = if large { &[4096, 2048] } else { &[4096, 1] };
    one(
        if large {
            "postmark 500 kB"
        } else {
            "postmark 10 kB"
        },
        sets,
        seconds,
        2,
        streams,
    )
}

/// dbench-like (Tables III, IV): 76 reads of 12 kB to 24 writes of 26 kB, most of them to new files.
#[must_use]
pub fn dbench(processes: u32, seconds: u32) -> Load {
    let streams = vec![
        stream(45, true, &[4096, 12288, 16384], Pattern::Made { theta: 0.5 }, 0),
        stream(31, true, &[12288, 16384], zipf(0.7, 5), 1),
        stream(18, false, &[16384, 24576, 49152], Pattern::Create, 0),
        stream(6, false, &[4096, 16384], Pattern::Made { theta: 0.5 }, 0),
    ];
    one(
        &format!("dbench, {processes} proc"),
        &[3072, 1024],
        seconds,
        processes,
        streams,
    )
}

/// NetApp-trace-like (Tables III, IV): as many reads of 18 kB as writes of 6 kB, most of the writes new.
#[must_use]
pub fn netapp(processes: u32, seconds: u32) -> Load {
    one(
        &format!("netapp, {processes} proc"),
        &[4096],
        seconds,
        processes,
        netapp_streams(),
    )
}

fn netapp_streams() -> Vec<Stream> {
    vec![
        stream(47, true, &[16384, 20480], Pattern::Made { theta: 0.4 }, 0),
        stream(35, false, &[4096, 8192], Pattern::Create, 0),
        stream(18, false, &[4096, 8192], Pattern::Made { theta: 0.4 }, 0),
    ]
}

/// The NetApp-like load with one process, and from half way on with ten (Table V).
#[must_use]
pub fn changing(seconds: u32) -> Load {
    let phase = |processes| Phase {
        seconds: seconds / 2,
        processes,
        streams: netapp_streams(),
    };
    Load {
        name: "netapp, 1 then 10 proc".into(),
        sets: vec![4096],
        phases: vec![phase(1), phase(10)],
        think_us: 0,
    }
}

/// A scan by one process beside a hot set of four.
#[must_use]
pub fn scan(seconds: u32) -> Load {
    let streams = vec![
        Stream {
            processes: 0b0001,
            ..stream(100, true, &[1 << 20], Pattern::Scan, 1)
        },
        Stream {
            processes: 0b1110,
            ..stream(80, true, &[4096, 8192], zipf(0.9, 1), 0)
        },
        Stream {
            processes: 0b1110,
            ..stream(20, false, &[4096, 8192], zipf(0.9, 1), 0)
        },
    ];
    one("scan beside a hot set", &[1024, 6144], seconds, 5, streams)
}

/// A database: 8 KiB pages read and written by Zipf, a log appended to.
#[must_use]
pub fn database(seconds: u32) -> Load {
    let streams = vec![
        stream(55, true, &[8192], zipf(0.9, 1), 0),
        stream(25, false, &[8192], zipf(0.9, 1), 0),
        stream(20, false, &[4096, 8192], Pattern::Scan, 1),
    ];
    one("database", &[6144, 256], seconds, 8, streams)
}

/// Filebench's fileserver: whole files written, read, appended to.
#[must_use]
pub fn fileserver(seconds: u32) -> Load {
    let streams = vec![
        stream(33, false, &[65_536], Pattern::Create, 0),
        stream(34, true, &[65_536], Pattern::Made { theta: 0.2 }, 0),
        stream(33, false, &[16_384], Pattern::Made { theta: 0.2 }, 0),
    ];
    one("fileserver", &[4096], seconds, 8, streams)
}

/// Filebench's webserver: small reads, an appended log.
#[must_use]
pub fn webserver(seconds: u32) -> Load {
    let streams = vec![
        stream(91, true, &[4096, 16_384, 32_768], zipf(0.8, 4), 0),
        stream(9, false, &[16_384], Pattern::Scan, 1),
    ];
    one("webserver", &[6144, 256], seconds, 8, streams)
}

/// Hot units that change every `period` seconds, so that moves do not pay off.
#[must_use]
pub fn adversary(period: u32, times: u32) -> Load {
    let phase = |at: u32| Phase {
        seconds: period,
        processes: 6,
        streams: vec![
            stream(70, true, &[4096], zipf(1.1, u64::from(at % 2) * 37), 0),
            stream(30, false, &[4096], zipf(1.1, u64::from(at % 2) * 37), 0),
        ],
    };
    Load {
        name: format!("hot set changes each {period} s"),
        sets: vec![4096],
        phases: (0..times).map(phase).collect(),
        think_us: 0,
    }
}
