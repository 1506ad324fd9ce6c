//! Configurations of SPDK, as text: those that are made here, and what is looked for in an operator's. Pure.
//! SPDK itself reads them and says what is wrong with one.

use std::path::PathBuf;

use crate::block::{NvmeAddress, PciAddress};

/// Settings before the start: pools of a size for one thread, instead of 300 MiB. `pci`: no layer of SPDK's
/// claims what it finds on a device, such as a partition table.
pub(super) fn base(pci: bool) -> String {
    let examine = !pci;
    format!(
        r#"{{"subsystems":[
{{"subsystem":"iobuf","config":[{{"method":"iobuf_set_options",
"params":{{"small_pool_count":512,"large_pool_count":64}}}}]}},
{{"subsystem":"accel","config":[{{"method":"accel_set_options",
"params":{{"small_cache_size":32,"large_cache_size":8}}}}]}},
{{"subsystem":"bdev","config":[{{"method":"bdev_set_options","params":{{"bdev_io_pool_size":2047,
"bdev_io_cache_size":256,"iobuf_small_cache_size":32,"iobuf_large_cache_size":8,
"bdev_auto_examine":{examine}}}}}]}}]}}"#
    )
}

fn bdev_entry(method: &str, params: &str) -> String {
    format!(
        r#"{{"subsystems":[{{"subsystem":"bdev","config":[{{"method":"{method}","params":{{{params}}}}}]}}]}}"#
    )
}

/// SPDK's name of a controller.
pub(super) fn controller(address: PciAddress) -> String {
    format!("varve_{}", address.to_string().replace([':', '.'], "_"))
}

/// SPDK's name of a namespace.
pub(super) fn namespace(address: NvmeAddress) -> String {
    format!("{}n{}", controller(address.pci), address.nsid)
}

/// Attaches a controller.
pub(super) fn attach(address: PciAddress) -> String {
    bdev_entry(
        "bdev_nvme_attach_controller",
        &format!(
            r#""name":"{}","trtype":"PCIe","traddr":"{address}""#,
            controller(address)
        ),
    )
}

/// Detaches a controller.
pub(super) fn detach(name: &str) -> String {
    bdev_entry("bdev_nvme_detach_controller", &format!(r#""name":"{name}""#))
}

/// Values of a key, wherever it stands, where they are strings.
fn strings<'a>(json: &'a str, key: &str) -> Vec<&'a str> {
    let quoted = format!("\"{key}\"");
    let mut found = Vec::new();
    for (at, _) in json.match_indices(&quoted) {
        let rest = json[at + quoted.len()..].trim_start();
        let value = rest.strip_prefix(':').map(str::trim_start);
        let value = value.and_then(|rest| rest.strip_prefix('"'));
        found.extend(value.and_then(|rest| rest.split('"').next()));
    }
    found
}

/// Controllers on PCI that a configuration attaches.
pub(super) fn controllers(json: &str) -> Vec<PciAddress> {
    let mut found: Vec<_> = strings(json, "traddr")
        .into_iter()
        .filter_map(PciAddress::parse)
        .collect();
    found.sort();
    found.dedup();
    found
}

/// Files and devices of the kernel's that a configuration opens.
pub(super) fn files(json: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = strings(json, "filename").into_iter().map(PathBuf::from).collect();
    found.sort();
    found.dedup();
    found
}

/// Whether SPDK's NVMe driver passes flushes on to the devices of a configuration. Unless it is told to, it
/// answers them itself.
pub(super) fn flushes(json: &str) -> bool {
    let drives = strings(json, "method").contains(&"bdev_nvme_attach_controller");
    let told = json.split("\"enable_flush\"").skip(1).any(|rest| {
        let rest = rest.trim_start().strip_prefix(':').map(str::trim_start);
        rest.is_some_and(|rest| rest.starts_with("true"))
    });
    !drives || told
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{attach, base, controllers, detach, files, flushes, namespace};
    use crate::block::{NvmeAddress, PciAddress};
    use std::path::PathBuf;

    fn is_balanced(json: &str) -> bool {
        let mut open = Vec::new();
        for byte in json.bytes() {
            match byte {
                b'{' | b'[' => open.push(byte),
                b'}' if open.pop() != Some(b'{') => return false,
                b']' if open.pop() != Some(b'[') => return false,
                _ => {}
            }
        }
        open.is_empty() && json.matches('"').count().is_multiple_of(2)
    }

    #[test]
    fn configurations_are_json_with_the_names_of_the_device() {
        let pci = PciAddress::parse("00:04.0").unwrap();
        assert_eq!(namespace(NvmeAddress { pci, nsid: 2 }), "varve_0000_00_04_0n2");
        for json in [base(true), base(false), attach(pci), detach("x")] {
            assert!(is_balanced(&json), "{json}");
        }
        assert_eq!(controllers(&attach(pci)), [pci]);
        assert!(base(true).contains("\"bdev_auto_examine\":false"));
    }

    #[test]
    fn operators_configuration_is_searched_for_devices_of_the_kernel() {
        let json = r#"{ "subsystems": [ {"subsystem": "bdev", "config": [
            {"method": "bdev_aio_create", "params": {"name": "A", "filename" : "/dev/sdb"}},
            {"method" :"bdev_nvme_attach_controller",
             "params": {"name": "N", "trtype": "PCIe", "traddr": "0000:81:00.0"}},
            {"method": "bdev_nvme_attach_controller",
             "params": {"name": "F", "trtype": "TCP", "traddr": "10.0.0.1"}} ] } ] }"#;
        assert_eq!(files(json), [PathBuf::from("/dev/sdb")]);
        assert_eq!(controllers(json), [PciAddress::parse("0000:81:00.0").unwrap()]);
        assert!(!flushes(json));
        let told = json.replace("\"name\": \"A\"", "\"enable_flush\" : true");
        assert!(flushes(&told) && flushes(r#"{"method": "bdev_malloc_create"}"#));
    }
}
