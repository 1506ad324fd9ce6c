//! The system calls that the library intercepts. `docs/guide/run.md` lists them too, and a test compares.

/// One more than the highest intercepted number.
pub const NUMBERS: usize = 512;

// Counters of `--stats`: two for each number (served, fallen back), then one for each of `SESSIONS`,
// `OPENED`, and from `WHY` on one for each reason of calls that have fallen back.

/// Outcomes of a process' attempt to open a session.
pub const SESSIONS: [&str; 2] = ["opened", "refused"];
/// Counter of the served files that were opened on the mount too.
pub const OPENED: usize = NUMBERS * 2 + SESSIONS.len();
/// First counter of the reasons.
pub const WHY: usize = OPENED + 1;

macro_rules! numbers {
    ($($name:ident),* ; $($newer:ident = $number:literal),* $(,)?) => {
        /// Name and number of each intercepted system call.
        pub const LOOKED_AT: &[(&str, libc::c_long)] = &[
            $((stringify!($name), libc::$name)),*,
            $((stringify!($newer), newer::$newer)),*
        ];

        /// System calls that the crate `libc` does not know yet.
        #[allow(non_upper_case_globals, missing_docs, reason = "named as there")]
        pub mod newer {
            $(pub const $newer: libc::c_long = $number;)*
        }
    };
}

numbers![
    SYS_read,
    SYS_write,
    SYS_pread64,
    SYS_pwrite64,
    SYS_readv,
    SYS_writev,
    SYS_preadv,
    SYS_preadv2,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_lseek,
    SYS_ftruncate,
    SYS_fallocate,
    SYS_fsync,
    SYS_fdatasync,
    SYS_syncfs,
    SYS_sync_file_range,
    SYS_sync,
    SYS_fadvise64,
    SYS_readahead,
    SYS_copy_file_range,
    SYS_sendfile,
    SYS_open,
    SYS_creat,
    SYS_openat,
    SYS_openat2,
    SYS_close,
    SYS_close_range,
    SYS_dup,
    SYS_dup2,
    SYS_dup3,
    SYS_fcntl,
    SYS_ioctl,
    SYS_flock,
    SYS_fstat,
    SYS_stat,
    SYS_lstat,
    SYS_newfstatat,
    SYS_statx,
    SYS_access,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_chmod,
    SYS_fchmodat,
    SYS_fchmodat2,
    SYS_fchmod,
    SYS_chown,
    SYS_lchown,
    SYS_fchownat,
    SYS_fchown,
    SYS_truncate,
    SYS_utime,
    SYS_utimes,
    SYS_futimesat,
    SYS_utimensat,
    SYS_getxattr,
    SYS_lgetxattr,
    SYS_fgetxattr,
    SYS_setxattr,
    SYS_lsetxattr,
    SYS_fsetxattr,
    SYS_listxattr,
    SYS_llistxattr,
    SYS_flistxattr,
    SYS_removexattr,
    SYS_lremovexattr,
    SYS_fremovexattr,
    SYS_mkdir,
    SYS_mkdirat,
    SYS_mknod,
    SYS_mknodat,
    SYS_rmdir,
    SYS_unlink,
    SYS_unlinkat,
    SYS_rename,
    SYS_renameat,
    SYS_renameat2,
    SYS_link,
    SYS_linkat,
    SYS_symlink,
    SYS_symlinkat,
    SYS_readlink,
    SYS_readlinkat,
    SYS_getdents64,
    SYS_chdir,
    SYS_fchdir,
    SYS_getcwd,
    SYS_chroot,
    SYS_pivot_root,
    SYS_setns,
    SYS_unshare,
    SYS_mount,
    SYS_move_mount,
    SYS_umask,
    SYS_setrlimit,
    SYS_prlimit64,
    SYS_mmap,
    SYS_munmap,
    SYS_mremap,
    SYS_mprotect,
    SYS_pkey_mprotect,
    SYS_madvise,
    SYS_poll,
    SYS_ppoll,
    SYS_select,
    SYS_pselect6,
    SYS_epoll_ctl,
    SYS_splice,
    SYS_tee,
    SYS_sendmsg,
    SYS_sendmmsg,
    SYS_getdents,
    SYS_vmsplice,
    SYS_fstatfs,
    SYS_name_to_handle_at,
    SYS_open_by_handle_at,
    SYS_io_setup,
    SYS_io_uring_setup,
    SYS_inotify_add_watch,
    SYS_fanotify_mark,
    SYS_fork,
    SYS_vfork,
    SYS_clone,
    SYS_clone3,
    SYS_execve,
    SYS_execveat,
    SYS_exit_group,
    SYS_setuid,
    SYS_setgid,
    SYS_setreuid,
    SYS_setregid,
    SYS_setresuid,
    SYS_setresgid,
    SYS_setfsuid,
    SYS_setfsgid,
    SYS_setgroups,
    SYS_prctl,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_bind,
    SYS_connect,
    SYS_listen,
    SYS_accept,
    SYS_accept4,
    SYS_shutdown,
    SYS_getsockname,
    SYS_getpeername,
    SYS_getsockopt,
    SYS_setsockopt,
    SYS_sendto,
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_recvmmsg,
    SYS_bpf,
    SYS_kcmp,
    SYS_pidfd_getfd,
    SYS_fsconfig,
    SYS_kexec_file_load,
    SYS_landlock_add_rule,
    SYS_open_tree,
    SYS_fspick,
    SYS_mount_setattr,
    SYS_finit_module,
    SYS_quotactl_fd;
    SYS_cachestat = 451,
    SYS_setxattrat = 463,
    SYS_getxattrat = 464,
    SYS_listxattrat = 465,
    SYS_removexattrat = 466,
    SYS_open_tree_attr = 467,
    SYS_file_getattr = 468,
    SYS_file_setattr = 469,
];

/// Intercepted only when LibFS itself makes them.
const OWN: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_memfd_create,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_pidfd_open,
];

/// Returns the numbers that stubs intercept.
#[must_use]
pub fn all() -> Vec<usize> {
    LOOKED_AT
        .iter()
        .map(|(_, number)| *number)
        .chain(OWN.iter().copied())
        .map(|number| number as usize)
        .collect()
}

/// Returns the name of an intercepted system call.
#[must_use]
pub fn name(number: usize) -> Option<&'static str> {
    let found = LOOKED_AT.iter().find(|(_, other)| *other as usize == number)?;
    Some(found.0.trim_start_matches("SYS_"))
}
