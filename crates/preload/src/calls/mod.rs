//! How each system call is made when it concerns the mount. One module per family of calls; [`dispatch`]
//! chooses the module and has the answers counted.

mod attrs;
mod carried;
mod clone;
mod copies;
mod counted;
mod dirs;
mod early;
mod fds;
mod io;
pub mod limits;
mod locks;
mod maps;
mod names;
mod open;
mod programs;
mod watched;

use crate::ofd::Ofd;
use crate::process::Process;
use crate::sys::args::Args;
use crate::walk::{Here, Resolve, Start, Stop};
use crate::why::Why;
use crate::{Errno, stats};
use std::sync::Arc;

/// How a call was handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It does not concern the mount; the kernel is to make it.
    NotOurs,
    /// It does not concern the mount, and has been made.
    Made(isize),
    /// LibFS served it.
    Served(isize),
    /// It concerns the mount and is left to the kernel, which can make it as it stands.
    FellBack(Why),
    /// As `FellBack`, and it has been made.
    FellBackMade(isize, Why),
}

const fn error(errno: Errno) -> isize {
    -(errno.0 as isize)
}

impl Answer {
    /// Turns the result of a served call into an answer. A call that stops at [`Stop::Kernel`] needs no
    /// preparation before the kernel makes it.
    fn of(result: Here<isize>) -> Self {
        match result {
            Ok(value) => Self::Served(value),
            Err(Stop::Errno(errno)) => Self::Served(error(errno)),
            Err(Stop::Kernel(why)) => Self::FellBack(why),
            Err(Stop::Made(result, why)) => Self::FellBackMade(result, why),
        }
    }
}

impl Answer {
    /// As [`of`](Self::of), for a call on a path: ESTALE, of an inode removed during the walk, becomes
    /// ENOENT.
    fn of_path(result: Here<isize>) -> Self {
        match result {
            Err(Stop::Errno(Errno(libc::ESTALE))) => Self::Served(error(Errno(libc::ENOENT))),
            other => Self::of(other),
        }
    }
}

impl Process {
    /// Leaves a call to the kernel after handing it the descriptions behind `fds`.
    fn to_kernel(&self, why: Why, fds: &[i32]) -> Answer {
        for fd in fds {
            if let Err(errno) = self.materialise(*fd) {
                return Answer::FellBackMade(error(errno), Why::CannotOpen);
            }
        }
        Answer::FellBack(why)
    }

    /// Leaves a call to the kernel that never uses the offset of its descriptors: those of `fds` that are
    /// served are made real.
    fn on_real(&self, why: Why, fds: &[i32]) -> Answer {
        let mut answer = Answer::NotOurs;
        for fd in fds.iter().filter(|fd| self.table.has(**fd)) {
            answer = Answer::FellBack(why);
            if let Err(errno) = self.make_real(*fd) {
                return Answer::FellBackMade(error(errno), Why::CannotOpen);
            }
        }
        answer
    }

    /// Leaves a call to the kernel after handing it the served descriptions among `fds`. `NotOurs` if there
    /// is none.
    fn kernels(&self, why: Why, fds: &[i32]) -> Answer {
        if fds.iter().any(|fd| self.table.has(*fd)) {
            self.to_kernel(why, fds)
        } else {
            Answer::NotOurs
        }
    }

