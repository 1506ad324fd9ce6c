//! Block devices: SSDs and HDDs, each reached in one of several ways. Owns the names of the ways and opens
//! them; the store owns the content of a device, [`emulated`](crate::emulated) its delays and
//! [`faulty`](crate::faulty) its faults.

mod attached;
mod file;
mod ng;
pub mod nvme;
mod open;
mod queue;
#[allow(unsafe_code)]
mod ring;
pub mod spdk;
mod spec;
mod survey;

pub use file::{BlockOptions, FileDevice};
pub use ng::NgDevice;
pub use open::{Opened, explain, open};
pub use spec::{DeviceSpec, NvmeAddress, PciAddress, SpdkAddress, SpecError};
pub use survey::survey;
