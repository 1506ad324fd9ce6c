//! Block devices: SSDs and HDDs, each reached in one of several ways. Owns how a way is named and opened;
//! what lies on a device is the store's business, what slows it down or breaks it is
//! [`emulated`](crate::emulated)'s and [`faulty`](crate::faulty)'s.

mod file;
mod ng;
pub mod nvme;
mod open;
#[allow(unsafe_code)]
mod ring;
mod spec;
mod survey;

pub use file::{BlockOptions, FileDevice};
pub use ng::NgDevice;
pub use open::{Opened, explain, open};
pub use spec::{DeviceSpec, NvmeAddress, PciAddress, SpecError};
pub use survey::{Finding, Verdict, survey};
