//! An origin, a proxy process and a client for tests, on loopback only. Everything ends with its owner.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const BINARY: &str = env!("CARGO_BIN_EXE_varve-cache-proxy");

/// A request as the origin saw it.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub head: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines().filter_map(|line| line.split_once(':'));
    lines
        .find(|(field, _)| field.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
}

type Handler = dyn Fn(&Seen, usize) -> String + Send + Sync;

/// An origin: a handler writes the whole answer; it learns how many requests came before.
pub struct Origin {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Origin {
    pub fn start(handler: impl Fn(&Seen, usize) -> String + Send + Sync + 'static) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("an address");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let handler: Arc<Handler> = Arc::new(handler);
        let (saw, ends) = (Arc::clone(&seen), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                let (handler, saw) = (Arc::clone(&handler), Arc::clone(&saw));
                std::thread::spawn(move || answer(stream, &*handler, &saw));
            }
        });
        Self {
            address,
            seen,
            stop,
            thread: Some(thread),
        }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no panic").clone()
    }

    pub fn count(&self) -> usize {
        self.seen.lock().expect("no panic").len()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(mut stream: TcpStream, handler: &Handler, saw: &Mutex<Vec<Seen>>) {
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    let Some(head) = read_head(&mut stream) else {
        return;
    };
    let mut words = head.split(' ');
    let seen = Seen {
        method: words.next().unwrap_or_default().to_owned(),
        path: words.next().unwrap_or_default().to_owned(),
        head: head.clone(),
    };
    let before = {
        let mut all = saw.lock().expect("no panic");
        all.push(seen.clone());
        all.len() - 1
    };
    let _ = stream.write_all(handler(&seen, before).as_bytes());
}

fn read_head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    Some(String::from_utf8_lossy(&head).into_owned())
}

/// A whole answer of an origin.
pub fn reply(status: &str, fields: &[&str], body: &str) -> String {
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    let len = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\nConnection: close\r\n{fields}\r\n{body}")
}

/// A fresh answer that says how many came before it.
pub fn fresh(before: usize) -> String {
    reply(
        "200 OK",
        &["Cache-Control: max-age=600"],
        &format!("answer {before}"),
    )
}

/// What a client got.
#[derive(Debug, Clone)]
pub struct Got {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Got {
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .unwrap_or(0);
        let mut got = Self {
            status,
            head: head.to_owned(),
            body: body.to_owned(),
        };
        if got.header("transfer-encoding") == Some("chunked") {
            got.body = unchunk(body);
        }
        got
    }
}

fn unchunk(mut text: &str) -> String {
    let mut body = String::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 || rest.len() < size {
            break;
        }
        body.push_str(&rest[..size]);
        text = rest[size..].trim_start_matches("\r\n");
    }
    body
}

/// Sends bytes, and takes what comes until the other side ends.
pub fn raw(address: SocketAddr, bytes: &[u8]) -> Got {
    Got::parse(&raw_bytes(address, bytes))
}

pub fn raw_bytes(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).expect("the proxy listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a timeout");
    let _ = stream.write_all(bytes);
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    all
}

/// Asks for a path by a method, with more fields.
pub fn ask(address: SocketAddr, method: &str, path: &str, fields: &[&str]) -> Got {
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: site.test\r\nConnection: close\r\n{fields}\r\n");
    raw(address, request.as_bytes())
}

pub fn get(address: SocketAddr, path: &str) -> Got {
    ask(address, "GET", path, &[])
}

/// Waits until something is true.
pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !is_true() {
        assert!(Instant::now() < end, "waited 10 s in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A folder with a configuration, and the process that serves it.
pub struct Proxy {
    pub folder: tempfile::TempDir,
    pub addresses: Vec<SocketAddr>,
    child: Option<Child>,
}

impl Proxy {
    /// A reverse proxy before an origin; `more` is appended to the configuration.
    pub fn before(origin: SocketAddr, more: &str) -> Self {
        Self::start(&format!(
            "[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{origin}\"]\n{more}"
        ))
    }

    pub fn start(config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut proxy = Self {
            folder,
            addresses: Vec::new(),
            child: None,
        };
        proxy.write_config(config);
        proxy.run();
        proxy
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write_config(&self, config: &str) {
        self.write_config_with(config, "");
    }

    /// As `write_config`, with more keys of the store, each followed by a comma.
    pub fn write_config_with(&self, config: &str, store_keys: &str) {
        let (store, socket, log) = (self.path("store"), self.path("admin"), self.path("log"));
        let text = format!(
            "store = {{ {store_keys}devices = [{store:?}], create_bytes = \"64M\", hot_bytes = \"1M\" }}\nadmin = {{ socket = {socket:?} }}\nlog = {{ access = {log:?} }}\n{config}"
        );
        std::fs::write(self.path("config"), text).expect("a file");
    }

    pub fn run(&mut self) {
        let mut command = Command::new(BINARY);
        command.arg("serve").arg("--config").arg(self.path("config"));
        command.stderr(Stdio::piped()).env("VARVE_LOG", "info");
        let mut child = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stderr.take().expect("it is piped")).lines();
        let wanted = std::fs::read_to_string(self.path("config"))
            .expect("a file")
            .matches("[[listen]]")
            .count();
        self.addresses.clear();
        self.child = Some(child);
        let mut said = Vec::new();
        while self.addresses.len() < wanted {
            let line = lines
                .next()
                .unwrap_or_else(|| panic!("the proxy ended: {said:?}"))
                .expect("text");
            if let Some(address) = line.split("address=").nth(1) {
                let address = address.split(' ').next().unwrap_or_default();
                self.addresses.push(address.parse().expect("an address"));
            }
            said.push(line);
        }
        std::thread::spawn(move || lines.for_each(drop));
        wait_until("the administration socket", || self.status().is_some());
    }

    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    pub fn status(&self) -> Option<serde_json::Value> {
        let text = varve_cache_proxy::admin::ask(&self.path("admin"), "GET", "/status", "").ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Runs a command of the program against this proxy.
    pub fn command(&self, command: &str, arguments: &[&str]) -> Output {
        let mut program = Command::new(BINARY);
        program
            .arg(command)
            .arg("--socket")
            .arg(self.path("admin"))
            .args(arguments);
        program.output().expect("the program starts")
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let child = self.child.as_ref().expect("it runs");
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, signal).expect("it is alive");
    }

    /// Ends the process, and gives its status.
    pub fn end(&mut self, signal: rustix::process::Signal) -> std::process::ExitStatus {
        self.signal(signal);
        self.child.take().expect("it runs").wait().expect("it ends")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Writes a certificate for `localhost` and its key.
pub fn certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).expect("a file");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("a file");
    (certificate, key)
}
