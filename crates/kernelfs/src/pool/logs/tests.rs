#![allow(clippy::unwrap_used)]
use super::{HostLogs, Recovered};
use crate::logs::{LogStore, SessionArea};
use varve_format::SessionId;
use varve_ipc::{PageState, SessionPage};

const CHUNK: u64 = varve_format::log::CHUNK_BYTES;
const LIVE: u64 = varve_format::log::LIVE_HEADER_SIZE as u64;
const S: SessionId = SessionId(7);

struct Place {
    dir: tempfile::TempDir,
    backed: bool,
}

impl Place {
    fn new(backed: bool) -> Self {
        let shm = std::path::Path::new("/dev/shm");
        let dir = if shm.is_dir() {
            tempfile::tempdir_in(shm)
        } else {
            tempfile::tempdir()
        }
        .unwrap();
        std::fs::create_dir(dir.path().join("live")).unwrap();
        std::fs::create_dir(dir.path().join("logs")).unwrap();
        std::fs::write(dir.path().join("nvm"), [0; 4096]).unwrap();
        Self { dir, backed }
    }

    fn logs(&self, boot: u8) -> HostLogs {
        let at = |name| self.dir.path().join(name);
        HostLogs::new(
            at("live"),
            self.backed.then(|| at("logs")),
            at("nvm"),
            [boot; 16],
            [9; 16],
        )
    }

    fn files(&self) -> usize {
        let count = |name| std::fs::read_dir(self.dir.path().join(name)).unwrap().count();
        count("live") + count("logs")
    }
}

fn started(logs: &HostLogs, max_bytes: u64) -> SessionArea {
    let area = logs.create(S, Some((CHUNK, max_bytes)), true).unwrap();
    logs.start(S, &**area.log.as_ref().unwrap(), CHUNK).unwrap();
    area
}

#[test]
fn log_that_was_not_started_takes_no_space_and_is_no_log_of_the_next_daemon() {
    for backed in [true, false] {
        let place = Place::new(backed);
        let log = place
            .logs(1)
            .create(S, Some((CHUNK, CHUNK)), true)
            .unwrap()
            .log
            .unwrap();
        assert_eq!(log.len_bytes(), 0);
        let logs = place.logs(1);
        assert_eq!(logs.list().unwrap(), [S]);
        assert!(logs.copies().unwrap().is_empty());
        logs.remove(S);
        assert_eq!(place.files(), 0);
    }
}

#[test]
fn live_copy_is_used_when_only_the_daemon_ended() {
    for backed in [true, false] {
        let place = Place::new(backed);
        let area = started(&place.logs(1), 4 * CHUNK);
        area.log.as_ref().unwrap().write(5000, b"not synced").unwrap();
        let logs = place.logs(1);
        assert_eq!(logs.list().unwrap(), [S]);
        let copies = logs.copies().unwrap();
        assert!(copies.len() == 1 && copies[0].session == S && copies[0].live);
        logs.pages().unwrap()[0].seal();
        assert_eq!(area.page.state(), PageState::Sealed);
        let log = logs.open(S).unwrap().unwrap();
        let mut back = [0; 10];
        log.read(5000, &mut back).unwrap();
        assert_eq!(&back, b"not synced");
        assert_eq!(
            logs.recovered(),
            Recovered {
                live: 1,
                ..Recovered::default()
            }
        );
        logs.remove(S);
        assert_eq!(place.files(), 0);
        assert!(logs.open(S).unwrap().is_none());
    }
}

#[test]
fn backing_is_used_when_the_live_copy_is_lost_or_of_another_boot() {
    for lose in [true, false] {
        let place = Place::new(true);
        let logs = place.logs(1);
        let log = started(&logs, 4 * CHUNK).log.unwrap();
        log.write(8192, b"synced").unwrap();
        logs.sync(S, &*log, &[(8192, 6)]).unwrap();
        log.write(1 << 20, b"lost").unwrap();
        if lose {
            std::fs::remove_file(place.dir.path().join("live/log-7")).unwrap();
        }
        let logs = place.logs(if lose { 1 } else { 2 });
        let log = logs.open(S).unwrap().unwrap();
        let mut back = [0; 6];
        log.read(8192, &mut back).unwrap();
        assert_eq!(&back, b"synced");
        log.read(1 << 20, &mut back).unwrap();
        assert_eq!(back, [0; 6]);
        assert_eq!(
            logs.recovered(),
            Recovered {
                live: 0,
                backing: 1,
                ignored: u64::from(!lose)
            }
        );
    }
}

