//! LibFS and KernelFS in one process.