    /// Runs a call on the path in argument `i`, relative to `dirfd`.
    fn on_path(
        &self,
        args: &Args,
        dirfd: i32,
        i: usize,
        act: impl FnOnce(Start<'_>) -> Here<isize>,
    ) -> Answer {
        self.on_path_by(args, dirfd, i, Resolve::default(), act)
    }

    /// As [`on_path`](Self::on_path), of a path that is walked by rules.
    fn on_path_by(
        &self,
        args: &Args,
        dirfd: i32,
        i: usize,
        resolve: Resolve,
        act: impl FnOnce(Start<'_>) -> Here<isize>,
    ) -> Answer {
        let path = match args.path(i) {
            Ok(path) => path,
            // The kernel finds the same error and ranks it against others in its own order.
            Err(_) => return self.kernels(Why::NotServed, &[dirfd]),
        };
        if early::is_left_to_mount(self, args, dirfd, path) {
            return Answer::FellBack(Why::FirstCalls);
        }
        let start = if resolve == Resolve::default() {
            self.start(dirfd, path)
        } else {
            self.start_by_rules(dirfd, path, resolve)
        };
        match start {
            Ok(None) => self.of_others(path),
            Ok(Some(start)) => match act(start) {
                Err(Stop::Kernel(why)) => self.for_kernel(dirfd, why),
                other => Answer::of_path(other),
            },
            Err(Stop::Kernel(why)) => self.for_kernel(dirfd, why),
            Err(Stop::Errno(errno)) => Answer::Served(error(errno)),
            Err(Stop::Made(result, why)) => Answer::FellBackMade(result, why),
        }
    }

    /// Leaves a call on a path relative to `dirfd` to the kernel.
    fn for_kernel(&self, dirfd: i32, why: Why) -> Answer {
        match self.on_real(why, &[dirfd]) {
            Answer::NotOurs => Answer::FellBack(why),
            other => other,
        }
    }

    /// Stops serving in this process, for good. Only the call that switches it off counts as fallen back.
    fn gives_up(&self) -> Answer {
        if self.give_up() {
            Answer::FellBack(Why::SwitchedOff)
        } else {
            Answer::NotOurs
        }
    }

    /// Returns the served description that a path names by its descriptor in this process, unless the file is
    /// watched.
    fn named_open(&self, path: &[u8]) -> Option<Arc<Ofd>> {
        let by_number = [&b"/proc/self/fd/"[..], b"/dev/fd/"];
        let is_own = by_number.iter().any(|prefix| path.starts_with(prefix));
        let fd = named_descriptor(path).filter(|_| is_own && !self.is_off())?;
        let ofd = self.table.get(fd)?;
        let is_watched = self.watched().is_some_and(|set| set.has_open(&ofd));
        (!is_watched).then_some(ofd)
    }

    /// Handles a path outside the mount, which may name a served descriptor.
    fn of_others(&self, path: &[u8]) -> Answer {
        named_descriptor(path).map_or(Answer::NotOurs, |fd| self.kernels(Why::NotServed, &[fd]))
    }
}

/// Returns the descriptor that a path like `/proc/self/fd/3` or `/dev/stdin` names.
fn named_descriptor(path: &[u8]) -> Option<i32> {
    let number = |text: &[u8]| {
        std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse::<i32>().ok())
    };
    match path {
        b"/dev/stdin" => Some(0),
        b"/dev/stdout" => Some(1),
        b"/dev/stderr" => Some(2),
        _ => match path.strip_prefix(b"/dev/fd/") {
            Some(rest) => number(rest),
            None if path.starts_with(b"/proc/") => {
                let mut parts = path.rsplit(|byte| *byte == b'/');
                let last = parts.next().unwrap_or_default();
                (parts.next() == Some(b"fd")).then(|| number(last)).flatten()
            }
            None => None,
        },
    }
}

/// Prepares a call of a `vfork` child, which shares this process' memory and has its own table of
/// descriptors. The kernel makes the call. But a call that uses the offset of a served file, or `exec`, which
/// hands files on, acts on descriptions that the child shares with this process: their offset is handed to
/// the kernel first.
pub fn lent(process: &'static Process, args: &Args) {
    let (fd, number) = (args.int(0), args.number() as libc::c_long);
    if stats::wanted() && counted::goes_to_mount(process, args) {
        stats::fell_back(args.number(), Why::BareChild);
    }
    let give = |fd: i32| {
        if let Some(ofd) = process.table.get(fd).filter(|ofd| ofd.is_real()) {
            crate::process::hand_offset(fd, &ofd);
        }
    };
    match number {
        libc::SYS_execve | libc::SYS_execveat => process.hand_inherited(),
        libc::SYS_sendfile | libc::SYS_copy_file_range | libc::SYS_splice => {
            (0..3).for_each(|i| give(args.int(i)));
        }
        libc::SYS_fcntl if !matches!(args.int(1), libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => {}
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_lseek
        | libc::SYS_getdents64
        | libc::SYS_dup
        | libc::SYS_dup2
        | libc::SYS_dup3
        | libc::SYS_fcntl => give(fd),
        _ => {}
    }
}

/// Makes one call of the program. `None` if the kernel is to make it.
pub fn dispatch(process: &'static Process, args: &Args) -> Option<isize> {
    let answer = choose(process, args);
    if stats::wanted() {
        return counted::counted(process, args, answer);
    }
    match answer {
        Answer::NotOurs | Answer::FellBack(_) => None,
        Answer::Made(result) | Answer::Served(result) | Answer::FellBackMade(result, _) => Some(result),
    }
}

fn choose(p: &'static Process, a: &Args) -> Answer {
    use libc as c;
    if let Some(answer) = watched::watched(p, a) {
        return answer;
    }
    if let Some(answer) = open::on_path_only(p, a) {
        return answer;
    }
    let cwd = c::AT_FDCWD;
    match a.number() as c::c_long {
        c::SYS_read => io::read(p, a),
        c::SYS_write => io::write(p, a),
        c::SYS_pread64 => io::pread(p, a),
        c::SYS_pwrite64 => io::pwrite(p, a),
        c::SYS_readv => io::readv(p, a),
        c::SYS_writev => io::writev(p, a),
        c::SYS_preadv | c::SYS_preadv2 => io::preadv(p, a),
        c::SYS_pwritev | c::SYS_pwritev2 => io::pwritev(p, a),
        c::SYS_lseek => io::lseek(p, a),
        c::SYS_ftruncate => io::ftruncate(p, a),
        c::SYS_fallocate => io::fallocate(p, a),
        c::SYS_fsync | c::SYS_fdatasync => io::fsync(p, a),
        c::SYS_syncfs => io::syncfs(p, a),
        c::SYS_sync_file_range => io::sync_file_range(p, a),
        c::SYS_sync => io::sync(p),
        c::SYS_fadvise64 => io::fadvise(p, a),
        c::SYS_readahead => io::readahead(p, a),
        c::SYS_copy_file_range => copies::copy_file_range(p, a),
        c::SYS_sendfile => copies::sendfile(p, a),

        c::SYS_open => open::open(p, a, cwd, 0, a.int(1), a.int(2) as u32),
        c::SYS_creat => open::open(
            p,
            a,
            cwd,
            0,
            c::O_CREAT | c::O_WRONLY | c::O_TRUNC,
            a.int(1) as u32,
        ),
        c::SYS_openat => open::open(p, a, a.int(0), 1, a.int(2), a.int(3) as u32),
        c::SYS_openat2 => open::openat2(p, a),

        c::SYS_close => fds::close(p, a),
        c::SYS_close_range => fds::close_range(p, a),
        c::SYS_dup => fds::dup(p, a),
        c::SYS_dup2 | c::SYS_dup3 => fds::dup_to(p, a),
        c::SYS_fcntl => fds::fcntl(p, a),
        c::SYS_ioctl => fds::ioctl(p, a),
        c::SYS_flock => locks::flock(p, a),

        c::SYS_fstat => attrs::fstat(p, a),
        c::SYS_stat => attrs::stat(p, a, cwd, 0, 1, 0),
        c::SYS_lstat => attrs::stat(p, a, cwd, 0, 1, c::AT_SYMLINK_NOFOLLOW),
        c::SYS_newfstatat => attrs::stat(p, a, a.int(0), 1, 2, a.int(3)),
        c::SYS_statx => attrs::statx(p, a),
        c::SYS_access => attrs::access(p, a, cwd, 0, a.int(1), 0),
        c::SYS_faccessat => attrs::access(p, a, a.int(0), 1, a.int(2), 0),
        c::SYS_faccessat2 => attrs::access(p, a, a.int(0), 1, a.int(2), a.int(3)),
        c::SYS_chmod => attrs::chmod(p, a, cwd, 0, a.int(1) as u32, 0),
        c::SYS_fchmodat => attrs::chmod(p, a, a.int(0), 1, a.int(2) as u32, 0),
        c::SYS_fchmodat2 => attrs::chmod(p, a, a.int(0), 1, a.int(2) as u32, a.int(3)),
        c::SYS_fchmod => attrs::fchmod(p, a),
        c::SYS_chown => attrs::chown(p, a, cwd, 0, 1, 0),
        c::SYS_lchown => attrs::chown(p, a, cwd, 0, 1, c::AT_SYMLINK_NOFOLLOW),
        c::SYS_fchownat => attrs::chown(p, a, a.int(0), 1, 2, a.int(4)),
        c::SYS_fchown => attrs::fchown(p, a),
        c::SYS_truncate => attrs::truncate(p, a),
        c::SYS_utime => attrs::utime(p, a),
        c::SYS_utimes => attrs::utimes(p, a, cwd, 0),
        c::SYS_futimesat => attrs::utimes(p, a, a.int(0), 1),
        c::SYS_utimensat => attrs::utimensat(p, a),
        c::SYS_getxattr => attrs::getxattr(p, a, true),
        c::SYS_lgetxattr => attrs::getxattr(p, a, false),
        c::SYS_fgetxattr => attrs::fgetxattr(p, a),
        c::SYS_setxattr => attrs::setxattr(p, a, true),
        c::SYS_lsetxattr => attrs::setxattr(p, a, false),
        c::SYS_fsetxattr => attrs::fsetxattr(p, a),
        c::SYS_listxattr => attrs::listxattr(p, a, true),
        c::SYS_llistxattr => attrs::listxattr(p, a, false),
        c::SYS_flistxattr => attrs::flistxattr(p, a),
        c::SYS_removexattr => attrs::removexattr(p, a, true),
        c::SYS_lremovexattr => attrs::removexattr(p, a, false),
        c::SYS_fremovexattr => attrs::fremovexattr(p, a),

        c::SYS_mkdir => names::mkdir(p, a, cwd, 0, a.int(1) as u32),
        c::SYS_mkdirat => names::mkdir(p, a, a.int(0), 1, a.int(2) as u32),
        c::SYS_mknod => names::mknod(p, a, cwd, 0, 1),
        c::SYS_mknodat => names::mknod(p, a, a.int(0), 1, 2),
        c::SYS_rmdir => names::unlink(p, a, cwd, 0, c::AT_REMOVEDIR),
        c::SYS_unlink => names::unlink(p, a, cwd, 0, 0),
        c::SYS_unlinkat => names::unlink(p, a, a.int(0), 1, a.int(2)),
        c::SYS_rename => names::rename(p, a, (cwd, 0), (cwd, 1), 0),
        c::SYS_renameat => names::rename(p, a, (a.int(0), 1), (a.int(2), 3), 0),
        c::SYS_renameat2 => names::rename(p, a, (a.int(0), 1), (a.int(2), 3), a.int(4) as u32),
        c::SYS_link => names::link(p, a, (cwd, 0), (cwd, 1), 0),
        c::SYS_linkat => names::link(p, a, (a.int(0), 1), (a.int(2), 3), a.int(4)),
        c::SYS_symlink => names::symlink(p, a, cwd, 1),
        c::SYS_symlinkat => names::symlink(p, a, a.int(1), 2),
        c::SYS_readlink => names::readlink(p, a, cwd, 0),
        c::SYS_readlinkat => names::readlink(p, a, a.int(0), 1),

        c::SYS_getdents64 => dirs::getdents(p, a),
        c::SYS_chdir => dirs::chdir(p, a),
        c::SYS_fchdir => dirs::fchdir(p, a),
        c::SYS_getcwd => dirs::getcwd(p, a),
        c::SYS_chroot | c::SYS_pivot_root | c::SYS_setns | c::SYS_unshare => dirs::other_root(p, a),
        c::SYS_mount => dirs::mount(p, a, cwd, 1),
        c::SYS_move_mount => dirs::mount(p, a, a.int(2), 3),
        c::SYS_umask => dirs::umask(p, a),
        c::SYS_setrlimit => limits::set(a, 0),
        c::SYS_prlimit64 => limits::set(a, 1),

        c::SYS_mmap => maps::mmap(p, a),
        c::SYS_munmap => maps::munmap(p, a),
        c::SYS_mremap => maps::mremap(p, a),
        c::SYS_mprotect | c::SYS_pkey_mprotect => maps::mprotect(p, a),
        c::SYS_madvise => maps::madvise(p, a),
        c::SYS_poll | c::SYS_ppoll => maps::poll(p, a),
        c::SYS_select | c::SYS_pselect6 => maps::select(p, a),
        c::SYS_epoll_ctl => maps::epoll_ctl(p, a),
        c::SYS_splice => p.kernels(Why::NotServed, &[a.int(0), a.int(2)]),
        c::SYS_tee => p.kernels(Why::NotServed, &[a.int(0), a.int(1)]),
        c::SYS_sendmsg => maps::sendmsg(p, a, 1),
        c::SYS_sendmmsg => maps::sendmsg(p, a, a.uint(2) as usize),
        c::SYS_getdents | c::SYS_vmsplice => p.kernels(Why::NotServed, &[a.int(0)]),
        // A placeholder is a descriptor of the mount's file system.
        c::SYS_fstatfs if p.table.has(a.int(0)) => Answer::FellBack(Why::NotServed),
        c::SYS_name_to_handle_at | c::SYS_open_by_handle_at => p.on_real(Why::NotServed, &[a.int(0)]),
        c::SYS_io_setup | c::SYS_io_uring_setup => maps::rings(p),
        c::SYS_bpf => carried::unknown(p, a),
        c::SYS_inotify_add_watch => watched::inotify_add_watch(p, a),
        c::SYS_fanotify_mark => watched::fanotify_mark(p, a),

        c::SYS_fork => programs::fork(p, a),
        c::SYS_vfork => programs::vfork(p),
        c::SYS_clone => programs::clone(p, a, a.word(0) as u64, a.word(1) as u64),
        c::SYS_clone3 => programs::clone3(p, a),
        c::SYS_execve | c::SYS_execveat => programs::exec(p, a),
        c::SYS_exit_group => programs::exit(p),
        c::SYS_setuid
        | c::SYS_setgid
        | c::SYS_setreuid
        | c::SYS_setregid
        | c::SYS_setresuid
        | c::SYS_setresgid
        | c::SYS_setfsuid
        | c::SYS_setfsgid
        | c::SYS_setgroups => programs::set_ids(p, a),
        c::SYS_rt_sigaction => crate::sys::signals::sigaction(a).map_or(Answer::NotOurs, Answer::Made),
        c::SYS_rt_sigprocmask => crate::sys::signals::sigprocmask(a).map_or(Answer::NotOurs, Answer::Made),
        c::SYS_prctl => {
            crate::sys::reentry::named(a);
            Answer::NotOurs
        }
        _ => carried::known(p, a),
    }
}
