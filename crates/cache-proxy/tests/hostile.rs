//! Clients that mean harm: ambiguous framing as raw bytes, the bounds, and the rules of the forward proxy.

mod common;

use common::{Origin, Proxy, fresh, get, raw, raw_bytes, reply, wait_until};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn ambiguous_requests_are_refused_and_reach_no_origin() {
    let origin = Origin::start(|_, before| fresh(before));
    let proxy = Proxy::before(origin.address, "");
    let cases: [&[u8]; 18] = [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    ];
    for bytes in cases {
        let got = raw(proxy.address(), bytes);
        assert_eq!(got.status, 400, "{}", String::from_utf8_lossy(bytes));
    }
    assert_eq!(origin.count(), 0);
    assert_eq!(get(proxy.address(), "/").status, 200, "others are served");
}

#[test]
fn second_request_behind_an_ambiguous_body_is_never_served() {
    let origin = Origin::start(|_, before| fresh(before));
    let proxy = Proxy::before(origin.address, "");
    let smuggled = b"POST /one HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\n\nGET /two HTTP/1.1\r\nHost: a\r\n\r\n";
    raw_bytes(proxy.address(), smuggled);
    assert!(origin.seen().iter().all(|seen| seen.path != "/two"));
    let honest =
        b"GET /one HTTP/1.1\r\nHost: a\r\n\r\nGET /two HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let both = String::from_utf8_lossy(&raw_bytes(proxy.address(), honest)).into_owned();
    assert_eq!(
        both.matches("HTTP/1.1 200").count(),
        2,
        "pipelining is served: {both}"
    );
    let refused_after = b"GET /one HTTP/1.1\r\nHost: a\r\n\r\nGET /three HTTP/1.1\nHost: a\n\n";
    let both = String::from_utf8_lossy(&raw_bytes(proxy.address(), refused_after)).into_owned();
    assert!(
        both.starts_with("HTTP/1.1 200") && both.contains("HTTP/1.1 400"),
        "{both}"
    );
}

#[test]
fn header_that_is_too_large_or_too_slow_ends_the_connection() {
    let origin = Origin::start(|_, before| fresh(before));
    let proxy = Proxy::before(
        origin.address,
        "[limits]\nheader_bytes = 8192\nheader_timeout_ms = 300\n",
    );
    let large = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(9000));
    assert_eq!(raw(proxy.address(), large.as_bytes()).status, 400);
    let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(200));
    assert_eq!(raw(proxy.address(), many.as_bytes()).status, 400);
    let begun = Instant::now();
    raw_bytes(proxy.address(), b"GET / HTTP/1.1\r\nHost: a\r\n");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(origin.count(), 0);
}

