//! Sizes as people write them: `256M`, `1G`, `1.5T`.

/// Bytes of `text`: a number with an optional K, M, G or T (powers of 1,024), and an optional `B` or `iB`.
///
/// # Errors
/// What is wrong with it and what is right.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size; write a number and K, M, G or T, for example 256M or 1G");
    let lower = text.trim().to_ascii_lowercase();
    let lower = lower.strip_suffix("ib").or_else(|| lower.strip_suffix('b')).unwrap_or(&lower);
    let (number, shift) = match lower.char_indices().last() {
        Some((at, 'k')) => (&lower[..at], 10),
        Some((at, 'm')) => (&lower[..at], 20),
        Some((at, 'g')) => (&lower[..at], 30),
        Some((at, 't')) => (&lower[..at], 40),
        Some(_) => (lower, 0),
        None => return Err(wrong()),
    };
    let value: f64 = number.trim().parse().map_err(|_| wrong())?;
    let bytes = value * f64::from(1_u32 << (shift / 2)) * f64::from(1_u32 << (shift / 2));
    if !(0.0..=1.0e18).contains(&bytes) {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(bytes as u64)
}

/// `bytes` with a unit, three digits.
#[must_use]
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::{parse, show};

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse("256M"), Ok(256 << 20));
        assert_eq!(parse("1.5g"), Ok(3 << 29));
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("2TiB"), Ok(2 << 40));
        assert!(parse("").is_err());
        assert!(parse("-1G").is_err());
        assert!(parse("many").is_err());
    }

    #[test]
    fn sizes_are_shown_with_three_digits() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(1536), "1.5 KiB");
        assert_eq!(show(256 << 20), "256 MiB");
    }
}
