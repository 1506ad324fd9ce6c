//! Sizes as people write them: `256M`, `1G`, `1.5T`. Text only.

/// Parses `text` as bytes: a number with an optional K, M, G or T (powers of 1,024), and an optional `B` or
/// `iB`.
///
/// # Errors
/// A message with the fault and the right form.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size; write a number and K, M, G or T, for example 256M or 1G");
    let lower = text.trim().to_ascii_lowercase();
    let lower = lower
        .strip_suffix("ib")
        .or_else(|| lower.strip_suffix('b'))
        .unwrap_or(&lower);
    let (number, shift) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 10),
        Some(b'm') => (&lower[..lower.len() - 1], 20),
        Some(b'g') => (&lower[..lower.len() - 1], 30),
        Some(b't') => (&lower[..lower.len() - 1], 40),
        Some(_) => (lower, 0),
        None => return Err(wrong()),
    };
    let number = number.trim();
    // Only plain decimal numbers: no "1e9", "inf" or signs.
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return Err(wrong());
    }
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = value * (1_u64 << shift) as f64;
    if bytes > 1.0e18 {
        return Err(format!("`{text}` is out of range; the most is 800000T"));
    }
    Ok(bytes as u64)
}

/// Formats `bytes` with a unit, three digits.
#[must_use]
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Returns the shortest exact text that [`parse`] reads back.
#[must_use]
pub fn exact(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::{exact, parse, show};

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse("256M"), Ok(256 << 20));
        assert_eq!(parse("1.5g"), Ok(3 << 29));
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("2TiB"), Ok(2 << 40));
        for bad in [
            "",
            "-1G",
            "many",
            "1e9",
            "inf",
            "G",
            "1.2.3M",
            "99999999999T",
            "5µ",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_shown_with_three_digits() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(1536), "1.5 KiB");
        assert_eq!(show(256 << 20), "256 MiB");
    }

    #[test]
    fn exact_text_is_read_back() {
        for bytes in [0, 1, 4096, 1 << 20, 3 << 29, 5 << 40, (1 << 30) + 1] {
            assert_eq!(parse(&exact(bytes)), Ok(bytes));
        }
    }
}
