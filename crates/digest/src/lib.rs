//! Scanning, validating and planning the digest of update logs.
