//! Strict framing of HTTP/1 requests. A request that two programs could delimit in two ways is refused here,
//! before the HTTP library sees a byte of it (RFC 9112 §11.2). Pure: bytes in, bytes or a refusal out.

use http::uri::Authority;
use thiserror::Error;

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refusal {
    /// A line feed without a carriage return, or the other way round.
    #[error("a line does not end with CR LF")]
    BareLineEnd,
    /// A line that begins with white space.
    #[error("a folded header line")]
    Folded,
    /// The request line.
    #[error("the request line is malformed")]
    RequestLine,
    /// A header line.
    #[error("a header line is malformed")]
    HeaderLine,
    /// `Content-Length` is repeated, or is not a number.
    #[error("Content-Length is ambiguous")]
    Length,
    /// Both `Content-Length` and `Transfer-Encoding`.
    #[error("both Content-Length and Transfer-Encoding")]
    LengthAndCoding,
    /// A `Transfer-Encoding` other than `chunked`, or one in HTTP/1.0.
    #[error("Transfer-Encoding is not understood")]
    Coding,
    /// `Host` is missing, repeated, malformed, or differs from the target.
    #[error("Host is missing, ambiguous, or not that of the target")]
    Host,
    /// More bytes or lines of header than allowed.
    #[error("the header is too large")]
    TooLarge,
    /// A chunk's size, end or trailer.
    #[error("a chunk is malformed")]
    Chunk,
}

impl Refusal {
    /// Returns the label for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::BareLineEnd => "bare_line_end",
            Self::Folded => "folded",
            Self::RequestLine => "request_line",
            Self::HeaderLine => "header_line",
            Self::Length => "length",
            Self::LengthAndCoding => "length_and_coding",
            Self::Coding => "coding",
            Self::Host => "host",
            Self::TooLarge => "too_large",
            Self::Chunk => "chunk",
        }
    }
}

/// Bounds of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadBounds {
    /// Bytes of request line and header lines.
    pub bytes: usize,
    /// Header lines.
    pub lines: usize,
}

const CHUNK_LINE_MAX: usize = 256;
const TRAILER_MAX: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Collecting a head.
    Head,
    /// Remaining bytes of a body.
    Body(u64),
    /// Collecting the line with a chunk's size.
    ChunkSize,
    /// Remaining bytes of a chunk.
    ChunkData(u64),
    /// Collecting the line end after a chunk.
    ChunkEnd,
    /// Collecting trailer lines; the bytes of trailer so far.
    Trailer(usize),
    /// A tunnel: bytes are passed on unparsed.
    Opaque,
}

/// Follows the requests of one connection.
#[derive(Debug)]
pub struct Framing {
    state: State,
    line: Vec<u8>,
    bounds: HeadBounds,
}

impl Framing {
    /// Makes the state of a new connection.
    pub const fn new(bounds: HeadBounds) -> Self {
        Self {
            state: State::Head,
            line: Vec::new(),
            bounds,
        }
    }

    /// Whether the next bytes belong to a body.
    pub const fn in_body(&self) -> bool {
        !matches!(self.state, State::Head | State::Opaque)
    }

