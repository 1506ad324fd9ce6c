//! The identify structures of a controller and a namespace (base specification, §5.17; NVM command set
//! specification, §4.1.5), with every field checked. Pure; used by `nvme` and `ng`.

/// Bytes of an identify structure.
pub(in crate::block) const IDENTIFY_BYTES: usize = 4096;
/// `CNS` of a namespace.
pub(in crate::block) const CNS_NAMESPACE: u32 = 0;
/// `CNS` of the controller.
pub(in crate::block) const CNS_CONTROLLER: u32 = 1;

/// The fields of the controller's structure that are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::block) struct ControllerIdentity {
    /// Serial number.
    pub serial: String,
    /// Model.
    pub model: String,
    /// Most bytes of one transfer; `None`: no limit.
    pub transfer_max: Option<usize>,
    /// Namespaces are numbered up to this.
    pub namespaces: u32,
    /// A write may stay in a volatile cache until a flush.
    pub has_write_cache: bool,
    /// Supports dataset management commands.
    pub can_deallocate: bool,
}

fn half(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

/// Returns text of a fixed length, without its unprintable characters.
fn text(bytes: &[u8]) -> String {
    let printable = bytes.iter().filter(|byte| (b' '..=b'~').contains(byte));
    let text: String = printable.map(|byte| char::from(*byte)).collect();
    text.trim().to_owned()
}

impl ControllerIdentity {
    /// # Errors
    /// Names the property that this driver cannot work with.
    pub(in crate::block) fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> Result<Self, String> {
        for (name, at, wanted) in [("submission", 512, 6), ("completion", 513, 4)] {
            let (least, most) = (bytes[at] & 0xf, bytes[at] >> 4);
            if !(least..=most).contains(&wanted) {
                return Err(format!(
                    "its {name} queue entries have 2^{least} to 2^{most} bytes; this driver uses 2^{wanted}"
                ));
            }
        }
        let transfer_max = match bytes[77] {
            0 => None,
            // More than a machine has: no limit.
            pages if pages >= 20 => None,
            pages => Some(super::bus::PAGE_BYTES << pages),
        };
        Ok(Self {
            serial: text(&bytes[4..24]),
            model: text(&bytes[24..64]),
            transfer_max,
            namespaces: word(bytes, 516),
            has_write_cache: bytes[525] & 1 == 1,
            can_deallocate: half(bytes, 520) & 1 << 2 != 0,
        })
    }
}

/// A usable namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block) struct NamespaceIdentity {
    /// Log2 of the sector's bytes: 9 or 12.
    pub sector_shift: u8,
    /// Length in whole [blocks](crate::DEVICE_BLOCK_BYTES), in bytes.
    pub len_bytes: u64,
}

impl NamespaceIdentity {
    /// # Errors
    /// The namespace does not exist, or has an unsupported format; the text says how to format it.
    pub(in crate::block) fn parse(bytes: &[u8; IDENTIFY_BYTES], nsid: u32) -> Result<Self, String> {
        let sectors = u64::from(word(bytes, 0)) | u64::from(word(bytes, 4)) << 32;
        if sectors == 0 {
            return Err(format!(
                "it has no active namespace {nsid}; `nvme list-ns` shows those that it has"
            ));
        }
        let (formats, selected) = (bytes[25], bytes[26]);
        // Two more bits of the index lie apart where there are more than 16 formats.
        let index = match formats >= 16 {
            true => selected & 0xf | (selected >> 5 & 3) << 4,
            false => selected & 0xf,
        };
        if index > formats || index > 63 {
            return Err(format!(
                "namespace {nsid} says that it has format {index} of {}",
                u32::from(formats) + 1
            ));
        }
        let format = word(bytes, 128 + 4 * usize::from(index));
        let (metadata, shift) = (format & 0xffff, (format >> 16 & 0xff) as u8);
        if metadata != 0 || bytes[29] & 7 != 0 {
            return Err(format!(
                "namespace {nsid} is formatted with {metadata} bytes of metadata a sector (or with \
                 protection information), which is not \
                 supported; `nvme id-ns -H` shows formats with 0 bytes, `nvme format --lbaf=N` takes one \
                 AND ERASES the namespace"
            ));
        }
        if shift != 9 && shift != 12 {
            let size = 1u64.checked_shl(u32::from(shift)).unwrap_or(0);
            return Err(format!(
                "namespace {nsid} has sectors of {size} bytes; 512 and 4096 are supported. `nvme format \
                 --lbaf=N` takes another format \
                 AND ERASES the namespace"
            ));
        }
        let len = sectors
            .checked_mul(1 << shift)
            .filter(|len| i64::try_from(*len).is_ok());
        let Some(len) = len else {
            return Err(format!("namespace {nsid} says that it has {sectors} sectors"));
        };
        let len_bytes = len / crate::DEVICE_BLOCK_BYTES * crate::DEVICE_BLOCK_BYTES;
        if len_bytes == 0 {
            return Err(format!("namespace {nsid} has {len} bytes: too small"));
        }
        Ok(Self {
            sector_shift: shift,
            len_bytes,
        })
    }

