//! The origin: answers every object of the world at once, and numbers its answers, so that who gets one knows
//! whether it was made for this request.

use crate::http::Head;
use crate::world::Object;
use std::io::{self, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of the last answer with a body.
pub static SERIAL: AtomicU64 = AtomicU64::new(0);
/// Answers 304.
pub static VALIDATED: AtomicU64 = AtomicU64::new(0);

/// Listens on loopback; a thread a connection.
pub fn start(port: u16) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A proxy that ends its connection ends the thread.
            std::thread::spawn(move || serve(stream));
        }
    });
    Ok(address)
}

fn serve(stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut output = stream.try_clone()?;
    let mut input = BufReader::new(stream);
    while let Some(head) = Head::read(&mut input)? {
        let path = head.line.split(' ').nth(1).unwrap_or_default();
        // A proxy may ask in the absolute form.
        let path = match path.strip_prefix("http://") {
            Some(rest) => &rest[rest.find('/').unwrap_or(rest.len())..],
            None => path,
        };
        let Some(object) = Object::of_path(path) else {
            output.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        };
        let etag = object.etag();
        let control = match object.is_cacheable() {
            true => format!("max-age={}", object.lifetime_s()),
            false => "no-store".into(),
        };
        let date = "Last-Modified: Mon, 07 Jan 2008 09:00:00 GMT";
        if head.field("if-none-match") == Some(&*etag) {
            VALIDATED.fetch_add(1, Ordering::Relaxed);
            output.write_all(
                format!("HTTP/1.1 304 Not Modified\r\nETag: {etag}\r\nCache-Control: {control}\r\n\r\n")
                    .as_bytes(),
            )?;
            continue;
        }
        let size = object.size_bytes();
        let kind = match object {
            Object::Embedded(_, 0) => "text/html",
            _ => "image/png",
        };
        let serial = SERIAL.fetch_add(1, Ordering::SeqCst) + 1;
        let mut answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\nETag: {etag}\r\n{date}\r\n\
             Cache-Control: {control}\r\nX-Serial: {serial}\r\n\r\n"
        )
        .into_bytes();
        answer.extend(object.unit().iter().cycle().take(size as usize));
        output.write_all(&answer)?;
    }
    Ok(())
}
