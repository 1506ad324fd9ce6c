//! Robots: what a user of the load asks for next, and what came of it.

use crate::http::Head;
use crate::origin::SERIAL;
use crate::world::{self, Object};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Share of the page views that are of a page known before.
const REPEATS: f64 = 0.69;
/// Of the repeats: of one page in a hundred.
const HOT: f64 = 0.1;
/// Share of the actions that are for an object that stands alone: 2.9 % of the requests, at 16 a page.
const ALONE: f64 = 0.323;
/// Of those: downloads, 0.1 % of the requests.
const DOWNLOADS: f64 = 1.0 / 29.0;
/// Large objects and downloads that were asked for before.
const LARGE_REPEATS: f64 = 0.03;
const DOWNLOAD_REPEATS: f64 = 0.8;
/// Requests for something known that carry its validator, and that reload.
const VALIDATING: f64 = 0.1;
const RELOADS: f64 = 0.01;
/// A crowd begins every so often, lasts so long, and has this share of the page views.
const CROWD_EVERY_S: u64 = 30;
const CROWD_LASTS_S: u64 = 5;
const CROWD: f64 = 0.05;
/// Pages of crowds have numbers from here on.
const CROWD_PAGES: u64 = 1 << 40;
const WAIT: Duration = Duration::from_secs(60);

/// What all robots know.
pub struct Views {
    began: Instant,
    pages: AtomicU64,
    large: AtomicU64,
    downloads: AtomicU64,
}

impl Views {
    /// Nothing is known.
    pub fn new() -> Self {
        let [pages, large, downloads] = [0, 0, 0].map(AtomicU64::new);
        Self {
            began: Instant::now(),
            pages,
            large,
            downloads,
        }
    }

    /// The first pages are known.
    pub fn known(&self, pages: u64) {
        self.pages.store(pages, Ordering::Relaxed);
    }

    /// Pages that are known.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }
}

/// A bound on the rate of all robots that fill the cache.
pub struct Pace {
    began: Instant,
    per_s: u64,
    count: AtomicU64,
}

impl Pace {
    /// At most `per_s` requests a second; 0: any number.
    pub fn new(per_s: u64) -> Self {
        Self {
            began: Instant::now(),
            per_s,
            count: AtomicU64::new(0),
        }
    }

    /// Waits until it is the turn of the next request.
    fn wait(&self) {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        if self.per_s > 0 {
            let due = Duration::from_secs_f64(number as f64 / self.per_s as f64);
            std::thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
    }
}

/// Requests of one kind.
#[derive(Debug, Default)]
struct Part {
    count: u64,
    bytes: u64,
    times_us: Vec<u32>,
}

impl Part {
    fn add(&mut self, bytes: u64, took: Duration) {
        self.count += 1;
        self.bytes += bytes;
        self.times_us.push(took.as_micros() as u32);
    }

    fn json(&mut self) -> serde_json::Value {
        self.times_us.sort_unstable();
        let at = |share: f64| {
            let n = (self.times_us.len() as f64 * share) as usize;
            self.times_us.get(n).map_or(0.0, |us| f64::from(*us) / 1e3)
        };
        let mean =
            self.times_us.iter().map(|us| f64::from(*us)).sum::<f64>() / self.count.max(1) as f64 / 1e3;
        serde_json::json!({
            "count": self.count, "bytes": self.bytes, "mean_ms": mean, "p50_ms": at(0.5), "p99_ms": at(0.99),
        })
    }
}

/// What came of the requests that are counted.
#[derive(Debug, Default)]
pub struct Totals {
    hits: Part,
    misses: Part,
    /// Requests, and their bytes, that an endless cache would have answered.
    offered: (u64, u64),
}

impl Totals {
    /// Adds another's.
    pub fn add(&mut self, other: Self) {
        for (mine, theirs) in [(&mut self.hits, other.hits), (&mut self.misses, other.misses)] {
            mine.count += theirs.count;
            mine.bytes += theirs.bytes;
            mine.times_us.extend(theirs.times_us);
        }
        self.offered = (self.offered.0 + other.offered.0, self.offered.1 + other.offered.1);
    }

