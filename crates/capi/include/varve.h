// Varve: a file system across NVM, SSD and HDD, for C programs (link with -lvarve, or `pkg-config --cflags --libs varve`).
//
// Calls are those of POSIX with the connection as their first argument. They fail as those do: -1 (or NULL) and `errno`, with the numbers that
// Linux gives; NULL for a handle is EINVAL, NULL for a path or buffer EFAULT, a handle that is not (or no more) one EBADF. What they
// promise is in docs/reference/semantics.md: a call that returned survives the end of any process; `varve_fsync` makes it survive power loss
// (at once, with VARVE_SYNC_ALWAYS).
//
// Every function may be called from several threads at once, on the same handles too. Paths are NUL-terminated bytes and start at the pool's
// root; descriptors are numbers of the connection, not of the kernel. Nothing here may be called in the child of a fork without
// exec: connect anew there. Not from signal handlers.


#ifndef VARVE_H
#define VARVE_H

// Made by cbindgen from crates/capi/src/ffi: change it there.

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>

// Longest name in bytes, with its NUL.
#define VARVE_NAME_BYTES 256

// Make each change durable against power loss before its call returns.
#define VARVE_SYNC_ALWAYS 1

// Open a session that changes nothing; it needs no log.
#define VARVE_READ_ONLY 2

// An open directory. If threads share it, each entry goes to one of them.
typedef struct varve_dir varve_dir;

// A connected pool: one session. All threads of the process may use it at once.
typedef struct varve_fs varve_fs;

// A group of calls that take effect together or not at all, whatever fails and whenever the process or the
// machine dies. No call takes effect before `varve_tx_commit`, and nobody, the caller included, sees any of
// them before. Calls are checked at the commit, in order; only errors that a call shows by itself (a bad
// name, a file that is not open for writing, an exceeded limit) are returned at once, and leave the group as
// it was. Limits: 64 entries (one per call, one per MiB of a write), 2 MiB of log (data, and 64 to 128 bytes
// and the names for each call), 64 files and directories that existed before; E2BIG beyond. Paths are
// resolved when the call is added; directories made by the same group count, under the path that they were
// made with.
typedef struct varve_tx varve_tx;

// An entry of a directory.
typedef struct {
    // Inode number.
    uint64_t d_ino;
    // DT_REG, DT_DIR, DT_LNK and so on.
    uint8_t d_type;
    // Name, NUL-terminated. "." and ".." are not listed.
    char d_name[VARVE_NAME_BYTES];
} varve_dirent;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// As opendir(3). NULL and errno on failure.
varve_dir *varve_opendir(varve_fs *fs, const char *path);

// Reads the next entry: 1 and `*entry`, 0 at the end, -1 and errno on failure. An entry that exists
// throughout is returned exactly once.
int varve_readdir(varve_dir *dir, varve_dirent *entry);

// As rewinddir(3).
int varve_rewinddir(varve_dir *dir);

// As closedir(3).
int varve_closedir(varve_dir *dir);

// As open(2), with a path in the pool. The descriptor is a number of this connection, not of the kernel.
// ENXIO for fifos, sockets, devices.
int varve_open(varve_fs *fs, const char *path, int flags, mode_t mode);

// As openat(2); `dirfd` may be AT_FDCWD.
int varve_openat(varve_fs *fs, int dirfd, const char *path, int flags, mode_t mode);

// As close(2).
int varve_close(varve_fs *fs, int fd);

// As dup(2).
int varve_dup(varve_fs *fs, int fd);

// As read(2).
ssize_t varve_read(varve_fs *fs, int fd, void *buffer, size_t len);

// As pread(2).
ssize_t varve_pread(varve_fs *fs, int fd, void *buffer, size_t len, off_t offset);

// As write(2). Up to 16 MiB, or a quarter of the longest log if that is less, are written atomically; a
// longer write is split into several, in order.
ssize_t varve_write(varve_fs *fs, int fd, const void *buffer, size_t len);

// As pwrite(2).
ssize_t varve_pwrite(varve_fs *fs, int fd, const void *buffer, size_t len, off_t offset);

// As lseek(2); `whence` may be SEEK_DATA or SEEK_HOLE too.
off_t varve_lseek(varve_fs *fs, int fd, off_t offset, int whence);

// As fsync(2). Makes everything durable that this connection has logged so far.
int varve_fsync(varve_fs *fs, int fd);

// As fdatasync(2).
int varve_fdatasync(varve_fs *fs, int fd);

// As ftruncate(2).
int varve_ftruncate(varve_fs *fs, int fd, off_t size);

// As fallocate(2): 0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE with it, FALLOC_FL_ZERO_RANGE with it or
// alone; EOPNOTSUPP for others.
int varve_fallocate(varve_fs *fs, int fd, int mode, off_t offset, off_t len);

// As fstat(2); `st_dev` is 0.
int varve_fstat(varve_fs *fs, int fd, struct stat *out);

// As flock(2). Locks are those of the pool's mount, shared by programs on it, programs under `varve run` and
// linked programs. ENOLCK without a mount (set VARVE_DEBUG in the environment for the cause in words); the
// first lock call on a descriptor opens the file on the mount, and fails if that does.
int varve_flock(varve_fs *fs, int fd, int operation);

