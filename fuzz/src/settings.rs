//! Messages and text.

use varve_ipc::{Request, Response, Upcall, Welcome};
use varve_kernelfs::Config;
use varve_kernelfs::pool::{PoolSpec, size};

/// What either side of a socket says.
pub fn messages(data: &[u8]) -> bool {
    let Some((kind, data)) = data.split_first() else {
        return false;
    };
    match kind % 4 {
        0 => {
            let Ok((id, request)) = postcard::from_bytes::<(u64, Request)>(data) else {
                return false;
            };
            let bytes = postcard::to_allocvec(&(id, &request)).unwrap_or_default();
            assert_eq!(postcard::from_bytes(&bytes), Ok((id, request)));
            true
        }
        1 => {
            let Ok(response) = postcard::from_bytes::<Response>(data) else {
                return false;
            };
            let bytes = postcard::to_allocvec(&response).unwrap_or_default();
            assert_eq!(postcard::from_bytes(&bytes), Ok(response));
            true
        }
        2 => postcard::from_bytes::<Upcall>(data).is_ok(),
        _ => postcard::from_bytes::<Welcome>(data).is_ok(),
    }
}

/// Settings of a pool and sizes on the command line.
pub fn settings(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    let mut taken = false;
    if let Ok(config) = Config::from_toml(text) {
        assert!(config.validate().is_ok());
        taken = true;
    }
    if let Ok(bytes) = size::parse(text) {
        assert_eq!(size::parse(&size::exact(bytes)), Ok(bytes));
        let _ = size::show(bytes);
        taken = true;
    }
    let mut words = text.split('\n');
    taken | PoolSpec::parse(words.next(), words.next(), words.next()).is_ok()
}
