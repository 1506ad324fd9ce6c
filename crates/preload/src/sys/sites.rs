//! Finds the system-call instructions in a library's code, and decides whether each can be replaced by a
//! jump. Pure: bytes in, sites out.
//!
//! A jump takes five bytes and `syscall` two, so a neighbouring instruction must move with it. Two neighbours
//! can be recognised and moved without a disassembler: the comparison of the result with -4095 (or a copy of
//! the result) behind it, and the load of a constant number before it. No jump in the library may lead to the
//! second of the two instructions. Every byte sequence that could be a jump is checked, even inside other
//! instructions, so an error only leaves a site unreplaced.

/// A system call that can be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Offset of the first replaced byte.
    pub start: usize,
    /// Number of replaced bytes.
    pub len: usize,
    /// System-call number loaded by the replaced bytes, if any.
    pub loads: Option<u32>,
    /// Length of the comparison or the copy at the end of the replaced bytes; 0 for none.
    pub tail: usize,
}

impl Site {
    /// Whether `code` has this system call at that offset. Jumps to it are not checked.
    #[must_use]
    pub fn fits(&self, code: &[u8]) -> bool {
        let Some(bytes) = self
            .start
            .checked_add(self.len)
            .and_then(|end| code.get(self.start..end))
        else {
            return false;
        };
        match self.loads {
            Some(number) => {
                let load = number.to_le_bytes();
                self.tail == 0
                    && self.len == 7
                    && bytes[0] == 0xb8
                    && bytes[1..5] == load
                    && bytes[5..] == SYSCALL
            }
            None => {
                self.tail > 0
                    && self.len == 2 + self.tail
                    && bytes[..2] == SYSCALL
                    && follower(&code[self.start + 2..]) == self.tail
            }
        }
    }
}

const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Returns the length of a comparison of the result with -4096 or -4095, or of a copy of it to r8 to r15, if
/// one stands at the start of `code`; else 0.
fn follower(code: &[u8]) -> usize {
    match code {
        [0x48, 0x3d, 0x00 | 0x01, 0xf0, 0xff, 0xff, ..] => 6,
        [0x3d, 0x00 | 0x01, 0xf0, 0xff, 0xff, ..] => 5,
        // glibc uses the copy in the call that changes the ids of all threads of a process.
        [0x41, 0x89, 0xc0..=0xc7, ..] => 3,
        _ => 0,
    }
}

/// Returns the constant that a `mov` just before offset `at` loads. `None` also if the byte before could be a
/// prefix, since the `mov` could then load another register.
fn load_before(code: &[u8], at: usize) -> Option<u32> {
    let before = code.get(at.checked_sub(6)?..at)?;
    let number = u32::from_le_bytes(before[2..].try_into().ok()?);
    (before[0] & 0xf0 != 0x40 && before[1] == 0xb8 && number < 1024).then_some(number)
}

/// Calls `found` with the offset of each byte for which `is` is true. Every process waits for this at its
/// start, so a block of bytes is tested at once, without a branch.
fn each(code: &[u8], is: impl Fn(u8) -> bool, mut found: impl FnMut(usize)) {
    const BLOCK: usize = 64;
    let (blocks, rest) = code.as_chunks::<BLOCK>();
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    for (i, block) in blocks.iter().chain([&last]).enumerate() {
        let flags = block.map(|byte| u8::from(is(byte)));
        for (k, eight) in flags.as_chunks::<8>().0.iter().enumerate() {
            let mut bits = u64::from_le_bytes(*eight);
            while bits != 0 {
                found(i * BLOCK + k * 8 + bits.trailing_zeros() as usize / 8);
                bits &= bits - 1;
            }
        }
    }
}

