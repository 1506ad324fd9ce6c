//! System calls without the C library: usable in a thread that it does not know, and after a fork.

use std::arch::asm;

/// One system call. Gives what the kernel gave: a negative errno for failure.
///
/// # Safety
/// As for the call: pointers among the arguments must be valid for what the kernel does with them.
pub(super) unsafe fn call(number: libc::c_long, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel preserves all registers but these; the arguments are the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

pub(super) const EINTR: isize = -(libc::EINTR as isize);
pub(super) const EAGAIN: isize = -(libc::EAGAIN as isize);

/// Closes a descriptor.
pub(super) fn close(fd: i32) {
    // SAFETY: the call takes no pointer.
    unsafe { call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// A message of words with at most one descriptor.
#[repr(C)]
struct Control {
    len: usize,
    level: i32,
    kind: i32,
    fd: i32,
    pad: i32,
}

const CONTROL_BYTES: usize = size_of::<Control>() - size_of::<i32>();
const _: () = assert!(CONTROL_BYTES == 20 && size_of::<Control>() == 24);

fn header(vec: &mut libc::iovec, control: *mut Control, control_len: usize) -> libc::msghdr {
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: vec,
        msg_iovlen: 1,
        msg_control: control.cast(),
        msg_controllen: control_len,
        msg_flags: 0,
    }
}

/// Sends `words`, and a descriptor with them. False when the other side is gone.
pub(super) fn send(socket: i32, words: &[u64], fd: Option<i32>) -> bool {
    let mut vec = libc::iovec {
        iov_base: words.as_ptr().cast_mut().cast(),
        iov_len: size_of_val(words),
    };
    let mut control = Control {
        len: CONTROL_BYTES,
        level: libc::SOL_SOCKET,
        kind: libc::SCM_RIGHTS,
        fd: fd.unwrap_or(-1),
        pad: 0,
    };
    let control_len = if fd.is_some() { size_of::<Control>() } else { 0 };
    let message = header(&mut vec, &raw mut control, control_len);
    loop {
        let args = [
            socket as usize,
            &raw const message as usize,
            libc::MSG_NOSIGNAL as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the message names `words` and `control`, which live over the call and are only read.
        let sent = unsafe { call(libc::SYS_sendmsg, args) };
        if sent != EINTR {
            return sent == size_of_val(words) as isize;
        }
    }
}

/// Receives a packet into `words`. Gives the number of words, 0 when the other side is gone, and the
/// descriptor that came, or −1.
pub(super) fn receive(socket: i32, words: &mut [u64]) -> (usize, i32) {
    let mut vec = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: size_of_val(words),
    };
    let mut control = Control {
        len: 0,
        level: 0,
        kind: 0,
        fd: -1,
        pad: 0,
    };
    loop {
        let mut message = header(&mut vec, &raw mut control, size_of::<Control>());
        let args = [
            socket as usize,
            &raw mut message as usize,
            libc::MSG_CMSG_CLOEXEC as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the message names `words` and `control`, which live over the call and hold any bytes.
        let got = unsafe { call(libc::SYS_recvmsg, args) };
        if got == EINTR || got == EAGAIN {
            continue;
        }
        let came = message.msg_controllen >= CONTROL_BYTES && control.kind == libc::SCM_RIGHTS;
        let fd = if came { control.fd } else { -1 };
        return (usize::try_from(got).unwrap_or(0) / size_of::<u64>(), fd);
    }
}

/// Waits until `word` is something else than `value`.
pub(super) fn wait_while(word: &std::sync::atomic::AtomicU32, value: u32) {
    while word.load(std::sync::atomic::Ordering::Acquire) == value {
        let args = [
            word.as_ptr() as usize,
            libc::FUTEX_WAIT as usize,
            value as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the word lives over the call; no time-out is named.
        unsafe { call(libc::SYS_futex, args) };
    }
}

/// Wakes those that wait for `word`.
pub(super) fn wake(word: &std::sync::atomic::AtomicU32) {
    let args = [
        word.as_ptr() as usize,
        libc::FUTEX_WAKE as usize,
        i32::MAX as usize,
        0,
        0,
        0,
    ];
    // SAFETY: the word lives over the call.
    unsafe { call(libc::SYS_futex, args) };
}