    /// Takes bytes from the client and appends the accepted ones to `out`. A head is held back until it is
    /// complete and accepted.
    ///
    /// # Errors
    /// The reason to end the connection; `out` then holds the bytes accepted before.
    pub fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        while !input.is_empty() {
            let taken = match self.state {
                State::Head => self.head(input, out)?,
                State::Body(left) => {
                    let now = pass(input, left, out);
                    self.state = match left - now as u64 {
                        0 => State::Head,
                        left => State::Body(left),
                    };
                    now
                }
                State::ChunkData(left) => {
                    let now = pass(input, left, out);
                    self.state = match left - now as u64 {
                        0 => State::ChunkEnd,
                        left => State::ChunkData(left),
                    };
                    now
                }
                State::ChunkSize | State::ChunkEnd | State::Trailer(_) => self.chunk_line(input, out)?,
                State::Opaque => {
                    out.extend_from_slice(input);
                    input.len()
                }
            };
            input = &input[taken..];
        }
        Ok(())
    }

    fn head(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<usize, Refusal> {
        let mut taken = 0;
        while !input.is_empty() {
            // Up to the end of a line, or of what may be in a head.
            let room = self.bounds.bytes.saturating_sub(self.line.len()).max(1);
            let next = &input[..input.len().min(room)];
            let end = next.iter().position(|&byte| byte == b'\n');
            let next = &next[..end.map_or(next.len(), |end| end + 1)];
            taken += next.len();
            input = &input[next.len()..];
            self.line.extend_from_slice(next);
            if end.is_some() {
                if !self.line.ends_with(b"\r\n") {
                    return Err(Refusal::BareLineEnd);
                }
                // RFC 9112 §2.2: one empty line before a request is skipped.
                if self.line == b"\r\n" {
                    self.line.clear();
                    continue;
                }
                if self.line.ends_with(b"\r\n\r\n") {
                    self.state = check_head(&self.line, self.bounds)?;
                    out.append(&mut self.line);
                    return Ok(taken);
                }
            }
            if self.line.len() >= self.bounds.bytes {
                return Err(Refusal::TooLarge);
            }
        }
        Ok(taken)
    }

    fn chunk_line(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, Refusal> {
        let end = input.iter().position(|&byte| byte == b'\n');
        let taken = end.map_or(input.len(), |end| end + 1);
        self.line.extend_from_slice(&input[..taken]);
        if self.line.len() > CHUNK_LINE_MAX && !matches!(self.state, State::Trailer(_)) {
            return Err(Refusal::Chunk);
        }
        if self.line.len() > TRAILER_MAX {
            return Err(Refusal::TooLarge);
        }
        if end.is_none() {
            return Ok(taken);
        }
        let Some(line) = self.line.strip_suffix(b"\r\n") else {
            return Err(Refusal::BareLineEnd);
        };
        self.state = match self.state {
            State::ChunkSize => match chunk_size(line)? {
                0 => State::Trailer(0),
                size => State::ChunkData(size),
            },
            State::ChunkEnd if line.is_empty() => State::ChunkSize,
            State::Trailer(_) if line.is_empty() => State::Head,
            State::Trailer(bytes) => {
                let (name, _) = header_line(line)?;
                if ["content-length", "transfer-encoding", "host"]
                    .iter()
                    .any(|one| name.eq_ignore_ascii_case(one))
                {
                    return Err(Refusal::Chunk);
                }
                let bytes = bytes + line.len();
                if bytes > TRAILER_MAX {
                    return Err(Refusal::TooLarge);
                }
                State::Trailer(bytes)
            }
            _ => return Err(Refusal::Chunk),
        };
        out.append(&mut self.line);
        Ok(taken)
    }
}

/// Copies at most `left` bytes to `out`; returns their number.
fn pass(input: &[u8], left: u64, out: &mut Vec<u8>) -> usize {
    let now = usize::try_from(left).map_or(input.len(), |left| left.min(input.len()));
    out.extend_from_slice(&input[..now]);
    now
}

fn chunk_size(line: &[u8]) -> Result<u64, Refusal> {
    let end = line.iter().position(|&byte| byte == b';').unwrap_or(line.len());
    let (digits, extension) = line.split_at(end);
    let text = std::str::from_utf8(digits).map_err(|_| Refusal::Chunk)?;
    let well_formed = (1..=15).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !well_formed || !extension.iter().all(|byte| matches!(byte, b'\t' | 0x20..=0x7e)) {
        return Err(Refusal::Chunk);
    }
    u64::from_str_radix(text, 16).map_err(|_| Refusal::Chunk)
}

const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^'..=b'`' | b'|' | b'~')
}

/// Splits a header line into name and value.
fn header_line(line: &[u8]) -> Result<(&str, &str), Refusal> {
    if matches!(line.first(), Some(b' ' | b'\t')) {
        return Err(Refusal::Folded);
    }
    let colon = line
        .iter()
        .position(|&byte| byte == b':')
        .ok_or(Refusal::HeaderLine)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty() || !name.iter().copied().all(is_token) {
        return Err(Refusal::HeaderLine);
    }
    if value.contains(&b'\r') {
        return Err(Refusal::BareLineEnd);
    }
    if !value
        .iter()
        .all(|byte| matches!(byte, b'\t' | 0x20..=0x7e | 0x80..))
    {
        return Err(Refusal::HeaderLine);
    }
    let name = std::str::from_utf8(name).map_err(|_| Refusal::HeaderLine)?;
    // Only the values that are compared below need to be text.
    Ok((
        name,
        std::str::from_utf8(value)
            .unwrap_or("\u{fffd}")
            .trim_matches([' ', '\t']),
    ))
}

/// Checks a complete head; returns the state that follows it.
fn check_head(head: &[u8], bounds: HeadBounds) -> Result<State, Refusal> {
    let text = head.strip_suffix(b"\r\n\r\n").unwrap_or(head);
    let mut lines = text.split(|&byte| byte == b'\n');
    let request_line = lines.next().unwrap_or_default();
    let request_line = request_line.strip_suffix(b"\r").unwrap_or(request_line);
    let (method, target, is_old) = check_request_line(request_line)?;
    let (mut length, mut chunked, mut host) = (None, false, None);
    for (n, line) in lines.enumerate() {
        if n >= bounds.lines {
            return Err(Refusal::TooLarge);
        }
        let (name, value) = header_line(line.strip_suffix(b"\r").unwrap_or(line))?;
        if name.eq_ignore_ascii_case("content-length") {
            let digits =
                !value.is_empty() && value.len() <= 18 && value.bytes().all(|byte| byte.is_ascii_digit());
            let value = value.parse::<u64>().ok().filter(|_| digits);
            if length.replace(value.ok_or(Refusal::Length)?).is_some() {
                return Err(Refusal::Length);
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if chunked || is_old || !value.eq_ignore_ascii_case("chunked") {
                return Err(Refusal::Coding);
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case("host") && host.replace(value).is_some() {
            return Err(Refusal::Host);
        }
    }
    check_host(method, target, host, is_old)?;
    match (length, chunked) {
        (Some(_), true) => Err(Refusal::LengthAndCoding),
        (None | Some(0), false) if method == "CONNECT" => Ok(State::Opaque),
        _ if method == "CONNECT" => Err(Refusal::Length),
        (None, true) => Ok(State::ChunkSize),
        (None | Some(0), false) => Ok(State::Head),
        (Some(length), false) => Ok(State::Body(length)),
    }
}

fn check_request_line(line: &[u8]) -> Result<(&str, &str, bool), Refusal> {
    if line.contains(&b'\r') {
        return Err(Refusal::BareLineEnd);
    }
    let text = std::str::from_utf8(line).map_err(|_| Refusal::RequestLine)?;
    let mut words = text.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Refusal::RequestLine);
    };
    let is_old = match version {
        "HTTP/1.1" => false,
        "HTTP/1.0" => true,
        _ => return Err(Refusal::RequestLine),
    };
    let well_formed = !method.is_empty()
        && method.bytes().all(is_token)
        && !target.is_empty()
        && target
            .bytes()
            .all(|byte| matches!(byte, 0x21..=0x7e) && byte != b'#');
    if well_formed {
        Ok((method, target, is_old))
    } else {
        Err(Refusal::RequestLine)
    }
}

fn check_host(method: &str, target: &str, host: Option<&str>, is_old: bool) -> Result<(), Refusal> {
    let of_target = if method == "CONNECT" {
        Some(target)
    } else if target.starts_with('/') || target == "*" {
        None
    } else {
        let (_, rest) = target.split_once("://").ok_or(Refusal::RequestLine)?;
        Some(&rest[..rest.find(['/', '?']).unwrap_or(rest.len())])
    };
    let Some(host) = host else {
        return if is_old { Ok(()) } else { Err(Refusal::Host) };
    };
    if !is_host(host) {
        return Err(Refusal::Host);
    }
    match of_target {
        Some(of_target) if !same_host(method, target, of_target, host) => Err(Refusal::Host),
        _ => Ok(()),
    }
}

/// Whether an authority consists of a host and an optional port only.
pub fn is_host(text: &str) -> bool {
    host_of(text).is_some()
}

/// Parses an authority that consists of a host and an optional port only.
pub fn host_of(text: &str) -> Option<Authority> {
    let authority = text.parse::<Authority>().ok()?;
    (!text.contains('@') && !authority.host().is_empty()).then_some(authority)
}

fn same_host(method: &str, target: &str, of_target: &str, host: &str) -> bool {
    let default = if method == "CONNECT" {
        ""
    } else if target
        .get(..6)
        .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"))
    {
        ":443"
    } else {
        ":80"
    };
    let bare = |text: &str| text.strip_suffix(default).unwrap_or(text).to_ascii_lowercase();
    // Some clients leave the port out of the Host of a CONNECT.
    bare(of_target) == bare(host)
        || (method == "CONNECT"
            && of_target
                .rsplit_once(':')
                .is_some_and(|(name, _)| name.eq_ignore_ascii_case(host)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDS: HeadBounds = HeadBounds {
        bytes: 4096,
        lines: 20,
    };

    fn verdict(bytes: &[u8]) -> Result<Vec<u8>, Refusal> {
        let mut out = Vec::new();
        Framing::new(BOUNDS).feed(bytes, &mut out).map(|()| out)
    }

    #[test]
    fn framing_passes_what_is_well_formed_byte_by_byte() {
        let sent = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcPUT / HTTP/1.1\r\nhost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n0\r\nX: y\r\n\r\nGET http://a/ HTTP/1.1\r\nHost: a:80\r\n\r\n";
        assert_eq!(verdict(sent).as_deref(), Ok(&sent[..]));
        let mut framing = Framing::new(BOUNDS);
        let mut out = Vec::new();
        for byte in sent {
            framing.feed(&[*byte], &mut out).expect("it is well formed");
        }
        assert_eq!(out, sent);
        assert!(!framing.in_body());
    }

    #[test]
    fn framing_refuses_what_is_ambiguous() {
        let head = |lines: &str| {
            verdict(format!("POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n").as_bytes())
                .expect_err("it is refused")
        };
        assert_eq!(head("Content-Length: 3\r\nContent-Length: 4"), Refusal::Length);
        assert_eq!(head("Content-Length: 3, 3"), Refusal::Length);
        assert_eq!(head("Content-Length: +3"), Refusal::Length);
        assert_eq!(
            head("Content-Length: 3\r\nTransfer-Encoding: chunked"),
            Refusal::LengthAndCoding
        );
        assert_eq!(head("Transfer-Encoding: gzip, chunked"), Refusal::Coding);
        assert_eq!(head("Transfer-Encoding : chunked"), Refusal::HeaderLine);
        assert_eq!(
            head("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
            Refusal::Coding
        );
        assert_eq!(head("X: a\r\n b"), Refusal::Folded);
        assert_eq!(head("X: a\nY: b"), Refusal::BareLineEnd);
        assert_eq!(head("X: a\rY: b"), Refusal::BareLineEnd);
        assert_eq!(head("X: a\0b"), Refusal::HeaderLine);
        assert_eq!(head("Host: b"), Refusal::Host);
    }

    #[test]
    fn framing_refuses_heads_of_other_forms() {
        let cases: [(&[u8], Refusal); 9] = [
            (
                b"GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
                Refusal::Coding,
            ),
            (b"GET / HTTP/1.1\r\n\r\n", Refusal::Host),
            (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", Refusal::Host),
            (b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", Refusal::Host),
            (b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Host),
            (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::RequestLine),
            (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", Refusal::RequestLine),
            (b"GET /\r\n\r\n", Refusal::RequestLine),
            (b"GET / HTTP/1.1\nHost: a\n\n", Refusal::BareLineEnd),
        ];
        for (bytes, refusal) in cases {
            assert_eq!(verdict(bytes), Err(refusal), "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn framing_refuses_malformed_chunks() {
        let chunks = |bytes: &str| {
            verdict(
                format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{bytes}").as_bytes(),
            )
            .expect_err("it is refused")
        };
        assert_eq!(chunks("3\nabc"), Refusal::BareLineEnd);
        assert_eq!(chunks("0x3\r\nabc"), Refusal::Chunk);
        assert_eq!(chunks(" 3\r\nabc"), Refusal::Chunk);
        assert_eq!(chunks("3\r\nabcd\r\n"), Refusal::Chunk);
        assert_eq!(chunks("1111111111111111\r\n"), Refusal::Chunk);
        assert_eq!(chunks("0\r\nContent-Length: 3\r\n\r\n"), Refusal::Chunk);
    }

    #[test]
    fn framing_bounds_the_header() {
        let long = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "a".repeat(5000));
        assert_eq!(verdict(long.as_bytes()), Err(Refusal::TooLarge));
        let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: a\r\n".repeat(30));
        assert_eq!(verdict(many.as_bytes()), Err(Refusal::TooLarge));
    }

    proptest! {
        #[test]
        fn framing_never_panics_and_does_not_depend_on_the_cuts(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b' '), Just(b':'), any::<u8>()], 0..200),
            cut in 0_usize..200,
        ) {
            let mut all = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
            all.extend_from_slice(&bytes);
            let whole = verdict(&all);
            let cut = cut.min(all.len());
            let (mut framing, mut out) = (Framing::new(BOUNDS), Vec::new());
            let parts = framing.feed(&all[..cut], &mut out).and_then(|()| framing.feed(&all[cut..], &mut out));
            prop_assert_eq!(parts.is_ok(), whole.is_ok());
        }
    }
}
