//! Starts and ends, purges, reloads, several origins, TLS and HTTP/2.

mod common;

use common::{BINARY, Origin, Proxy, ask, certificate, fresh, get, reply, wait_until};
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
fn purge_of_a_url_reaches_it_whatever_the_fields_of_its_key_are() {
    let origin = Origin::start(|_, before| fresh(before));
    let proxy = Proxy::before(origin.address, "[cache]\nkey_headers = [\"X-Country\"]\n");
    let fetch = |path: &str, country: &str| {
        ask(proxy.address(), "GET", path, &[&format!("X-Country: {country}")]).body
    };
    let all = || {
        [
            fetch("/a", "de"),
            fetch("/a", "fr"),
            get(proxy.address(), "/a").body,
            fetch("/b", "de"),
        ]
    };
    let old = all();
    assert_eq!(all(), old);
    let done = proxy.command("purge", &["--key", "http://site.test/a"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let new = all();
    assert!(
        (0..3).all(|n| new[n] != old[n]) && new[3] == old[3],
        "{old:?} {new:?}"
    );
    assert_eq!(all(), new);
}

#[test]
fn response_with_more_tags_than_the_store_takes_is_stored_with_the_first_ones() {
    let origin = Origin::start(|_, before| {
        let tags: Vec<String> = (0..40).map(|n| format!("t{n}")).collect();
        let tags = format!("Cache-Tag: {}", tags.join(", "));
        reply(
            "200 OK",
            &["Cache-Control: max-age=600", &tags],
            &format!("answer {before}"),
        )
    });
    let proxy = Proxy::before(origin.address, "");
    assert_eq!(get(proxy.address(), "/a").body, "answer 0");
    assert_eq!(get(proxy.address(), "/a").body, "answer 0");
    assert!(proxy.command("purge", &["--tag", "t14"]).status.success());
    assert_eq!(get(proxy.address(), "/a").body, "answer 1");
}

/// A page, its objects, and what else goes on: `Vary` and cookies of others.
fn site() -> Origin {
    Origin::start(|seen, _| {
        let kind = if seen.path.ends_with(".html") {
            "Content-Type: text/html; charset=utf-8"
        } else {
            "Content-Type: image/png"
        };
        let vary = if seen.path.ends_with("3.png") {
            "Vary: Accept-Encoding"
        } else {
            "X-Not: 1"
        };
        let body = format!("{} {}", seen.path, "x".repeat(6000));
        reply("200 OK", &["Cache-Control: max-age=600", kind, vary], &body)
    })
}

/// Loads a page and its objects, those of another page in between.
fn load(proxy: &Proxy, with_referer: bool) {
    get(proxy.address(), "/page.html");
    get(proxy.address(), "/other.html");
    for n in 0..10 {
        for page in ["page", "other"] {
            let referer = format!("Referer: http://site.test/{page}.html");
            let fields: &[&str] = if with_referer { &[&referer] } else { &[] };
            assert_eq!(
                ask(proxy.address(), "GET", &format!("/{page}/{n}.png"), fields).status,
                200
            );
        }
    }
}

/// How many lookups found their object in memory while a page and its objects were read by a proxy that was
/// started anew, and how many found it at all.
fn read_again(mut proxy: Proxy, origin: &Origin) -> (u64, u64) {
    assert!(proxy.end(Signal::TERM).success());
    proxy.run();
    let before = origin.count();
    for page in ["page", "other"] {
        for path in
            std::iter::once(format!("/{page}.html")).chain((0..10).map(|n| format!("/{page}/{n}.png")))
        {
            assert!(get(proxy.address(), &path).body.starts_with(&path));
        }
    }
    assert_eq!(origin.count(), before, "all are hits");
    let store = proxy.status().expect("it runs")["store"].clone();
    (
        store["memory_hits"].as_u64().expect("a number"),
        store["hits"].as_u64().expect("a number"),
    )
}

/// Starts a proxy with a store of a policy, and its origin.
fn with_policy(policy: &str, config: &str) -> (Proxy, Origin) {
    let mut proxy = Proxy::before(site().address, "");
    let origin = site();
    assert!(proxy.end(Signal::TERM).success());
    std::fs::remove_file(proxy.path("store")).expect("there is a store");
    let text = format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{}\"]\n{config}",
        origin.address
    );
    proxy.write_config_with(&text, &format!("policy = \"{policy}\", "));
    proxy.run();
    (proxy, origin)
}

#[test]
fn miss_costs_one_lookup_and_its_put_no_read() {
    for policy in ["basic", "set", "set-mem"] {
        let (proxy, origin) = with_policy(policy, "");
        for n in 10..40 {
            assert_eq!(get(proxy.address(), &format!("/{n}.html")).status, 200);
        }
        wait_until("the puts", || {
            proxy.status().is_some_and(|status| status["stored"] == 30)
        });
        let status = proxy.status().expect("it runs");
        let index_bytes = status["memory"]["index_bytes"].as_u64().expect("a number");
        assert_eq!(index_bytes > 0, policy == "set-mem");
        let store = status["store"].clone();
        let number = |name: &str| store[name].as_u64().expect("a number");
        assert_eq!(
            (origin.count(), number("misses"), number("puts")),
            (30, 30, 30),
            "{policy}"
        );
        assert_eq!(number("set_reads"), 0, "{policy}");
        let most = if policy == "set-mem" { 2 } else { 30 };
        assert!(number("lookup_reads") <= most, "{policy}: {store}");
    }
}

#[test]
fn objects_of_a_page_are_read_together_with_it() {
    let prefetching = |config: &str| with_policy("log-prefetch", config);
    let (proxy, origin) = prefetching("");
    load(&proxy, true);
    // They are found while they wait for each other.
    assert!(get(proxy.address(), "/page/3.png").header("age").is_some());
    let (in_memory, all) = read_again(proxy, &origin);
    // Two pages of one read each; objects that vary are two lookups.
    assert_eq!(all, 24, "22 objects, 2 of them varying");
    assert_eq!(in_memory, 22, "all but the two pages");

    let (proxy, origin) = prefetching("");
    load(&proxy, false);
    let (in_memory, all) = read_again(proxy, &origin);
    // A read of a block may bring a small neighbour.
    assert!(
        in_memory <= 4 && all == 24,
        "{in_memory} of {all}: nothing says what belongs together"
    );

    let (proxy, origin) = prefetching("[cache]\ngroup_ms = 0\n");
    load(&proxy, true);
    let (in_memory, all) = read_again(proxy, &origin);
    assert!(
        in_memory <= 4 && all == 24,
        "{in_memory} of {all}: it is switched off"
    );
}

#[test]
fn object_that_waits_for_its_page_is_gone_when_it_is_purged() {
    let origin = Origin::start(|seen, before| match seen.method.as_str() {
        "POST" => reply("204 No Content", &[], ""),
        _ => reply(
            "200 OK",
            &[
                "Cache-Control: max-age=600",
                "Content-Type: text/html",
                "Cache-Tag: t",
            ],
            &format!("answer {before}"),
        ),
    });
    let mut proxy = Proxy::before(origin.address, "");
    assert!(proxy.end(Signal::TERM).success());
    std::fs::remove_file(proxy.path("store")).expect("there is a store");
    proxy.write_config_with(
        &format!(
            "[[listen]]\naddress = \"127.0.0.1:0\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://{}\"]\n[cache]\ngroup_ms = 60000\n",
            origin.address
        ),
        "policy = \"log-prefetch\", ",
    );
    proxy.run();
    let mut last = get(proxy.address(), "/a").body;
    let ways: [&dyn Fn(); 3] = [
        &|| {
            assert!(
                proxy
                    .command("purge", &["--key", "http://site.test/a"])
                    .status
                    .success()
            )
        },
        &|| assert!(proxy.command("purge", &["--tag", "t"]).status.success()),
        &|| {
            assert_eq!(
                ask(proxy.address(), "POST", "/a", &["Content-Length: 0"]).status,
                204
            )
        },
    ];
    for way in ways {
        assert_eq!(get(proxy.address(), "/a").body, last, "it is there");
        way();
        let now = get(proxy.address(), "/a").body;
        assert_ne!(now, last);
        last = now;
    }
    // The end writes what still waits.
    assert!(proxy.end(Signal::TERM).success());
    proxy.run();
    assert_eq!(get(proxy.address(), "/a").body, last);
}

#[test]
fn warmed_urls_are_hits_and_top_counts_them() {
    let origin = Origin::start(|seen, before| match seen.path.as_str() {
        "/missing" => reply("404 Not Found", &[], "none"),
        _ => {
            let language = seen.header("accept-language").unwrap_or("none").to_owned();
            reply(
                "200 OK",
                &["Cache-Control: max-age=600", "Vary: Accept-Language"],
                &format!("{language} {before}"),
            )
        }
    });
    let proxy = Proxy::before(origin.address, "");
    std::fs::write(
        proxy.path("list"),
        "# a list\nhttp://site.test/a\n\nhttp://site.test/b\n",
    )
    .expect("a file");
    let list = proxy.path("list").display().to_string();
    let warm = |more: &[&str]| {
        let done = proxy.command("warm", more);
        (
            done.status.success(),
            String::from_utf8_lossy(&done.stdout).into_owned(),
        )
    };
    let (right, text) = warm(&["--list", &list, "-H", "Accept-Language: de", "http://site.test/c"]);
    assert!(
        right && text.contains("3 URLs, 12 bytes; 3 asked of origins, 0 failed"),
        "{text}"
    );
    assert_eq!(origin.count(), 3);
    for path in ["/a", "/b", "/c"] {
        let got = ask(proxy.address(), "GET", path, &["Accept-Language: de"]);
        assert!(got.body.starts_with("de ") && got.header("age").is_some());
    }
    assert_eq!(origin.count(), 3);
    let (right, text) = warm(&["--json", "http://site.test/missing"]);
    assert!(!right && text.contains("\"status\":404"), "{text}");
    assert!(!warm(&["/a"]).0, "no whole URL");
    let done = proxy.command("top", &["--interval", "0.2", "-n", "1", "--json"]);
    let look: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!(look["requests_per_s"], 0.0);
    let address = proxy.address();
    let load = std::thread::spawn(move || {
        for _ in 0..40 {
            ask(address, "GET", "/a", &["Accept-Language: de"]);
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let done = proxy.command("top", &["--interval", "0.3", "-n", "1"]);
    load.join().expect("no panic");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        text.contains("hits 100.0 %") && text.contains("    hit"),
        "{text}"
    );
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