/// Returns the replaceable sites in `code` whose system-call number is `wanted`, or is not known if `unknown`
/// is set; and the offsets of matching system calls that cannot be replaced.
#[must_use]
pub fn find(code: &[u8], wanted: impl Fn(u32) -> bool, unknown: bool) -> (Vec<Site>, Vec<usize>) {
    let mut at: Vec<usize> = Vec::new();
    each(
        code,
        |byte| byte == SYSCALL[0],
        |found| {
            // Skips the second byte of the previous find.
            let apart = at.last().is_none_or(|last| found >= last + 2);
            if apart && code.get(found + 1) == Some(&SYSCALL[1]) {
                at.push(found);
            }
        },
    );
    // Offsets that no jump may lead to: `syscall`, if the load before it moves; the comparison behind it, if
    // that moves.
    let mut inner: Vec<usize> = at.iter().flat_map(|&at| [at, at + 2]).collect();
    inner.sort_unstable();
    let hit = jumps_to(code, &inner);
    let is_hit = |offset: usize| hit.binary_search(&offset).is_ok();
    let (mut sites, mut left) = (Vec::new(), Vec::new());
    for at in at {
        let loads = load_before(code, at);
        match loads {
            Some(number) if !wanted(number) => continue,
            None if !unknown => continue,
            _ => {}
        }
        let tail = follower(&code[at + 2..]);
        if tail > 0 && !is_hit(at + 2) {
            sites.push(Site {
                start: at,
                len: 2 + tail,
                loads: None,
                tail,
            });
        } else if loads.is_some() && !is_hit(at) {
            sites.push(Site {
                start: at - 5,
                len: 7,
                loads,
                tail: 0,
            });
        } else if loads.is_some() || tail > 0 {
            left.push(at);
        }
    }
    (sites, left)
}

/// Loads of four registers from a structure, by which glibc makes a call in all threads. One of its bytes
/// looks like a short jump behind the call.
const LOADS: [u8; 14] = [
    0x48, 0x8b, 0x73, 0x10, 0x48, 0x8b, 0x7b, 0x08, 0x48, 0x8b, 0x53, 0x18, 0x8b, 0x03,
];

/// Whether `at` lies in such loads just before a call that ends at `after`.
fn in_loads(code: &[u8], at: usize, after: usize) -> bool {
    let Some(start) = after.checked_sub(SYSCALL.len() + LOADS.len()) else {
        return false;
    };
    (start..start + LOADS.len()).contains(&at) && code.get(start..start + LOADS.len()) == Some(&LOADS[..])
}

/// Returns the offsets of `inner` (sorted) that a byte sequence which looks like a relative jump leads to.
fn jumps_to(code: &[u8], inner: &[usize]) -> Vec<usize> {
    let mut hit = Vec::new();
    let is_inner = |target: usize| inner.binary_search(&target).is_ok();
    // One flag per 64-byte line that holds an offset of interest: most displacements miss them all.
    let mut lines = vec![false; code.len() / 64 + 1];
    for &offset in inner {
        if let Some(line) = lines.get_mut(offset / 64) {
            *line = true;
        }
    }
    let mut look = |target: Option<usize>| {
        if let Some(target) = target
            && lines.get(target / 64) == Some(&true)
            && is_inner(target)
        {
            hit.push(target);
        }
    };
    // 0f 8x takes its displacement behind the second byte; whether an 0f precedes is not checked.
    each(
        code,
        |byte| byte & 0xf0 == 0x80 || byte & 0xfe == 0xe8,
        |at| {
            if let Some(&[a, b, c, d]) = code.get(at + 1..at + 5) {
                let to = i32::from_le_bytes([a, b, c, d]);
                look((at + 5).checked_add_signed(to as isize));
            }
        },
    );
    for &offset in inner {
        // A short jump is two bytes and reaches from 128 bytes before its end to 127 behind it.
        let from = offset.saturating_sub(129);
        let to = (offset + 127).min(code.len().saturating_sub(2));
        for at in from..to {
            let leads = code[at + 1] as usize == offset.wrapping_sub(at + 2) & 0xff;
            if leads && matches!(code[at], 0x70..=0x7f | 0xe0..=0xe3 | 0xeb) && !in_loads(code, at, offset) {
                hit.push(offset);
            }
        }
    }
    hit.sort_unstable();
    hit.dedup();
    hit
}

