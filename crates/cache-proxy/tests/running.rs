//! Starts and ends, purges, reloads, several origins, TLS and HTTP/2.

mod common;

use common::{BINARY, Origin, Proxy, certificate, fresh, get, reply, wait_until};
use rustix::process::Signal;
use std::process::Command;
use std::time::Duration;
use varve_cache_proxy::body::Upload;
use varve_cache_proxy::config::{CacheRules, Limits};
use varve_cache_proxy::origin::{Asker, trust};

#[test]
fn objects_are_hit_after_an_orderly_end_and_after_kill() {
    let origin = Origin::start(|_, before| fresh(before));
    let mut proxy = Proxy::before(origin.address, "");
    for n in 0..50 {
        get(proxy.address(), &format!("/{n}"));
    }
    assert!(proxy.end(Signal::TERM).success());
    assert!(!proxy.path("admin").exists(), "nothing is left behind");
    proxy.run();
    for n in 0..50 {
        assert_eq!(get(proxy.address(), &format!("/{n}")).body, format!("answer {n}"));
    }
    assert_eq!(origin.count(), 50);
    get(proxy.address(), "/late");
    // The store flushes every 2 s.
    std::thread::sleep(Duration::from_millis(3500));
    proxy.end(Signal::KILL);
    proxy.run();
    for n in 0..50 {
        assert_eq!(get(proxy.address(), &format!("/{n}")).body, format!("answer {n}"));
    }
    assert_eq!(get(proxy.address(), "/late").body, "answer 50");
    assert_eq!(origin.count(), 51);
}

#[test]
fn purge_removes_what_it_names_and_nothing_else() {
    let origin = Origin::start(|seen, before| {
        let tag = format!("Cache-Tag: all, {}", seen.path.trim_start_matches('/'));
        reply(
            "200 OK",
            &["Cache-Control: max-age=600", &tag],
            &format!("answer {before}"),
        )
    });
    let proxy = Proxy::before(origin.address, "");
    let fetch = || ["/a/1", "/a/2", "/b"].map(|path| get(proxy.address(), path).body);
    let purge = |arguments: &[&str]| {
        let done = proxy.command("purge", arguments);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    let old = fetch();
    assert_eq!(fetch(), old);
    purge(&["--key", "http://site.test/b"]);
    let new = fetch();
    assert!(new[..2] == old[..2] && new[2] != old[2]);
    purge(&["--prefix", "http://site.test/a/"]);
    let newer = fetch();
    assert!(newer[0] != new[0] && newer[1] != new[1] && newer[2] == new[2]);
    purge(&["--tag", "b"]);
    let newest = fetch();
    assert!(newest[..2] == newer[..2] && newest[2] != newer[2]);
    purge(&["--host", "other.test"]);
    assert_eq!(fetch(), newest);
    purge(&["--host", "site.test"]);
    let last = fetch();
    assert!((0..3).all(|n| last[n] != newest[n]));
    purge(&["--everything", "--json"]);
    assert!((0..3).all(|n| fetch()[n] != last[n]));
    let wrong = proxy.command("purge", &["--key", "/a"]);
    assert!(!wrong.status.success() && String::from_utf8_lossy(&wrong.stderr).contains("is no URL"));
}

#[test]
fn reload_changes_origins_and_refuses_what_it_cannot_change() {
    let (one, two) = (
        Origin::start(|_, _| reply("200 OK", &[], "one")),
        Origin::start(|_, _| reply("200 OK", &[], "two")),
    );
    let config = |origin: std::net::SocketAddr, more: &str| {
        format!(
            "[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{origin}\"]\n{more}"
        )
    };
    let proxy = Proxy::before(one.address, "");
    assert_eq!(get(proxy.address(), "/").body, "one");
    proxy.write_config(&config(two.address, ""));
    proxy.signal(Signal::HUP);
    wait_until("the other origin is asked", || {
        get(proxy.address(), "/").body == "two"
    });
    proxy.write_config(&config(one.address, "").replace("127.0.0.1:0", "127.0.0.1:1"));
    let refused = proxy.command("reload", &[]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && text.contains("listen cannot change"),
        "{text}"
    );
    proxy.write_config(&config(one.address, "[limits]\nstreams = 0\n"));
    let refused = proxy.command("reload", &[]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("limits.streams"));
    assert_eq!(get(proxy.address(), "/").body, "two", "it goes on as before");
}

#[test]
fn site_is_served_while_one_of_its_origins_lives() {
    let gone = Origin::start(|_, _| String::new()).address;
    let origin = Origin::start(|_, before| reply("200 OK", &[], &format!("answer {before}")));
    let proxy = Proxy::start(&format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{gone}\", \"http://{}\"]\nhealth_path = \"/health\"\nhealth_interval_ms = 100\n",
        origin.address
    ));
    for _ in 0..4 {
        assert_eq!(get(proxy.address(), "/").status, 200);
    }
    let health = || -> Option<Vec<bool>> {
        let origins = proxy.status()?["origins"].as_array()?.clone();
        origins.iter().map(|origin| origin["healthy"].as_bool()).collect()
    };
    wait_until("the health of both is known", || {
        health() == Some(vec![false, true])
    });
    assert!(origin.seen().iter().any(|seen| seen.path == "/health"));
    let status = proxy.command("status", &[]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains("fails") && text.contains("healthy"), "{text}");
    let metrics = proxy.command("metrics", &[]);
    assert!(
        String::from_utf8_lossy(&metrics.stdout)
            .contains("varve_cache_proxy_requests_total{outcome=\"miss\"}")
    );
}

