//! Conversion between places in the circular log (a position within a lap and four bits of the lap's number)
//! and log points, which grow without bound.

use super::Place;

/// A point of the log that is never used twice: `lap · units + position`, in units of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LogPoint(pub u64);

/// The circular log as the index sees it: its length, and the point up to which it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lap {
    /// Units of one lap.
    pub units: u64,
    /// The point of the next object; points one lap below it and lower are overwritten.
    pub head: LogPoint,
}

impl Lap {
    /// Converts a point to the form in which the index keeps it.
    pub const fn place(&self, point: LogPoint, prefetch: u8) -> Place {
        Place {
            position: (point.0 % self.units) as u32,
            generation: (point.0 / self.units % 16) as u8,
            prefetch,
        }
    }

    /// Returns the one live point that a place can mean; `None` if it is overwritten. A place that is 16 laps
    /// old looks like a new one: the object's head tells them apart.
    pub const fn point(&self, place: Place) -> Option<LogPoint> {
        let lap = self.head.0 / self.units;
        let head = self.head.0 % self.units;
        let position = place.position as u64;
        if position >= self.units {
            return None;
        }
        if position < head && place.generation as u64 == lap % 16 {
            return Some(LogPoint(lap * self.units + position));
        }
        if position >= head && lap > 0 && place.generation as u64 == (lap - 1) % 16 {
            return Some(LogPoint((lap - 1) * self.units + position));
        }
        None
    }

    /// Whether an object of this generation can be live, for entries whose position is on disk.
    pub const fn may_live(&self, generation: u8) -> bool {
        let lap = self.head.0 / self.units;
        generation as u64 == lap % 16 || lap > 0 && generation as u64 == (lap - 1) % 16
    }
}

#[cfg(test)]
mod tests {
    use super::{Lap, LogPoint};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn place_gives_its_point_back_until_it_is_overwritten(
            units in 1u64..5000, point in 0u64..100_000, ahead in 1u64..80_000,
        ) {
            let then = Lap { units, head: LogPoint(point) };
            let place = then.place(LogPoint(point), 0);
            let now = Lap { units, head: LogPoint(point + ahead) };
            let live = ahead <= units;
            match now.point(place) {
                Some(found) if live => prop_assert_eq!(found, LogPoint(point)),
                // A place 16 laps old is taken for a new one, but never for a point that is not live.
                Some(found) => {
                    prop_assert!(found.0 > point && (found.0 - point) % (16 * units) == 0);
                    prop_assert!(found < now.head && found.0 + units >= now.head.0);
                }
                None => prop_assert!(!live),
            }
            prop_assert!(now.point(place).is_none() || now.may_live(place.generation));
        }
    }
}
