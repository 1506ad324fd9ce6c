//! Non-blocking writes against blocking ones (the seed's Figures 5.5 to 5.8).

use crate::side::{head, row};
use varve_placement::patch::Fetching;
use varve_placement::sim::{Writes, models};

const HOW: [Option<Fetching>; 4] = [
    None,
    Some(Fetching::AsyncForeground),
    Some(Fetching::AsyncBackground),
    Some(Fetching::Lazy),
];

/// All devices, patterns and sizes.
pub fn all(quick: bool) {
    println!("\n## Non-blocking writes");
    let seconds = if quick { 10 } else { 60 };
    for model in [models::sata_disk(), models::good_ssd()] {
        for (name, sequential, reader) in [
            ("sequential writes", true, false),
            ("random writes", false, false),
            ("random writes beside a reader", false, true),
        ] {
            println!("\n### {}, {name}", model.name);
            head(&[
                "bytes",
                "blocking, 1/s",
                "async-fg",
                "async-bg",
                "lazy",
                "fetches: blocking",
                "async-bg",
                "lazy",
                "lazy / async-bg",
            ]);
            for bytes in [128, 256, 512, 1024, 2048, 4096] {
                let sides = HOW.map(|how| {
                    let plan = Writes {
                        how,
                        bytes,
                        sequential,
                        reader,
                        seconds,
                        ..Writes::default()
                    };
                    plan.run(&model)
                });
                let ops = sides.map(|side| (side.writes + side.reads) as f64 / seconds as f64);
                let times = |at: usize| format!("{:.2} ×", ops[at] / ops[0]);
                let fetches = |at: usize| sides[at].fetches.to_string();
                let lazy = format!("{:.2}", ops[3] / ops[2]);
                let mut cells = vec![
                    bytes.to_string(),
                    format!("{:.0}", ops[0]),
                    times(1),
                    times(2),
                    times(3),
                ];
                cells.extend([fetches(0), fetches(2), fetches(3), lazy]);
                row(&cells);
            }
        }
    }
}
