//! System calls that go straight to the kernel. Knows no served descriptors.

use std::arch::asm;
use std::ffi::CStr;

/// Makes a system call. Negative results are `-errno`.
///
/// # Safety
/// As for the system call: pointers among the arguments must be valid for it.
pub unsafe fn call(number: usize, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the caller vouches for the arguments; `syscall` clobbers rcx and r11 only.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

const fn nr(number: libc::c_long) -> usize {
    number as usize
}

/// Returns the process id.
#[must_use]
pub fn getpid() -> i32 {
    // SAFETY: takes no arguments.
    (unsafe { call(nr(libc::SYS_getpid), [0; 6]) }) as i32
}

/// Returns the thread id.
#[must_use]
pub fn gettid() -> i32 {
    // SAFETY: takes no arguments.
    (unsafe { call(nr(libc::SYS_gettid), [0; 6]) }) as i32
}

/// Whether this process may be able to execute the file whose path is at `path`: false if it does not exist
/// or permissions forbid it.
#[must_use]
pub fn may_execute(path: usize) -> bool {
    let flags = libc::AT_EACCESS as usize;
    let a = [libc::AT_FDCWD as usize, path, libc::X_OK as usize, flags, 0, 0];
    // SAFETY: the program's own pointer, which the kernel checks.
    let found = unsafe { call(nr(libc::SYS_faccessat2), a) };
    ![libc::ENOENT, libc::ENOTDIR, libc::EACCES].contains(&(-found as i32))
}

/// Whether thread `tid` still runs. A zombie does not.
#[must_use]
pub fn runs(tid: i32) -> bool {
    let path = format!("/proc/{tid}/stat\0");
    let fd = open(path.as_bytes(), libc::O_RDONLY | libc::O_CLOEXEC, 0);
    if fd < 0 {
        // Without access to /proc the thread is taken to run.
        let own = open(b"/proc/self/stat\0", libc::O_RDONLY | libc::O_CLOEXEC, 0);
        if own >= 0 {
            close(own as i32);
        }
        return own < 0 || ![libc::ENOENT, libc::ESRCH].contains(&(-fd as i32));
    }
    let mut text = [0_u8; 512];
    let len = usize::try_from(read(fd as i32, &mut text)).unwrap_or(0);
    close(fd as i32);
    // The name before the state may contain any characters.
    let state = text[..len]
        .iter()
        .rposition(|byte| *byte == b')')
        .and_then(|at| text.get(at + 2));
    !matches!(state, None | Some(b'Z' | b'X'))
}

/// Sleeps for `time`.
pub fn nap(time: std::time::Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    // SAFETY: the time is ours; the remaining time is not requested.
    unsafe {
        call(
            nr(libc::SYS_nanosleep),
            [(&raw const time) as usize, 0, 0, 0, 0, 0],
        )
    };
}

/// `close`.
pub fn close(fd: i32) -> isize {
    // SAFETY: takes a number.
    unsafe { call(nr(libc::SYS_close), [fd as usize, 0, 0, 0, 0, 0]) }
}

/// `fcntl` with a number as its argument.
pub fn fcntl(fd: i32, command: i32, value: usize) -> isize {
    debug_assert!(!matches!(command, libc::F_GETLK | libc::F_SETLK | libc::F_SETLKW));
    // SAFETY: these commands take numbers.
    unsafe {
        call(
            nr(libc::SYS_fcntl),
            [fd as usize, command as usize, value, 0, 0, 0],
        )
    }
}

/// `dup3`.
pub fn dup3(fd: i32, to: i32, flags: i32) -> isize {
    // SAFETY: takes numbers.
    unsafe {
        call(
            nr(libc::SYS_dup3),
            [fd as usize, to as usize, flags as usize, 0, 0, 0],
        )
    }
}

/// `lseek`.
pub fn lseek(fd: i32, offset: i64, whence: i32) -> isize {
    // SAFETY: takes numbers.
    unsafe {
        call(
            nr(libc::SYS_lseek),
            [fd as usize, offset as usize, whence as usize, 0, 0, 0],
        )
    }
}

/// `openat` from the working directory; `path` ends with a zero byte.
pub fn open(path: &[u8], flags: i32, mode: u32) -> isize {
    open_at(libc::AT_FDCWD, path, flags, mode)
}

/// `openat`; `path` ends with a zero byte.
pub fn open_at(dir: i32, path: &[u8], flags: i32, mode: u32) -> isize {
    assert_eq!(
        path.last(),
        Some(&0),
        "a path for the kernel ends with a zero byte"
    );
    let a = [
        dir as usize,
        path.as_ptr() as usize,
        flags as usize,
        mode as usize,
        0,
        0,
    ];
    // SAFETY: the path ends with a zero byte, as asserted.
    unsafe { call(nr(libc::SYS_openat), a) }
}

/// `read`.
pub fn read(fd: i32, out: &mut [u8]) -> isize {
    // SAFETY: the buffer is ours and has the length passed.
    unsafe {
        call(
            nr(libc::SYS_read),
            [fd as usize, out.as_mut_ptr() as usize, out.len(), 0, 0, 0],
        )
    }
}

/// `pread`.
pub fn pread(fd: i32, out: &mut [u8], offset: u64) -> isize {
    // SAFETY: the buffer is ours and has the length passed.
    unsafe {
        call(
            nr(libc::SYS_pread64),
            [
                fd as usize,
                out.as_mut_ptr() as usize,
                out.len(),
                offset as usize,
                0,
                0,
            ],
        )
    }
}

/// `write`.
pub fn write(fd: i32, data: &[u8]) -> isize {
    // SAFETY: the buffer is ours and has the length passed.
    unsafe {
        call(
            nr(libc::SYS_write),
            [fd as usize, data.as_ptr() as usize, data.len(), 0, 0, 0],
        )
    }
}

/// Returns device and inode number by `fstat`, or by `stat` of the working directory for -1.
#[must_use]
pub fn identity(fd: i32) -> Option<(u64, u64)> {
    known(fd, libc::STATX_INO).map(|is| (device_of(&is), is.stx_ino))
}

/// Returns device and file type by `fstat`.
#[must_use]
pub fn kind(fd: i32) -> Option<(u64, u32)> {
    if fd < 0 {
        return None;
    }
    known(fd, libc::STATX_TYPE).map(|is| (device_of(&is), u32::from(is.stx_mode) & libc::S_IFMT))
}

/// Returns file type and size by `fstat`.
#[must_use]
pub fn type_and_size(fd: i32) -> Option<(u32, u64)> {
    let statx = known(fd, libc::STATX_TYPE | libc::STATX_SIZE)?;
    Some((u32::from(statx.stx_mode) & libc::S_IFMT, statx.stx_size))
}

/// Returns the device of the file at a path, or of a descriptor (`dir`, with an empty path). A symbolic link
/// at the end is not followed, and no file system is asked for more than names.
#[must_use]
pub fn device_at(dir: i32, path: &CStr) -> Option<u64> {
    let flags =
        libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    statx(dir, path, flags, 0).map(|is| device_of(&is))
}

/// Returns device and inode number of the file at a path, or of a descriptor (`dir`, with an empty path).
#[must_use]
pub fn inode_at(dir: i32, path: &CStr, follow: bool) -> Option<(u64, u64)> {
    let kept = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    let flags = kept | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH;
    let statx = statx(dir, path, flags, libc::STATX_INO)?;
    let device = libc::makedev(statx.stx_dev_major, statx.stx_dev_minor);
    Some((device, statx.stx_ino))
}

/// Returns mode and size of the file at a path.
#[must_use]
pub fn mode_and_size(dir: i32, path: &CStr, follow: bool) -> Option<(u32, u64)> {
    let kept = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    let mask = libc::STATX_TYPE | libc::STATX_SIZE;
    let statx = statx(dir, path, kept | libc::AT_NO_AUTOMOUNT, mask)?;
    Some((u32::from(statx.stx_mode), statx.stx_size))
}

/// Requests an extended attribute of a file and discards the value; both texts end with a zero byte.
pub fn ask_attribute(path: &[u8], name: &[u8]) {
    assert!(path.ends_with(&[0]) && name.ends_with(&[0]));
    let a = [path.as_ptr() as usize, name.as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: both texts end with a zero byte, and nothing is written.
    unsafe { call(nr(libc::SYS_getxattr), a) };
}

/// Makes `fstat`, or `stat` of the working directory for -1.
pub(super) fn stat(fd: i32) -> Option<libc::stat> {
    // SAFETY: all bytes zero is a value of the type.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let out = (&raw mut stat) as usize;
    // SAFETY: paths end with a zero byte and `stat` takes the result.
    let done = unsafe {
        if fd < 0 {
            call(
                nr(libc::SYS_newfstatat),
                [libc::AT_FDCWD as usize, c".".as_ptr() as usize, out, 0, 0, 0],
            )
        } else {
            call(nr(libc::SYS_fstat), [fd as usize, out, 0, 0, 0, 0])
        }
    };
    (done == 0).then_some(stat)
}

fn device_of(is: &libc::statx) -> u64 {
    libc::makedev(is.stx_dev_major, is.stx_dev_minor)
}

/// Returns the kernel's own knowledge of a descriptor, or of the working directory for -1, from when it was
/// opened: asking the mount would be one more request for each file that is made real.
fn known(fd: i32, mask: u32) -> Option<libc::statx> {
    let flags = libc::AT_NO_AUTOMOUNT | libc::AT_STATX_DONT_SYNC;
    if fd < 0 {
        return statx(libc::AT_FDCWD, c".", flags, mask);
    }
    statx(fd, c"", flags | libc::AT_EMPTY_PATH, mask)
}

fn statx(dir: i32, path: &CStr, flags: i32, mask: u32) -> Option<libc::statx> {
    // SAFETY: all bytes zero is a value of the type.
    let mut statx: libc::statx = unsafe { std::mem::zeroed() };
    let a = [
        dir as usize,
        path.as_ptr() as usize,
        flags as usize,
        mask as usize,
        (&raw mut statx) as usize,
        0,
    ];
    // SAFETY: the path ends with a zero byte and `statx` takes the result.
    (unsafe { call(nr(libc::SYS_statx), a) } == 0).then_some(statx)
}

/// Has the kernel ask the file system for the file's length again.
pub fn refresh(fd: i32) {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC;
    let _ = statx(fd, c"", flags, libc::STATX_SIZE);
}

/// Whether a file system is mounted at `path`.
#[must_use]
pub fn is_mount_point(path: &CStr) -> bool {
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_DONT_SYNC;
    statx(libc::AT_FDCWD, path, flags, libc::STATX_TYPE)
        .is_some_and(|statx| statx.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0)
}

/// Whether the file behind `fd` signals a change (`POLLPRI` or `POLLERR`) since it was last polled, as the
/// table of mounts does.
#[must_use]
pub fn is_changed(fd: i32) -> bool {
    let mut asked = libc::pollfd {
        fd,
        events: libc::POLLPRI,
        revents: 0,
    };
    // SAFETY: one entry, ours; the call does not wait.
    let found = unsafe { call(nr(libc::SYS_poll), [(&raw mut asked) as usize, 1, 0, 0, 0, 0]) };
    found > 0 && asked.revents & (libc::POLLPRI | libc::POLLERR) != 0
}

/// Returns the working directory's path.
#[must_use]
pub fn getcwd() -> Option<Vec<u8>> {
    let mut path = vec![0_u8; libc::PATH_MAX as usize];
    // SAFETY: the buffer is ours and has the length passed.
    let len = unsafe {
        call(
            nr(libc::SYS_getcwd),
            [path.as_mut_ptr() as usize, path.len(), 0, 0, 0, 0],
        )
    };
    let len = usize::try_from(len).ok()?.checked_sub(1)?;
    path.truncate(len);
    // A path that the process cannot reach begins with "(unreachable)".
    path.starts_with(b"/").then_some(path)
}

/// Returns the path of the directory behind a descriptor; `None` if it is no directory, is removed, or cannot
/// be reached by the process.
#[must_use]
pub fn directory_path(fd: i32) -> Option<Vec<u8>> {
    if fd < 0 || kind(fd)?.1 != libc::S_IFDIR {
        return None;
    }
    let link = format!("/proc/self/fd/{fd}\0");
    let mut path = vec![0_u8; libc::PATH_MAX as usize];
    let a = [
        libc::AT_FDCWD as usize,
        link.as_ptr() as usize,
        path.as_mut_ptr() as usize,
        path.len(),
        0,
        0,
    ];
    // SAFETY: the link's path ends with a zero byte; the buffer is ours and has the length passed.
    let len = usize::try_from(unsafe { call(nr(libc::SYS_readlinkat), a) }).ok()?;
    path.truncate(len);
    let gone = path.ends_with(b" (deleted)") || path.len() == libc::PATH_MAX as usize;
    (path.starts_with(b"/") && !gone).then_some(path)
}

/// Returns the open descriptors below 1000, which covers those that a program usually inherits.
pub fn descriptors() -> impl Iterator<Item = i32> {
    (0..1000).filter(|fd| fcntl(*fd, libc::F_GETFD, 0) >= 0)
}

/// Sets the umask and returns the old one.
pub fn umask(mask: u32) -> u32 {
    // SAFETY: takes a number.
    (unsafe { call(nr(libc::SYS_umask), [mask as usize, 0, 0, 0, 0, 0]) }) as u32
}

/// The credentials of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids {
    /// User id for file access.
    pub uid: u32,
    /// Group id for file access.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Whether the real ids equal those for file access.
    pub same: bool,
    /// Real, effective and saved user id.
    pub users: [u32; 3],
}

/// Returns the credentials of this thread.
#[must_use]
pub fn ids() -> Ids {
    let mut three = [[0_u32; 3]; 2];
    // SAFETY: with no room it only counts.
    let count = unsafe { call(nr(libc::SYS_getgroups), [0; 6]) };
    let mut groups = vec![0_u32; usize::try_from(count).unwrap_or(0)];
    // SAFETY: `getresuid` and `getresgid` fill three numbers each, `getgroups` a buffer of the length passed;
    // `setfsuid` and `setfsgid` take numbers, and -1 changes nothing.
    unsafe {
        for (number, out) in [libc::SYS_getresuid, libc::SYS_getresgid].iter().zip(&mut three) {
            let out = out.as_mut_ptr() as usize;
            call(nr(*number), [out, out + 4, out + 8, 0, 0, 0]);
        }
        let count = call(
            nr(libc::SYS_getgroups),
            [groups.len(), groups.as_mut_ptr() as usize, 0, 0, 0, 0],
        );
        groups.truncate(usize::try_from(count).unwrap_or(0));
        let for_files = |number| call(nr(number), [usize::MAX, 0, 0, 0, 0, 0]) as u32;
        let (uid, gid) = (for_files(libc::SYS_setfsuid), for_files(libc::SYS_setfsgid));
        Ids {
            uid,
            gid,
            groups,
            same: uid == three[0][0] && gid == three[1][0],
            users: three[0],
        }
    }
}

/// Runs `work` with the file-access rights of `user`, if this thread may take them on.
pub fn with_files_of<T>(user: u32, work: impl FnOnce() -> T) -> T {
    // SAFETY: takes a number.
    let set = |user: usize| unsafe { call(nr(libc::SYS_setfsuid), [user, 0, 0, 0, 0, 0]) } as usize;
    let before = set(user as usize);
    let value = work();
    set(before);
    value
}

/// Blocks the signals of `mask` in this thread, or unblocks them.
pub fn sigmask(block: bool, mask: u64) {
    let how = if block { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    let set = (&raw const mask) as usize;
    // SAFETY: a kernel signal set is 8 bytes.
    unsafe { call(nr(libc::SYS_rt_sigprocmask), [how as usize, set, 0, 8, 0, 0]) };
}

/// Returns a resource limit of this process, and sets it to `new` if given: soft and hard, all ones for no
/// limit.
fn limit(resource: u32, new: Option<libc::rlimit>) -> Option<libc::rlimit> {
    let mut old = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let new = new.as_ref().map_or(0, |new| std::ptr::from_ref(new) as usize);
    let a = [0, resource as usize, new, (&raw mut old) as usize, 0, 0];
    // SAFETY: the new limit is ours or null; `old` takes the result.
    let done = unsafe { call(nr(libc::SYS_prlimit64), a) };
    (done == 0).then_some(old)
}

/// Returns the soft and hard limit on descriptors.
#[must_use]
pub fn descriptors_max() -> (usize, usize) {
    let limit = limit(libc::RLIMIT_NOFILE, None);
    limit.map_or((1024, 1024), |limit| {
        (limit.rlim_cur as usize, limit.rlim_max as usize)
    })
}

/// Sets the limit on descriptors. False on failure.
pub fn set_descriptors_max(soft: usize, hard: usize) -> bool {
    let new = libc::rlimit {
        rlim_cur: soft as u64,
        rlim_max: hard as u64,
    };
    limit(libc::RLIMIT_NOFILE, Some(new)).is_some()
}

/// Returns the soft limit on the length of files, in bytes; all ones if there is none.
#[must_use]
pub fn file_max() -> u64 {
    limit(libc::RLIMIT_FSIZE, None).map_or(u64::MAX, |limit| limit.rlim_cur)
}

/// Sends a signal to this thread.
pub fn raise(signal: i32) {
    let a = [getpid() as usize, gettid() as usize, signal as usize, 0, 0, 0];
    // SAFETY: takes numbers.
    unsafe { call(nr(libc::SYS_tgkill), a) };
}
