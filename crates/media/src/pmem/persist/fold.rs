//! Constants for folding a CRC-32C with carry-less multiplication.

/// x^32 + … of CRC-32C (Castagnoli), without its top term.
const POLYNOMIAL: u32 = 0x1EDC_6F41;

/// Returns `x^exponent mod P`, bit-reflected and shifted by one, the form for a multiplication of reflected
/// operands.
const fn power(exponent: u32) -> u64 {
    let mut value: u32 = 1;
    let mut step = 0;
    while step < exponent {
        let carry = value >> 31 != 0;
        value <<= 1;
        if carry {
            value ^= POLYNOMIAL;
        }
        step += 1;
    }
    (value.reverse_bits() as u64) << 1
}

/// Returns the factors (low half, high half) that move a 128-bit lane forward over `distance_bits` of
/// message.
const fn factors(distance_bits: u32) -> (u64, u64) {
    (power(distance_bits + 32), power(distance_bits - 32))
}

/// Over one line.
pub(super) const LINE: (u64, u64) = factors(512);
/// Over two lines.
pub(super) const TWO_LINES: (u64, u64) = factors(1024);

#[cfg(test)]
mod tests {
    #[test]
    fn power_gives_the_remainder_when_the_exponent_is_the_degree() {
        assert_eq!(super::power(32), u64::from(super::POLYNOMIAL.reverse_bits()) << 1);
        assert_eq!(super::power(0), u64::from(1u32.reverse_bits()) << 1);
    }
}
