//! Active and inactive chunks by z-score (RapidSwap, section 4.2.1: the algorithm is named there, its
//! threshold is not).

use crate::table::Activity;

/// Chunks with more faults than the mean and this many standard deviations are active.
pub const Z_ACTIVE: f64 = 1.0;

/// The number of faults above which a chunk is active. Infinite where all chunks are alike.
#[must_use]
pub fn active_above(activity: impl Iterator<Item = Activity> + Clone, z: f64) -> f64 {
    let count = activity.clone().count() as f64;
    if count < 2.0 {
        return f64::INFINITY;
    }
    let mean = activity.clone().map(|chunk| f64::from(chunk.faults)).sum::<f64>() / count;
    let squares = activity.map(|chunk| (f64::from(chunk.faults) - mean).powi(2));
    let deviation = (squares.sum::<f64>() / count).sqrt();
    if deviation == 0.0 {
        f64::INFINITY
    } else {
        mean + z * deviation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(faults: &'static [u32]) -> impl Iterator<Item = Activity> + Clone {
        (0..).zip(faults).map(|(chunk, faults)| Activity {
            chunk,
            faults: *faults,
        })
    }

    #[test]
    fn only_chunks_far_above_the_mean_are_active() {
        assert_eq!(active_above(chunks(&[5, 5, 5]), 1.0), f64::INFINITY);
        assert_eq!(active_above(chunks(&[9]), 1.0), f64::INFINITY);
        let above = active_above(chunks(&[0, 0, 0, 8]), 1.0);
        assert!(above > 2.0 && above < 8.0, "{above}");
    }
}