    /// Bytes of a sector.
    pub(in crate::block) const fn sector_bytes(self) -> u64 {
        1 << self.sector_shift
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity};

    fn namespace(sectors: u64, formats: u8, selected: u8, format: u32) -> [u8; IDENTIFY_BYTES] {
        let mut bytes = [0; IDENTIFY_BYTES];
        bytes[..8].copy_from_slice(&sectors.to_le_bytes());
        (bytes[25], bytes[26]) = (formats, selected);
        let index = usize::from(selected & 0xf | (selected >> 5 & 3) << 4);
        bytes[128 + 4 * index..][..4].copy_from_slice(&format.to_le_bytes());
        bytes
    }

    #[test]
    fn namespace_is_taken_with_sectors_of_512_and_4096() {
        let small = NamespaceIdentity::parse(&namespace(1003, 0, 0, 9 << 16), 1).unwrap();
        assert_eq!((small.sector_bytes(), small.len_bytes), (512, 125 * 4096));
        let large = NamespaceIdentity::parse(&namespace(1003, 40, 0x42, 12 << 16), 1).unwrap();
        assert_eq!((large.sector_bytes(), large.len_bytes), (4096, 1003 * 4096));
    }

    #[test]
    fn namespace_with_impossible_fields_is_refused() {
        let mut protected = namespace(1000, 0, 0, 9 << 16);
        protected[29] = 1;
        for (bytes, said) in [
            (namespace(0, 0, 0, 9 << 16), "no active namespace 3"),
            (namespace(1000, 1, 2, 9 << 16), "format 2 of 2"),
            (namespace(1000, 0, 0, 9 << 16 | 8), "8 bytes of metadata"),
            (protected, "protection information"),
            (namespace(1000, 0, 0, 0), "sectors of 1 bytes"),
            (namespace(1000, 0, 0, 13 << 16), "sectors of 8192"),
            (namespace(1000, 0, 0, 255 << 16), "sectors of 0"),
            (namespace(u64::MAX, 0, 0, 9 << 16), "18446744073709551615 sectors"),
            (namespace(1 << 54, 0, 0, 9 << 16), "18014398509481984 sectors"),
            (namespace(7, 0, 0, 9 << 16), "too small"),
            ([0xff; IDENTIFY_BYTES], "format 63"),
        ] {
            // All ones: format 63 has 65,535 bytes of metadata.
            let error = NamespaceIdentity::parse(&bytes, 3).unwrap_err();
            assert!(error.contains(said) || error.contains("65535"), "{said}: {error}");
        }
    }

    #[test]
    fn controller_is_taken_apart_and_its_strings_are_made_printable() {
        let mut bytes = [0; IDENTIFY_BYTES];
        (bytes[512], bytes[513]) = (0x66, 0x44);
        bytes[4..12].copy_from_slice(b"s\x1b[2J\n7 ");
        (bytes[77], bytes[525], bytes[520]) = (5, 7, 4);
        let identity = ControllerIdentity::parse(&bytes).unwrap();
        assert_eq!(identity.serial, "s[2J7");
        assert_eq!(identity.transfer_max, Some(128 << 10));
        assert!(identity.has_write_cache && identity.can_deallocate);
        bytes[77] = 255;
        assert_eq!(ControllerIdentity::parse(&bytes).unwrap().transfer_max, None);
        bytes[513] = 0x55;
        assert!(
            ControllerIdentity::parse(&bytes)
                .unwrap_err()
                .contains("completion")
        );
    }
}