#[test]
fn connections_of_one_address_are_bounded() {
    let origin = Origin::start(|_, before| fresh(before));
    let proxy = Proxy::before(origin.address, "[limits]\nconnections_per_address = 3\n");
    wait_until("none is open", || {
        proxy.status().is_some_and(|status| status["connections"] == 0)
    });
    let held: Vec<_> = (0..3)
        .map(|_| TcpStream::connect(proxy.address()).expect("it listens"))
        .collect();
    wait_until("three are open", || {
        proxy.status().is_some_and(|status| status["connections"] == 3)
    });
    assert!(raw_bytes(proxy.address(), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").is_empty());
    drop(held);
    wait_until("they are gone", || get(proxy.address(), "/").status == 200);
}

#[test]
fn objects_and_bodies_beyond_their_bounds_are_not_taken() {
    let origin = Origin::start(|seen, before| match seen.path.as_str() {
        "/large" => reply("200 OK", &["Cache-Control: max-age=600"], &"x".repeat(5000)),
        "/chunked" => {
            let body = "x".repeat(5000);
            format!(
                "HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
                body.len()
            )
        }
        _ => fresh(before),
    });
    let proxy = Proxy::before(
        origin.address,
        "[limits]\nobject_bytes = 4096\nunknown_length_bytes = 4096\nrequest_body_bytes = 10\n",
    );
    for path in ["/large", "/large", "/chunked", "/chunked"] {
        assert_eq!(get(proxy.address(), path).body.len(), 5000);
    }
    assert_eq!(origin.count(), 4, "neither was stored");
    let declared = raw(
        proxy.address(),
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 11\r\n\r\nhello world",
    );
    assert_eq!(declared.status, 413);
    let chunked = raw(proxy.address(), b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nb\r\nhello world\r\n0\r\n\r\n");
    assert!(
        chunked.status == 413 || chunked.status == 200 || chunked.status == 502,
        "{}",
        chunked.status
    );
}

fn forward(port: u16, rules: &str) -> Proxy {
    Proxy::start(&format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\nmode = \"forward\"\n[forward]\nports = [{port}]\nconnect_ports = [{port}]\n{rules}\n"
    ))
}

fn through(proxy: &Proxy, target: &str) -> common::Got {
    let host = target
        .trim_start_matches("http://")
        .split('/')
        .next()
        .unwrap_or_default();
    raw(
        proxy.address(),
        format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes(),
    )
}

#[test]
fn forward_proxy_serves_listed_clients_and_ports_and_caches() {
    let origin = Origin::start(|_, before| fresh(before));
    let port = origin.address.port();
    let proxy = forward(
        port,
        "clients = [\"127.0.0.0/8\"]\nallow_private = [\"127.0.0.0/8\"]",
    );
    let url = format!("http://127.0.0.1:{port}/a");
    assert_eq!(through(&proxy, &url).body, "answer 0");
    assert_eq!(through(&proxy, &url).body, "answer 0");
    assert_eq!(origin.count(), 1);
    let seen = &origin.seen()[0];
    assert_eq!(
        (seen.path.as_str(), seen.header("host")),
        ("/a", Some(format!("127.0.0.1:{port}").as_str()))
    );
    assert_eq!(
        through(&proxy, "http://127.0.0.1:1/").status,
        403,
        "a port that is not listed"
    );
    assert_eq!(get(proxy.address(), "/a").status, 400, "no whole URL");
    let strangers = forward(
        port,
        "clients = [\"192.0.2.0/24\"]\nallow_private = [\"127.0.0.0/8\"]",
    );
    assert_eq!(through(&strangers, &url).status, 403);
}

#[test]
fn forward_proxy_goes_to_no_address_near_it() {
    let origin = Origin::start(|_, before| fresh(before));
    let port = origin.address.port();
    let proxy = forward(port, "clients = [\"127.0.0.0/8\"]");
    for host in [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "10.0.0.1",
        "169.254.169.254",
    ] {
        assert_eq!(
            through(&proxy, &format!("http://{host}:{port}/")).status,
            403,
            "{host}"
        );
        let connect = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
        assert_eq!(raw(proxy.address(), connect.as_bytes()).status, 403, "{host}");
    }
    assert_eq!(origin.count(), 0);
}

#[test]
fn what_one_mode_stored_is_not_served_in_the_other() {
    let (site, target) = (
        Origin::start(|_, _| reply("200 OK", &["Cache-Control: max-age=600"], "site")),
        Origin::start(|_, _| reply("200 OK", &["Cache-Control: max-age=600"], "target")),
    );
    let port = target.address.port();
    let proxy = Proxy::start(&format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\nmode = \"forward\"\n[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{}\"]\n[forward]\nclients = [\"127.0.0.0/8\"]\nports = [{port}]\nallow_private = [\"127.0.0.0/8\"]\n",
        site.address
    ));
    // Whoever reaches the site may name any host; people behind the forward proxy must not get its answer.
    let poison = format!("GET /a HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    assert_eq!(raw(proxy.addresses[1], poison.as_bytes()).body, "site");
    assert_eq!(
        through(&proxy, &format!("http://127.0.0.1:{port}/a")).body,
        "target"
    );
    assert_eq!(raw(proxy.addresses[1], poison.as_bytes()).body, "site");
    let url = format!("http://127.0.0.1:{port}/a");
    assert!(proxy.command("purge", &["--key", &url]).status.success());
    through(&proxy, &url);
    assert_eq!((site.count(), target.count()), (1, 2), "a purge covers both");
}

fn tunnel(address: SocketAddr, target: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").expect("it is sent");
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
        head.push(byte[0]);
    }
    (stream, String::from_utf8_lossy(&head).into_owned())
}

#[test]
fn connect_carries_bytes_untouched_to_listed_ports_only() {
    let origin = Origin::start(|_, before| fresh(before));
    let port = origin.address.port();
    let proxy = forward(
        port,
        "clients = [\"127.0.0.0/8\"]\nallow_private = [\"127.0.0.0/8\"]",
    );
    let (mut stream, head) = tunnel(proxy.address(), &format!("127.0.0.1:{port}"));
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    // What the proxy itself would refuse goes through a tunnel.
    stream
        .write_all(b"GET /t HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        .expect("it is sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text");
    assert!(text.ends_with("answer 0"), "{text}");
    assert!(
        proxy.status().is_some_and(|status| status["connections"] == 1),
        "a tunnel is a connection"
    );
    drop(stream);
    wait_until("the tunnel is counted no more", || {
        proxy.status().is_some_and(|status| status["connections"] == 0)
    });
    let (_, head) = tunnel(proxy.address(), "127.0.0.1:1");
    assert!(head.starts_with("HTTP/1.1 403"), "{head}");
    let reverse = Proxy::before(origin.address, "");
    let (_, head) = tunnel(reverse.address(), &format!("127.0.0.1:{port}"));
    assert!(head.starts_with("HTTP/1.1 405"), "{head}");
}

#[test]
fn disk_that_was_overwritten_is_missed_and_not_believed() {
    let origin = Origin::start(|_, before| fresh(before));
    let mut proxy = Proxy::before(origin.address, "");
    for n in 0..20 {
        get(proxy.address(), &format!("/{n}"));
    }
    proxy.end(rustix::process::Signal::TERM);
    let path = proxy.path("store");
    let mut bytes = std::fs::read(&path).expect("a store");
    // Every kilobyte behind the superblocks gets a wrong bit.
    for at in ((1 << 20)..bytes.len()).step_by(700) {
        bytes[at] ^= 0x10;
    }
    std::fs::write(&path, bytes).expect("a store");
    proxy.run();
    for n in 0..20 {
        let got = get(proxy.address(), &format!("/{n}"));
        assert!(
            got.status == 200 && got.body.starts_with("answer "),
            "{}",
            got.body
        );
    }
}