#[cfg(test)]
mod tests {
    use super::{LOADS, Site, find};

    const CMP: [u8; 6] = [0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff];

    fn code(parts: &[&[u8]]) -> Vec<u8> {
        let mut code = vec![0xcc; 64];
        parts.iter().for_each(|part| code.extend_from_slice(part));
        code.extend_from_slice(&[0xcc; 64]);
        code
    }

    #[test]
    fn a_call_with_a_comparison_behind_is_replaced_with_it() {
        let code = code(&[&[0x0f, 0x05], &CMP]);
        let (sites, left) = find(&code, |_| true, true);
        assert_eq!(
            sites,
            [Site {
                start: 64,
                len: 8,
                loads: None,
                tail: 6
            }]
        );
        assert!(left.is_empty());
    }

    #[test]
    fn a_call_with_a_copy_of_its_result_behind_is_replaced_with_it() {
        // mov %eax,%r12d
        let code = code(&[&LOADS, &[0x0f, 0x05, 0x41, 0x89, 0xc4]]);
        let (sites, _) = find(&code, |_| true, true);
        assert_eq!(
            sites,
            [Site {
                start: 78,
                len: 5,
                loads: None,
                tail: 3
            }]
        );
    }

    #[test]
    fn a_call_with_its_number_before_is_replaced_with_the_load() {
        let code = code(&[&[0xb8, 0x3a, 0, 0, 0, 0x0f, 0x05, 0x57]]);
        let (sites, _) = find(&code, |number| number == 0x3a, true);
        assert_eq!(
            sites,
            [Site {
                start: 64,
                len: 7,
                loads: Some(0x3a),
                tail: 0
            }]
        );
        assert!(find(&code, |_| false, true).0.is_empty());
    }

    #[test]
    fn a_call_is_left_alone_when_a_jump_leads_between() {
        // jmp +0 back to the comparison: eb fe-style displacement to offset 66.
        let code = code(&[&[0x0f, 0x05], &CMP, &[0xeb, 0xf8]]);
        let (sites, left) = find(&code, |_| true, true);
        assert_eq!(sites, []);
        assert_eq!(left, [64]);
    }

    #[test]
    fn a_load_of_another_register_is_not_taken_for_the_number() {
        // mov $8, %r8d
        let code = code(&[&[0x41, 0xb8, 8, 0, 0, 0, 0x0f, 0x05], &CMP]);
        let (sites, _) = find(&code, |_| false, true);
        assert_eq!(
            sites
                .iter()
                .map(|site| (site.start, site.loads))
                .collect::<Vec<_>>(),
            [(70, None)]
        );
    }

    #[test]
    fn a_call_without_a_known_neighbour_is_left_alone() {
        let code = code(&[&[0x0f, 0x05, 0xc3]]);
        assert_eq!(find(&code, |_| true, true), (vec![], vec![]));
    }

    fn c_library() -> Option<Vec<u8>> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let path = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|path| path.contains("libc.so.6"));
        if path.is_none() {
            eprintln!("SKIPPED: no glibc in this process");
        }
        std::fs::read(path?).ok()
    }

    #[test]
    fn the_c_library_of_this_machine_has_its_call_for_all_threads_replaced() {
        let Some(code) = c_library() else { return };
        let Some(at) = code
            .windows(LOADS.len() + 2)
            .position(|window| window[..LOADS.len()] == LOADS && window[LOADS.len()..] == super::SYSCALL)
        else {
            eprintln!("SKIPPED: another glibc");
            return;
        };
        let (sites, _) = find(&code, |_| true, true);
        assert!(sites.iter().any(|site| site.start == at + LOADS.len()));
    }

    #[test]
    fn the_c_library_of_this_machine_has_few_calls_that_cannot_be_replaced() {
        let Some(code) = c_library() else { return };
        let (sites, left) = find(&code, |_| true, true);
        assert!(sites.len() > 300, "{}", sites.len());
        assert!(left.len() * 50 < sites.len(), "{left:?}");
    }
}