// As fcntl(2) with F_SETLK, F_SETLKW, F_GETLK, F_OFD_SETLK, F_OFD_SETLKW or F_OFD_GETLK; EINVAL for other
// commands. ENOLCK as for varve_flock. Locks of the process (those without OFD) on a file are released when
// any descriptor of it is closed, by varve_close or close(2).
int varve_fcntl_lock(varve_fs *fs, int fd, int command, struct flock *lock);

// As stat(2); `st_dev` is 0.
int varve_stat(varve_fs *fs, const char *path, struct stat *out);

// As lstat(2); `st_dev` is 0.
int varve_lstat(varve_fs *fs, const char *path, struct stat *out);

// As access(2), with the effective ids.
int varve_access(varve_fs *fs, const char *path, int mode);

// As mkdir(2).
int varve_mkdir(varve_fs *fs, const char *path, mode_t mode);

// As rmdir(2).
int varve_rmdir(varve_fs *fs, const char *path);

// As unlink(2).
int varve_unlink(varve_fs *fs, const char *path);

// As rename(2).
int varve_rename(varve_fs *fs, const char *from, const char *to);

// As link(2).
int varve_link(varve_fs *fs, const char *from, const char *to);

// As symlink(2).
int varve_symlink(varve_fs *fs, const char *target, const char *at);

// As readlink(2): no NUL at the end.
ssize_t varve_readlink(varve_fs *fs, const char *path, char *buffer, size_t len);

// As truncate(2).
int varve_truncate(varve_fs *fs, const char *path, off_t size);

// As chmod(2).
int varve_chmod(varve_fs *fs, const char *path, mode_t mode);

// As chown(2); an id of -1 stays as it is.
int varve_chown(varve_fs *fs, const char *path, uid_t uid, gid_t gid);

// Connects to the daemon that serves `pool` (its directory or its TOML file), with the rights of the calling
// process. NULL and errno on failure: ENOENT if there is no pool, ECONNREFUSED if no daemon serves it.
varve_fs *varve_connect(const char *pool, uint32_t flags);

// Serves the pool in directory `pool` from within this process, until `varve_disconnect`, and connects to
// it. Other processes (a mount, `varve status`) may connect meanwhile. EWOULDBLOCK or EINVAL if another
// process serves it; set VARVE_DEBUG in the environment for the cause in words.
varve_fs *varve_embed(const char *pool, uint32_t flags);

// Makes a pool of plain files in directory `dir`, as `varve mkfs` does: sizes as "64M", "shm:64M" (NVM in
// memory only) or "0" (no such tier); NULL for the defaults. EEXIST if the directory holds a pool already,
// EINVAL for invalid sizes or if the directory is not empty.
int varve_mkpool(const char *dir, const char *nvm, const char *ssd, const char *hdd);

// Makes all changes durable, ends the session, and stops serving the pool if this process serves it. The
// session's descriptors are closed and their locks released; its directories and transactions fail from then
// on. The handle is invalid afterwards, whatever this returns.
int varve_disconnect(varve_fs *fs);

// Makes the effects of all calls that have returned durable against power loss.
int varve_sync(varve_fs *fs);

// Sets the file mode creation mask of this connection (initially 022); returns the old one, or -1.
int varve_umask(varve_fs *fs, mode_t mask);

// Returns the version of the library, as "0.1.0".
const char *varve_version(void);

// Begins a group. NULL and errno on failure. End it with `varve_tx_commit` or `varve_tx_abort`.
varve_tx *varve_tx_begin(varve_fs *fs);

// Adds the creation of a regular file, which must not exist. Returns a number that stands for the file in
// this group's varve_tx_pwrite, _append, _ftruncate and _link (it is no descriptor: after the commit, open
// the file).
int varve_tx_create(varve_tx *tx, const char *path, mode_t mode);

// Adds the creation of a directory.
int varve_tx_mkdir(varve_tx *tx, const char *path, mode_t mode);

// Adds the creation of a symbolic link.
int varve_tx_symlink(varve_tx *tx, const char *target, const char *at);

// Adds a write of `len` bytes at `offset` (at the end, if the file was opened with O_APPEND). The bytes are
// copied by this call.
int varve_tx_pwrite(varve_tx *tx, int fd, const void *buffer, size_t len, off_t offset);

// Adds a write of `len` bytes at the end that the file has at the commit. The bytes are copied by this call.
int varve_tx_append(varve_tx *tx, int fd, const void *buffer, size_t len);

// Adds a change of a file's length.
int varve_tx_ftruncate(varve_tx *tx, int fd, off_t size);

// Adds one more name of a file (its first, if it was opened with O_TMPFILE).
int varve_tx_link(varve_tx *tx, int fd, const char *path);

// Adds the removal of a name that is not a directory's.
int varve_tx_unlink(varve_tx *tx, const char *path);

// Adds a rename, which replaces an existing target. The commit fails with EOPNOTSUPP for a directory that
// would get another parent or be replaced.
int varve_tx_rename(varve_tx *tx, const char *from, const char *to);

// Commits all calls of the group at once. On failure (the errno of the first call that cannot be done;
// E2BIG; EAGAIN if other programs held resources that it needs; ENOSPC; EROFS; EIO) nothing has happened.
// The handle is invalid afterwards, whatever this returns. The group is as durable as any call: against
// power loss call varve_fsync or varve_sync, or open one of its files with O_SYNC.
int varve_tx_commit(varve_tx *tx);

// Discards the group. The handle is invalid afterwards.
int varve_tx_abort(varve_tx *tx);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VARVE_H */
