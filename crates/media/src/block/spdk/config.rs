//! Configurations of SPDK: those that are made here, and what an operator's says. Pure. SPDK itself carries
//! them out; here they are only read, since SPDK does not survive a text that is no JSON.

use std::path::PathBuf;

use serde_json::Value;

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

/// An operator's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Operators {
    /// Controllers on PCI that it attaches.
    pub controllers: Vec<PciAddress>,
    /// Files and devices of the kernel's that it opens.
    pub files: Vec<PathBuf>,
    /// SPDK's NVMe driver passes flushes on to its controllers, or it has none. Unless it is told to, that
    /// driver answers them itself.
    pub flushes: bool,
}

/// Reads a configuration.
///
/// # Errors
/// It is not what `rpc.py save_config` writes; for a person.
pub(super) fn read(json: &str) -> Result<Operators, String> {
    let root: Value = serde_json::from_str(json).map_err(|error| format!("it is no JSON: {error}"))?;
    let subsystems = root.get("subsystems").and_then(Value::as_array);
    let subsystems = subsystems.ok_or("it has no list `subsystems`")?;
    let mut found = Operators {
        controllers: Vec::new(),
        files: Vec::new(),
        flushes: true,
    };
    let (mut drives, mut told) = (false, false);
    for subsystem in subsystems {
        subsystem
            .get("subsystem")
            .and_then(Value::as_str)
            .ok_or("an element of `subsystems` has no name `subsystem`")?;
        let entries = match subsystem.get("config") {
            Some(Value::Array(entries)) => entries.as_slice(),
            Some(Value::Null) => &[],
            _ => return Err("an element of `subsystems` has no list `config`".into()),
        };
        for entry in entries {
            let method = entry.get("method").and_then(Value::as_str);
            let method = method.ok_or("an entry of `config` has no name `method`")?;
            let params = entry.get("params").unwrap_or(&Value::Null);
            if !params.is_object() && !params.is_null() {
                return Err(format!("`params` of {method} is no object"));
            }
            let text = |key: &str| params.get(key).and_then(Value::as_str);
            drives |= method == "bdev_nvme_attach_controller";
            told |= params.get("enable_flush").and_then(Value::as_bool) == Some(true);
            found
                .controllers
                .extend(text("traddr").and_then(PciAddress::parse));
            found.files.extend(text("filename").map(PathBuf::from));
        }
    }
    found.flushes = !drives || told;
    found.controllers.sort();
    found.controllers.dedup();
    found.files.sort();
    found.files.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{attach, base, detach, namespace, read};
    use crate::block::{NvmeAddress, PciAddress};
    use std::path::PathBuf;

    #[test]
    fn configurations_are_json_with_the_names_of_the_device() {
        let pci = PciAddress::parse("00:04.0").unwrap();
        assert_eq!(namespace(NvmeAddress { pci, nsid: 2 }), "varve_0000_00_04_0n2");
        for json in [base(true), base(false), detach("x")] {
            assert!(read(&json).unwrap().controllers.is_empty(), "{json}");
        }
        assert_eq!(read(&attach(pci)).unwrap().controllers, [pci]);
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
        let found = read(json).unwrap();
        assert_eq!(found.files, [PathBuf::from("/dev/sdb")]);
        assert_eq!(found.controllers, [PciAddress::parse("0000:81:00.0").unwrap()]);
        assert!(!found.flushes);
        let told = json.replace("\"name\": \"A\"", "\"enable_flush\" : true");
        assert!(read(&told).unwrap().flushes);
    }

    #[test]
    fn what_is_no_configuration_is_refused_with_what_is_wrong() {
        for (json, said) in [
            ("{ not json", "no JSON"),
            ("", "no JSON"),
            ("[]", "no list `subsystems`"),
            (r#"{"subsystems":{}}"#, "no list `subsystems`"),
            (r#"{"subsystems":[{}]}"#, "no name `subsystem`"),
            (r#"{"subsystems":[{"subsystem":"bdev"}]}"#, "no list `config`"),
            (
                r#"{"subsystems":[{"subsystem":"bdev","config":[{}]}]}"#,
                "no name `method`",
            ),
            (
                r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"m","params":[]}]}]}"#,
                "`params` of m is no object",
            ),
        ] {
            let error = read(json).unwrap_err();
            assert!(error.contains(said), "{json}: {error}");
        }
        assert!(
            read(r#"{"subsystems":[{"subsystem":"bdev","config":null}]}"#)
                .unwrap()
                .flushes
        );
    }
}
