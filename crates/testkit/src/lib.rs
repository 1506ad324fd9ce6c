//! Reference model, workloads and crash exploration for tests.
