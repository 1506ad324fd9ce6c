//! Sizes in configuration files: `512`, `64K`, `2 MiB`, `1T`; powers of 1,024.

use serde::{Deserialize, Deserializer, de};

/// Bytes, read from a number or a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// Parses a size.
///
/// # Errors
/// A message with the accepted forms.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => {
            return Err(format!(
                "`{text}` is no size; write a number with K, M, G or T, as in 512M"
            ));
        }
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("`{text}` is no size; write a number with K, M, G or T, as in 512M"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("`{text}` is more bytes than there can be"))
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size: a number of bytes, or text such as \"512M\"")]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(bytes) => Ok(Self(bytes)),
            Written::Text(text) => parse_bytes(&text).map(Self).map_err(de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(parse_bytes("512"), Ok(512));
        assert_eq!(parse_bytes("64K"), Ok(65_536));
        assert_eq!(parse_bytes("2 MiB"), Ok(2 << 20));
        assert!(
            parse_bytes("2x").is_err() && parse_bytes("").is_err() && parse_bytes("99999999999T").is_err()
        );
    }
}