    /// As a line for scripts.
    pub fn json(&self, seconds: u64, validated: u64, pages: u64) -> serde_json::Value {
        let mut parts = [&self.hits, &self.misses].map(|part| Part {
            count: part.count,
            bytes: part.bytes,
            times_us: part.times_us.clone(),
        });
        let (requests, bytes) = (parts[0].count + parts[1].count, parts[0].bytes + parts[1].bytes);
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        serde_json::json!({
            "seconds": seconds, "requests": requests, "rate": requests as f64 / seconds as f64, "bytes": bytes,
            "offered": share(self.offered.0, requests), "offered_bytes": share(self.offered.1, bytes),
            "hit_ratio": share(parts[0].count, requests), "byte_hit_ratio": share(parts[0].bytes, bytes),
            "validated": validated, "pages": pages, "hits": parts[0].json(), "misses": parts[1].json(),
        })
    }
}

/// One user: a connection, kept open.
pub struct Robot {
    proxy: SocketAddr,
    connection: Option<BufReader<TcpStream>>,
    random: fastrand::Rng,
    views: Arc<Views>,
    totals: Totals,
    buffer: Vec<u8>,
}

impl Robot {
    /// A robot that asks `proxy`.
    pub fn new(proxy: SocketAddr, seed: u64, views: Arc<Views>) -> Self {
        Self {
            proxy,
            connection: None,
            random: fastrand::Rng::with_seed(seed),
            views,
            totals: Totals::default(),
            buffer: vec![0; 64 << 10],
        }
    }

    /// What it counted.
    pub fn totals(self) -> Totals {
        self.totals
    }

    /// Loads a page for the first time.
    pub fn fill(&mut self, page: u64, pace: &Pace) -> io::Result<()> {
        for n in 0..world::objects_of(page) {
            pace.wait();
            self.ask(Object::Embedded(page, n), "")?;
        }
        Ok(())
    }

    /// A page view, or a request for an object that stands alone.
    pub fn act(&mut self, phase: &AtomicU8) -> io::Result<()> {
        if self.random.f64() < ALONE {
            let (object, is_known) = self.alone();
            return self.request(object, is_known, phase);
        }
        let (page, is_known) = self.page();
        for n in 0..world::objects_of(page) {
            if phase.load(Ordering::Relaxed) == 2 {
                break;
            }
            self.request(Object::Embedded(page, n), is_known, phase)?;
        }
        Ok(())
    }

    fn alone(&mut self) -> (Object, bool) {
        let is_download = self.random.f64() < DOWNLOADS;
        let (known, repeats) = match is_download {
            true => (&self.views.downloads, DOWNLOAD_REPEATS),
            false => (&self.views.large, LARGE_REPEATS),
        };
        let count = known.load(Ordering::Relaxed);
        let is_known = count > 0 && self.random.f64() < repeats;
        let number = match is_known {
            true => self.random.u64(..count),
            false => known.fetch_add(1, Ordering::Relaxed),
        };
        let object = match is_download {
            true => Object::Download(number),
            false => Object::Large(number),
        };
        (object, is_known)
    }

    fn page(&mut self) -> (u64, bool) {
        let now = self.views.began.elapsed().as_secs();
        if now % CROWD_EVERY_S < CROWD_LASTS_S && self.random.f64() < CROWD {
            // The first one to come is a miss; which one that is does not matter to the figures.
            return (CROWD_PAGES + now / CROWD_EVERY_S, true);
        }
        let known = self.views.pages();
        if known < 100 || self.random.f64() >= REPEATS {
            return (self.views.pages.fetch_add(1, Ordering::Relaxed), false);
        }
        if self.random.f64() < HOT {
            return (self.random.u64(..known / 100) * 100, true);
        }
        let pages = [self.random.u64(..known), self.random.u64(..known)];
        let smaller = pages.into_iter().min_by_key(|page| world::page_bytes(*page));
        (smaller.unwrap_or(0), true)
    }