#[test]
fn live_copy_with_a_flipped_bit_in_its_header_is_not_taken() {
    use varve_format::log::LIVE_HEADER_SIZE;
    let place = Place::new(true);
    let logs = place.logs(1);
    let log = started(&logs, CHUNK).log.unwrap();
    log.write(8192, b"synced").unwrap();
    logs.sync(S, &*log, &[(8192, 6)]).unwrap();
    drop((log, logs));
    let path = place.dir.path().join("live/log-7");
    let sound = std::fs::read(&path).unwrap();
    for bit in 0..LIVE_HEADER_SIZE * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, bytes).unwrap();
        let logs = place.logs(1);
        let mut back = [0; 6];
        logs.open(S).unwrap().unwrap().read(8192, &mut back).unwrap();
        assert_eq!(&back, b"synced");
        let recovered = logs.recovered();
        assert_eq!((recovered.backing, recovered.ignored), (1, 1), "bit {bit}");
    }
}

#[test]
fn log_opens_whatever_length_its_client_gave_it() {
    for len in [LIVE, 4095, 5000, CHUNK / 2, 3 * CHUNK + 17, 1 << 40] {
        for shorten in ["live/log-7", "logs/7.log"] {
            let place = Place::new(true);
            let logs = place.logs(1);
            let log = started(&logs, 4 * CHUNK).log.unwrap();
            logs.sync(S, &*log, &[(8192, 6)]).unwrap();
            let file = std::fs::File::options()
                .write(true)
                .open(place.dir.path().join(shorten))
                .unwrap();
            file.set_len(len).unwrap();
            if shorten.starts_with("logs") {
                std::fs::remove_file(place.dir.path().join("live/log-7")).unwrap();
            }
            let log = place.logs(1).open(S).unwrap().unwrap();
            assert_eq!(log.len_bytes(), len);
            // It shrinks while it is read.
            file.set_len(0).unwrap();
            let mut bytes = [1; 64];
            log.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 64]);
        }
    }
}

#[test]
fn log_that_was_never_synced_is_no_log_after_a_power_cut_and_no_damage() {
    let place = Place::new(true);
    let logs = place.logs(1);
    let log = started(&logs, CHUNK).log.unwrap();
    log.write(8192, b"not synced").unwrap();
    let after_the_cut = || {
        let logs = place.logs(2);
        let found = logs.open(S).unwrap().is_some();
        (found, logs.recovered().backing, logs.recovered().ignored)
    };
    std::fs::rename(
        place.dir.path().join("live/log-7"),
        place.dir.path().join("log-7"),
    )
    .unwrap();
    assert_eq!(after_the_cut(), (false, 0, 0));
    // Entries alone, as a sync that was cut off may leave them, or a first block that was lost.
    log.sync(300 << 10, 6).unwrap();
    assert_eq!(after_the_cut(), (false, 0, 0));
    log.write(300 << 10, b"entry").unwrap();
    log.sync(300 << 10, 6).unwrap();
    assert_eq!(after_the_cut(), (false, 0, 1));
    logs.sync(S, &*log, &[(8192, 10)]).unwrap();
    assert_eq!(after_the_cut(), (true, 1, 0));
}

#[test]
fn copies_are_ignored_when_they_are_of_another_session_or_memory_of_another_boot() {
    let place = Place::new(false);
    started(&place.logs(1), CHUNK);
    let live = place.dir.path().join("live");
    std::fs::copy(live.join("log-7"), live.join("log-8")).unwrap();
    let logs = place.logs(1);
    assert!(logs.open(SessionId(8)).unwrap().is_none());
    assert!(place.logs(2).open(S).unwrap().is_none());
    assert_eq!(logs.recovered().ignored, 1);
}

#[test]
fn descriptors_reach_the_same_files() {
    let place = Place::new(true);
    let logs = place.logs(1);
    let area = started(&logs, 2 * CHUNK);
    let fds = logs.descriptors(S, true).unwrap();
    let client = varve_media::LiveLog::from_fds(
        fds.log.unwrap(),
        fds.log_backing.unwrap(),
        "log".into(),
        2 * CHUNK,
    )
    .unwrap();
    varve_media::Region::write(&client, 4096, b"hello").unwrap();
    let mut back = [0; 5];
    area.log.unwrap().read(4096, &mut back).unwrap();
    assert_eq!(&back, b"hello");
    assert!(fds.page.is_some() && fds.nvm.is_some());
    let fds = logs.descriptors(S, false).unwrap();
    assert!(fds.log.is_some() && fds.log_backing.is_none() && fds.nvm.is_none());
    logs.create(SessionId(9), None, true).unwrap();
    let fds = logs.descriptors(SessionId(9), false).unwrap();
    assert!(fds.log.is_none() && fds.log_backing.is_none() && fds.nvm.is_none());
}