#[test]
fn tls_and_http2_are_spoken_to_clients_and_to_origins() {
    let origin = Origin::start(|_, before| fresh(before));
    let folder = tempfile::tempdir().expect("a folder");
    let (cert, key) = certificate(folder.path());
    let inner = Proxy::start(&format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\ntls = {{ certificate = {cert:?}, key = {key:?} }}\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{}\"]\n",
        origin.address
    ));
    let name = format!("localhost:{}", inner.address().port());
    let outer = Proxy::start(&format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\nhost = \"{name}\"\norigins = [\"https://{name}\"]\n[cache]\norigin_ca = {cert:?}\n"
    ));
    assert_eq!(get(outer.address(), "/a").body, "answer 0");
    wait_until("the inner proxy's log", || {
        inner.log().contains("\"version\":\"2\"")
    });
    let rules = CacheRules {
        origin_ca: Some(cert),
        ..CacheRules::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let client = Asker::new(trust(&rules).expect("a certificate"), &Limits::default(), None);
        let request = http::Request::get(format!("https://{name}/a"))
            .header("host", &name)
            .body(Upload::Empty);
        let response = client.ask(request.expect("a request")).await.expect("an answer");
        assert_eq!(response.version(), http::Version::HTTP_2);
        assert!(response.headers().contains_key("age"), "a hit");
        let old = http::Request::get(format!("https://{name}/b"))
            .header("host", "localhost")
            .body(Upload::Empty);
        let response = client.ask(old.expect("a request")).await.expect("an answer");
        assert_eq!(
            (response.version(), response.status().as_u16()),
            (http::Version::HTTP_11, 200)
        );
    });
    assert_eq!(origin.count(), 2);
}

#[test]
fn wrong_configuration_is_told_by_its_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("c.toml");
    std::fs::write(
        &path,
        "[store]\ndevices = [\"x\"]\n[[listen]]\naddress = \"127.0.0.1:1\"\nmode = \"forward\"\n",
    )
    .expect("a file");
    let check = Command::new(BINARY)
        .arg("check")
        .arg("--config")
        .arg(&path)
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&check.stderr).into_owned();
    assert!(
        !check.status.success() && text.contains("forward.clients") && text.contains("list networks"),
        "{text}"
    );
    let none = Command::new(BINARY)
        .args(["status", "--socket", "/nonexistent/x"])
        .output()
        .expect("it starts");
    assert!(String::from_utf8_lossy(&none.stderr).contains("is the proxy running"));
}
