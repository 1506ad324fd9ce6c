//! The examples of this crate, run as a reader would.

#[allow(dead_code)]
#[path = "../examples/block_device.rs"]
mod block_device;
#[allow(dead_code)]
#[path = "../examples/placement_policy.rs"]
mod placement_policy;

#[test]
fn block_device_of_an_example_serves_as_ssd_with_one_half_broken() {
    block_device::run().expect("the example of a block device");
}

#[test]
fn placement_policy_of_an_example_puts_large_files_on_the_ssd() {
    placement_policy::run().expect("the example of a placement policy");
}
