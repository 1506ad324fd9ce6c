//! The system calls that the library looks at. `docs/PRELOAD.md` lists the same, and a test compares.

/// One more than the highest number looked at.
pub const NUMBERS: usize = 512;

macro_rules! numbers {
    ($($name:ident),* $(,)?) => {
        /// Name and number of each.
        pub const LOOKED_AT: &[(&str, libc::c_long)] = &[$((stringify!($name), libc::$name)),*];
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
    SYS_chroot,
    SYS_pivot_root,
    SYS_setns,
    SYS_unshare,
    SYS_mount,
    SYS_move_mount,
    SYS_umask,
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
    SYS_io_setup,
    SYS_io_uring_setup,
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
];

/// Looked at for the sake of the library's own calls only.
const OWN: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_recvmsg,
    libc::SYS_memfd_create,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_pidfd_open,
];

/// The numbers for which stubs ask.
#[must_use]
pub fn all() -> Vec<usize> {
    LOOKED_AT
        .iter()
        .map(|(_, number)| *number)
        .chain(OWN.iter().copied())
        .map(|number| number as usize)
        .collect()
}

/// Name of a system call that is looked at.
#[must_use]
pub fn name(number: usize) -> Option<&'static str> {
    let found = LOOKED_AT.iter().find(|(_, other)| *other as usize == number)?;
    Some(found.0.trim_start_matches("SYS_"))
}
