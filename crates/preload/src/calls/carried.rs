//! Calls that carry descriptors in structures, or in arguments beside the one that they operate on. The
//! kernel looks these descriptors up itself, so they are made real first. A call of unknown layout is tried;
//! EBADF shows that it carried a placeholder.

use super::Answer;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::kernel;
use crate::why::Why;
use smallvec::{SmallVec, smallvec};

const FICLONE: libc::c_ulong = 0x4004_9409;
const FICLONERANGE: libc::c_ulong = 0x4020_940d;
const FIDEDUPERANGE: libc::c_ulong = 0xc018_9436;
const LOOP_SET_FD: libc::c_ulong = 0x4c00;
const LOOP_CHANGE_FD: libc::c_ulong = 0x4c06;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
/// Layout of `file_dedupe_range` in 8-byte words: words before the targets, words of each target. At most
/// `TARGETS_MAX` targets fit a page.
const DEDUPE_HEAD: usize = 3;
const DEDUPE_EACH: usize = 4;
const TARGETS_MAX: usize = 127;
const KCMP_FILE: i32 = 0;
/// `fsconfig` commands that take a descriptor or the directory at which a path starts.
const FSCONFIG_WITH_FD: std::ops::RangeInclusive<i32> = 3..=5;
/// Index of the directory's descriptor in a Landlock rule about paths, in 4-byte words.
const RULE_FD: usize = 2;

/// Returns the descriptors that the argument of an `ioctl` carries.
fn of_ioctl(a: &Args) -> Vec<i32> {
    let word = |nth| a.get_nth::<u64>(2, nth).map(|word| word as i32);
    match libc::c_ulong::from(a.uint(1)) {
        FICLONE | LOOP_SET_FD | LOOP_CHANGE_FD => vec![a.int(2)],
        FICLONERANGE => word(0).into_iter().collect(),
        LOOP_CONFIGURE => a.get::<u32>(2).map(|fd| fd as i32).into_iter().collect(),
        FIDEDUPERANGE => {
            let count = word(2).map_or(0, |count| (count as u32 & 0xffff) as usize);
            (0..count.min(TARGETS_MAX))
                .map_while(|nth| word(DEDUPE_HEAD + nth * DEDUPE_EACH).ok())
                .collect()
        }
        _ => Vec::new(),
    }
}

/// Handles `ioctl` on a descriptor that is not served here.
pub(super) fn ioctl(p: &Process, a: &Args) -> Answer {
    let carried = of_ioctl(a);
    if carried.is_empty() {
        return unknown(p, a);
    }
    p.on_real(Why::NotServed, &carried)
}

/// Handles a call that may carry any descriptor. The kernel refuses a placeholder with EBADF before it
/// changes anything; all descriptions are then made real and the call is repeated.
pub(super) fn unknown(p: &Process, a: &Args) -> Answer {
    const BAD: isize = -(libc::EBADF as isize);
    if p.table.is_unused() {
        return Answer::NotOurs;
    }
    let result = outside(|| a.call());
    let by_itself =
        || a.number() as libc::c_long == libc::SYS_ioctl && kernel::fcntl(a.int(0), libc::F_GETFD, 0) < 0;
    if result != BAD || by_itself() || !p.make_all_real() {
        return Answer::Made(result);
    }
    Answer::FellBackMade(outside(|| a.call()), Why::NotServed)
}

/// Handles calls of which the positions of all descriptors are known. If a call starts a path at a
/// placeholder, or passes an empty path with it, the kernel would take the mount's root for it.
pub(super) fn known(p: &Process, a: &Args) -> Answer {
    if p.table.is_unused() {
        return Answer::NotOurs;
    }
    use crate::syscalls::newer as n;
    use libc as c;
    let fds: SmallVec<[i32; 2]> = match a.number() as c::c_long {
        c::SYS_kcmp if a.int(2) == KCMP_FILE => smallvec![a.int(3), a.int(4)],
        c::SYS_pidfd_getfd => smallvec![a.int(1)],
        c::SYS_fsconfig if FSCONFIG_WITH_FD.contains(&a.int(1)) => smallvec![a.int(4)],
        c::SYS_kexec_file_load => smallvec![a.int(0), a.int(1)],
        c::SYS_landlock_add_rule => {
            let inside = a.get_nth::<i32>(2, RULE_FD).ok();
            inside.into_iter().chain([a.int(0)]).collect()
        }
        // Files are no sockets: ENOTSOCK, where a placeholder would be EBADF.
        c::SYS_bind
        | c::SYS_connect
        | c::SYS_listen
        | c::SYS_accept
        | c::SYS_accept4
        | c::SYS_shutdown
        | c::SYS_getsockname
        | c::SYS_getpeername
        | c::SYS_getsockopt
        | c::SYS_setsockopt
        | c::SYS_sendto
        | c::SYS_recvfrom
        | c::SYS_recvmsg
        | c::SYS_recvmmsg => smallvec![a.int(0)],
        c::SYS_open_tree
        | c::SYS_fspick
        | c::SYS_mount_setattr
        | c::SYS_finit_module
        | c::SYS_quotactl_fd
        | n::SYS_cachestat
        | n::SYS_setxattrat
        | n::SYS_getxattrat
        | n::SYS_listxattrat
        | n::SYS_removexattrat
        | n::SYS_open_tree_attr
        | n::SYS_file_getattr
        | n::SYS_file_setattr => smallvec![a.int(0)],
        _ => return Answer::NotOurs,
    };
    p.on_real(Why::NotServed, &fds)
}
