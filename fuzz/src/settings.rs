//! Messages and text.

use varve_ipc::{Request, Response, Upcall, Welcome};
use varve_kernelfs::Config;
use varve_kernelfs::host::{PoolSpec, size};

/// What either side of a socket says.
pub fn messages(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else {
        return;
    };
    match kind % 4 {
        0 => {
            if let Ok((id, request)) = postcard::from_bytes::<(u64, Request)>(data) {
                let bytes = postcard::to_allocvec(&(id, &request)).unwrap_or_default();
                assert_eq!(postcard::from_bytes(&bytes), Ok((id, request)));
            }
        }
        1 => {
            if let Ok(response) = postcard::from_bytes::<Response>(data) {
                let bytes = postcard::to_allocvec(&response).unwrap_or_default();
                assert_eq!(postcard::from_bytes(&bytes), Ok(response));
            }
        }
        2 => {
            let _ = postcard::from_bytes::<Upcall>(data);
        }
        _ => {
            let _ = postcard::from_bytes::<Welcome>(data);
        }
    }
}

/// Settings of a pool and sizes on the command line.
pub fn settings(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(config) = Config::from_toml(text) {
        assert!(config.validate().is_ok());
    }
    if let Ok(bytes) = size::parse(text) {
        assert_eq!(size::parse(&size::exact(bytes)), Ok(bytes));
        let _ = size::show(bytes);
    }
    let mut words = text.split('\n');
    let _ = PoolSpec::parse(words.next(), words.next(), words.next());
}
