//! Prints how many crash images a second a simulated machine builds and hashes. Run with
//! `cargo run --release -p varve-media --example crash_images`.

use std::collections::HashSet;
use std::time::Instant;

use varve_media::sim::{Crash, SimMedium, SimWorld};
use varve_media::{MediaError, Region};

fn main() -> Result<(), MediaError> {
    const LEN_BYTES: u64 = 16 << 20;
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, LEN_BYTES, LEN_BYTES);
    nvm.write(0, &vec![7; LEN_BYTES as usize])?;
    let (recording, done) = world.record(|| {
        for entry in 0..2000u64 {
            nvm.write(entry * 8000, &[entry as u8; 1024])?;
            nvm.write(entry * 8000 + 1024, &[entry as u8; 64])?;
            nvm.fence()?;
        }
        Ok::<(), MediaError>(())
    });
    done?;
    let begin = Instant::now();
    let mut images = 0;
    let mut hashes = HashSet::new();
    for point in recording.durability_points() {
        for crash in [
            Crash::Kill,
            Crash::PowerNone,
            Crash::PowerSeeded(1),
            Crash::PowerSeeded(2),
        ] {
            hashes.insert(recording.image(point.index, crash).content_hash());
            images += 1;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{images} images of 16 MiB ({} different) at {:.0} a second",
        hashes.len(),
        f64::from(images) / seconds
    );
    Ok(())
}