    /// Asks for an object and counts what came of it.
    fn request(&mut self, object: Object, is_known: bool, phase: &AtomicU8) -> io::Result<()> {
        let draw = self.random.f64();
        let (fields, is_reload) = match is_known && object.is_cacheable() {
            true if draw < RELOADS => ("Cache-Control: no-cache\r\nPragma: no-cache\r\n".to_owned(), true),
            true if draw < RELOADS + VALIDATING => (format!("If-None-Match: {}\r\n", object.etag()), false),
            _ => (String::new(), false),
        };
        let counts = phase.load(Ordering::Relaxed) == 1;
        let began = Instant::now();
        let is_hit = self.ask(object, &fields)?;
        if !counts || phase.load(Ordering::Relaxed) != 1 {
            return Ok(());
        }
        let bytes = object.size_bytes();
        match is_hit {
            true => self.totals.hits.add(bytes, began.elapsed()),
            false => self.totals.misses.add(bytes, began.elapsed()),
        }
        if is_known && object.is_cacheable() && !is_reload {
            self.totals.offered.0 += 1;
            self.totals.offered.1 += bytes;
        }
        Ok(())
    }

    /// Asks once more over a new connection if the proxy ended the old one between requests.
    fn ask(&mut self, object: Object, fields: &str) -> io::Result<bool> {
        let is_old = self.connection.is_some();
        match self.exchange(object, fields) {
            Err(_) if is_old => {
                self.connection = None;
                self.exchange(object, fields)
            }
            other => other,
        }
    }

    /// A request and its answer; whether it came without the origin's body.
    fn exchange(&mut self, object: Object, fields: &str) -> io::Result<bool> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let stream = TcpStream::connect_timeout(&self.proxy, WAIT)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(WAIT))?;
                BufReader::new(stream)
            }
        };
        let referer = match object {
            Object::Embedded(page, n) if n > 0 => {
                format!(
                    "Referer: http://site.test{}\r\n",
                    Object::Embedded(page, 0).path()
                )
            }
            _ => String::new(),
        };
        let request = format!(
            "GET {} HTTP/1.1\r\nHost: site.test\r\n{referer}{fields}\r\n",
            object.path()
        );
        let before = SERIAL.load(Ordering::SeqCst);
        connection.get_mut().write_all(request.as_bytes())?;
        let head = Head::read(&mut connection)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let wrong = |what: &str| io::Error::other(format!("{}: {what}: {}", object.path(), head.line));
        if head.line.contains(" 304 ") {
            self.connection = Some(connection);
            // A proxy that asked the origin has its answer's fields; who answered 304 is not told.
            return Ok(true);
        }
        if !head.line.contains(" 200") {
            return Err(wrong("not 200"));
        }
        let size = object.size_bytes();
        let mut at = 0;
        if head.field("transfer-encoding").is_some() {
            loop {
                let mut line = String::new();
                connection.read_line(&mut line)?;
                let len = u64::from_str_radix(line.trim(), 16).map_err(|_| wrong("chunk"))?;
                self.body(&mut connection, object, at, len)?;
                at += len;
                connection.read_line(&mut line)?;
                if len == 0 {
                    break;
                }
            }
        } else {
            let len = head.number("content-length").ok_or_else(|| wrong("no length"))?;
            self.body(&mut connection, object, 0, len)?;
            at = len;
        }
        if at != size {
            return Err(wrong("length"));
        }
        if head.field("connection") != Some("close") {
            self.connection = Some(connection);
        }
        let serial = head.number("x-serial").ok_or_else(|| wrong("no serial"))?;
        Ok(serial <= before)
    }

    fn body(&mut self, input: &mut impl Read, object: Object, from: u64, len: u64) -> io::Result<()> {
        let mut at = from;
        while at < from + len {
            let most = (from + len - at).min(self.buffer.len() as u64) as usize;
            input.read_exact(&mut self.buffer[..most])?;
            if !world::is_body_of(object, at, &self.buffer[..most]) {
                return Err(io::Error::other(format!("wrong bytes for {}", object.path())));
            }
            at += most as u64;
        }
        Ok(())
    }
}
