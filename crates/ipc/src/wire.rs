//! Frames of the socket transport: a little-endian `u32` length and that many bytes of postcard. Owns bounds
//! and encoding; refuses to know the life of sockets.

use crate::{DATA_MAX, DevicePart, IpcError, Request, Response, Upcall, Welcome};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// Most bytes of one frame after its length: the data and slack for its other fields.
pub const FRAME_MAX: usize = DATA_MAX + (256 << 10);

/// A frame from a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallFrame {
    /// Chosen by the client; the answer carries it.
    pub(crate) id: u64,
    pub(crate) request: Request,
}

/// A frame from the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ServerFrame {
    /// Answer to the first frame, if it was a `Hello`; `descriptors` is a mask of the kinds that come with
    /// it, in ascending order.
    Opened {
        result: Result<Box<Welcome>, IpcError>,
        descriptors: u8,
        /// Parts of the SSD, whose descriptors come after those, in order.
        ssd: Vec<DevicePart>,
    },
    /// Answer to a call.
    Answer {
        id: u64,
        result: Result<Response, IpcError>,
    },
    /// A message that the client must act on.
    Upcall(Upcall),
}

fn protocol(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

/// Encodes a frame with its length in front.
///
/// # Errors
/// `InvalidData` if it passes [`FRAME_MAX`].
pub(crate) fn encode<T: Serialize>(frame: &T) -> io::Result<Vec<u8>> {
    let mut out = vec![0; 4];
    out = postcard::to_extend(frame, out).map_err(protocol)?;
    let len = out.len() - 4;
    if len > FRAME_MAX {
        return Err(protocol(format!(
            "a frame of {len} bytes; the most is {FRAME_MAX}"
        )));
    }
    out[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(out)
}

/// Writes one frame.
///
/// # Errors
/// Errors of the stream and of [`encode`].
pub(crate) fn write<T: Serialize>(mut stream: impl Write, frame: &T) -> io::Result<()> {
    stream.write_all(&encode(frame)?)
}

/// Reads the rest of a frame whose length came first.
///
/// # Errors
/// Errors of the stream; `InvalidData` if the length passes [`FRAME_MAX`] or the bytes are not a frame.
pub(crate) fn read_body<T: DeserializeOwned>(mut stream: impl Read, len: [u8; 4]) -> io::Result<T> {
    let len = u32::from_le_bytes(len) as usize;
    if len == 0 || len > FRAME_MAX {
        return Err(protocol(format!(
            "a frame of {len} bytes; the most is {FRAME_MAX}"
        )));
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body)?;
    let (frame, rest) = postcard::take_from_bytes(&body).map_err(protocol)?;
    if rest.is_empty() {
        Ok(frame)
    } else {
        Err(protocol("bytes after the frame"))
    }
}

/// Reads one frame.
///
/// # Errors
/// As [`read_body`]; `UnexpectedEof` when the other side closed.
pub(crate) fn read<T: DeserializeOwned>(mut stream: impl Read) -> io::Result<T> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    read_body(stream, len)
}

/// Length of an idle buffer of [`read_alone`].
const ALONE_BYTES: usize = 16 << 10;

/// Reads one frame after which no other follows before its answer, with one system call if it is short.
/// `buffer` is reused.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_alone<T: DeserializeOwned>(mut stream: impl Read, buffer: &mut Vec<u8>) -> io::Result<T> {
    buffer.resize(ALONE_BYTES, 0);
    buffer.shrink_to(ALONE_BYTES);
    let mut have = 0;
    let mut end = None;
    loop {
        match stream.read(&mut buffer[have..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => have += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        if end.is_none()
            && let Some(len) = buffer[..have].first_chunk::<4>()
        {
            let len = u32::from_le_bytes(*len) as usize;
            if len == 0 || len > FRAME_MAX {
                return Err(protocol(format!(
                    "a frame of {len} bytes; the most is {FRAME_MAX}"
                )));
            }
            end = Some(4 + len);
            if buffer.len() < 4 + len {
                buffer.resize(4 + len, 0);
            }
        }
        if let Some(end) = end
            && have >= end
        {
            let (frame, rest) = postcard::take_from_bytes(&buffer[4..end]).map_err(protocol)?;
            return if rest.is_empty() && have == end {
                Ok(frame)
            } else {
                Err(protocol("bytes after the frame"))
            };
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{ALONE_BYTES, CallFrame, FRAME_MAX, ServerFrame, encode, read, read_alone};
    use crate::{DATA_MAX, IpcError, Request, Response};
    use proptest::prelude::{any, prop, proptest};
    use varve_format::LogSeq;

    #[test]
    fn frame_comes_back_equal_with_the_most_data() {
        let frame = ServerFrame::Answer {
            id: 7,
            result: Ok(Response::Bytes(vec![3; DATA_MAX])),
        };
        let bytes = encode(&frame).unwrap();
        assert!(bytes.len() < DATA_MAX + 64, "data goes as one block");
        assert_eq!(read::<ServerFrame>(&bytes[..]).unwrap(), frame);
        let frame = CallFrame {
            id: 1,
            request: Request::Digest {
                upto: LogSeq(4),
                wait: true,
            },
        };
        assert_eq!(read::<CallFrame>(&encode(&frame).unwrap()[..]).unwrap(), frame);
    }

    /// A reader that returns a few bytes at a time.
    struct Dripping<'b>(&'b [u8], usize);

    impl std::io::Read for Dripping<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let count = self.1.min(out.len()).min(self.0.len());
            out[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn lone_frame_is_read_however_its_bytes_come_and_nothing_may_follow() {
        let mut buffer = Vec::new();
        for (len, drip) in [(3, 1), (3, 1 << 20), (100_000, 7), (DATA_MAX, 1 << 20)] {
            let frame = ServerFrame::Answer {
                id: 7,
                result: Ok(Response::Bytes(vec![3; len])),
            };
            let mut bytes = encode(&frame).unwrap();
            let read = read_alone::<ServerFrame>(Dripping(&bytes, drip), &mut buffer);
            assert_eq!(read.unwrap(), frame);
            let cut = Dripping(&bytes[..bytes.len() - 1], drip);
            let ended = read_alone::<ServerFrame>(cut, &mut buffer).unwrap_err();
            assert_eq!(ended.kind(), std::io::ErrorKind::UnexpectedEof);
            if drip > bytes.len() && bytes.len() < ALONE_BYTES {
                bytes.push(0);
                let followed = read_alone::<ServerFrame>(Dripping(&bytes, drip), &mut buffer).unwrap_err();
                assert_eq!(followed.kind(), std::io::ErrorKind::InvalidData);
            }
        }
        let huge = [0xff, 0xff, 0xff, 0xff, 0, 0];
        assert_eq!(
            read_alone::<CallFrame>(&huge[..], &mut buffer)
                .unwrap_err()
                .kind(),
            std::io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn frame_is_refused_when_too_long() {
        let frame = ServerFrame::Answer {
            id: 7,
            result: Ok(Response::Bytes(vec![3; FRAME_MAX])),
        };
        assert!(encode(&frame).is_err());
        let huge = [0xff, 0xff, 0xff, 0xff, 0, 0];
        assert_eq!(
            read::<CallFrame>(&huge[..]).unwrap_err().kind(),
            std::io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn frame_is_refused_when_bytes_follow() {
        let mut bytes = encode(&ServerFrame::Answer {
            id: 1,
            result: Err(IpcError::Sealed),
        })
        .unwrap();
        bytes.push(0);
        bytes[0] += 1;
        assert!(read::<ServerFrame>(&bytes[..]).is_err());
    }

    proptest! {
        #[test]
        fn reading_never_panics_on_any_bytes(mut bytes in prop::collection::vec(any::<u8>(), 4..300)) {
            let len = (bytes.len() - 4) as u32;
            bytes[..4].copy_from_slice(&len.to_le_bytes());
            let _ = read::<CallFrame>(&bytes[..]);
            let _ = read::<ServerFrame>(&bytes[..]);
            let _ = read_alone::<CallFrame>(&bytes[..], &mut Vec::new());
        }
    }
}
