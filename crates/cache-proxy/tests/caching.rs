//! What is answered from the store and what is not: RFC 9111 over sockets.

mod common;

use common::{Origin, Proxy, ask, fresh, get, reply, wait_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[test]
fn second_request_is_a_hit_with_an_age_and_head_too() {
    let origin = Origin::start(|_, before| fresh(before));
    let proxy = Proxy::before(origin.address, "");
    let first = get(proxy.address(), "/a?b");
    assert_eq!((first.status, first.body.as_str()), (200, "answer 0"));
    assert!(first.header("via").is_some_and(|via| via.contains("varve")));
    let second = get(proxy.address(), "/a?b");
    assert_eq!(
        (second.body.as_str(), second.header("content-length")),
        ("answer 0", Some("8"))
    );
    assert!(
        second.header("age").is_some()
            && second
                .header("cache-status")
                .is_some_and(|status| status.contains("hit"))
    );
    let head = ask(proxy.address(), "HEAD", "/a?b", &[]);
    assert_eq!(
        (head.status, head.header("content-length"), head.body.as_str()),
        (200, Some("8"), "")
    );
    assert_eq!(get(proxy.address(), "/a?c").body, "answer 1");
    assert_eq!(origin.count(), 2);
    wait_until("the access log", || {
        proxy.log().matches("\"cache\":\"hit\"").count() == 2
    });
}

#[test]
fn what_is_for_one_user_is_asked_for_each_time() {
    let origin = Origin::start(|seen, before| {
        let fields: &[&str] = match seen.path.as_str() {
            "/private" => &["Cache-Control: max-age=600, private"],
            "/no-store" => &["Cache-Control: max-age=600, no-store"],
            "/cookie" => &["Cache-Control: max-age=600", "Set-Cookie: a=b"],
            _ => &["Cache-Control: max-age=600"],
        };
        reply("200 OK", fields, &format!("answer {before}"))
    });
    let proxy = Proxy::before(origin.address, "");
    for path in ["/private", "/no-store", "/cookie"] {
        assert_ne!(
            get(proxy.address(), path).body,
            get(proxy.address(), path).body,
            "{path}"
        );
    }
    let secret = ["Authorization: Basic eA=="];
    let first = ask(proxy.address(), "GET", "/auth", &secret);
    assert_ne!(first.body, ask(proxy.address(), "GET", "/auth", &secret).body);
    assert_ne!(first.body, get(proxy.address(), "/auth").body);
    assert_eq!(
        ask(proxy.address(), "GET", "/new", &["Cache-Control: only-if-cached"]).status,
        504
    );
}

#[test]
fn stale_response_is_validated_and_a_304_updates_it() {
    let origin = Origin::start(|seen, before| match seen.header("if-none-match") {
        Some("\"v1\"") => reply(
            "304 Not Modified",
            &["ETag: \"v1\"", "Cache-Control: max-age=600", "X-New: 1"],
            "",
        ),
        _ => reply(
            "200 OK",
            &["ETag: \"v1\"", "Cache-Control: max-age=0", "X-Old: 1"],
            &format!("answer {before}"),
        ),
    });
    let proxy = Proxy::before(origin.address, "");
    get(proxy.address(), "/a");
    let second = get(proxy.address(), "/a");
    assert_eq!((second.status, second.body.as_str()), (200, "answer 0"));
    assert!(second.header("x-new").is_some() && second.header("x-old").is_some());
    assert_eq!(get(proxy.address(), "/a").body, "answer 0");
    assert_eq!(origin.count(), 2, "the 304 made it fresh");
    let same = ask(proxy.address(), "GET", "/a", &["If-None-Match: \"v1\""]);
    assert_eq!((same.status, same.body.as_str()), (304, ""));
}

#[test]
fn variants_are_kept_apart_and_at_most_sixteen() {
    let origin = Origin::start(|seen, _| {
        let language = seen.header("accept-language").unwrap_or("none").to_owned();
        reply(
            "200 OK",
            &["Cache-Control: max-age=600", "Vary: Accept-Language"],
            &language,
        )
    });
    let proxy = Proxy::before(origin.address, "");
    let ask = |language: usize| {
        ask(
            proxy.address(),
            "GET",
            "/v",
            &[&format!("Accept-Language: l{language}")],
        )
        .body
    };
    for language in 0..20 {
        assert_eq!(ask(language), format!("l{language}"));
    }
    let before = origin.count();
    for language in 4..20 {
        assert_eq!(ask(language), format!("l{language}"));
    }
    assert_eq!(origin.count(), before, "the newest sixteen are there");
    assert_eq!(ask(0), "l0");
    assert_eq!(origin.count(), before + 1, "the oldest are not");
}

#[test]
fn stale_response_is_served_while_the_origin_is_asked() {
    let origin = Origin::start(|_, before| {
        reply(
            "200 OK",
            &["Cache-Control: max-age=0, stale-while-revalidate=600"],
            &format!("answer {before}"),
        )
    });
    let proxy = Proxy::before(origin.address, "");
    get(proxy.address(), "/a");
    // More than once: a request that comes while the first answer is being stored takes part in its fetch.
    let mut bodies = Vec::new();
    wait_until("the origin is asked behind the client's back", || {
        bodies.push(get(proxy.address(), "/a").body);
        origin.count() > 1
    });
    assert_eq!(bodies.first().map(String::as_str), Some("answer 0"));
    wait_until("the new answer is served", || {
        get(proxy.address(), "/a").body != "answer 0"
    });
}

#[test]
fn stale_response_is_served_when_the_origin_fails_unless_it_forbids_that() {
    let fails = Arc::new(AtomicBool::new(false));
    let failing = Arc::clone(&fails);
    let origin = Origin::start(move |seen, before| {
        if failing.load(Ordering::SeqCst) {
            return reply("503 Service Unavailable", &[], "sorry");
        }
        let rule = if seen.path == "/strict" {
            "max-age=0, must-revalidate"
        } else {
            "max-age=0, stale-if-error=600"
        };
        reply(
            "200 OK",
            &[&format!("Cache-Control: {rule}"), "ETag: \"x\""],
            &format!("answer {before}"),
        )
    });
    let address = origin.address;
    let proxy = Proxy::before(address, "");
    let (kind, strict) = (get(proxy.address(), "/kind"), get(proxy.address(), "/strict"));
    assert_eq!((kind.status, strict.status), (200, 200));
    fails.store(true, Ordering::SeqCst);
    let stale = get(proxy.address(), "/kind");
    assert_eq!((stale.status, stale.body), (200, kind.body.clone()));
    assert_eq!(get(proxy.address(), "/strict").status, 503);
    drop(origin);
    assert_eq!(get(proxy.address(), "/kind").body, kind.body, "no origin at all");
    assert_eq!(get(proxy.address(), "/strict").status, 502);
}

#[test]
fn many_that_want_the_same_cost_the_origin_one_request() {
    let origin = Origin::start(|_, before| {
        std::thread::sleep(Duration::from_millis(300));
        fresh(before)
    });
    let proxy = Proxy::before(origin.address, "");
    let address = proxy.address();
    let clients: Vec<_> = (0..30)
        .map(|_| std::thread::spawn(move || get(address, "/a").body))
        .collect();
    for client in clients {
        assert_eq!(client.join().expect("no panic"), "answer 0");
    }
    assert_eq!(origin.count(), 1);
}

#[test]
fn ranges_come_from_whole_and_from_partial_objects() {
    let origin = Origin::start(|seen, _| {
        let validators = ["Cache-Control: max-age=600", "ETag: \"x\""];
        match seen.header("range") {
            Some("bytes=10-19") => {
                let fields = [validators[0], validators[1], "Content-Range: bytes 10-19/100"];
                reply("206 Partial Content", &fields, "abcdefghij")
            }
            _ => reply("200 OK", &validators, "0123456789"),
        }
    });
    let proxy = Proxy::before(origin.address, "");
    let ranged =
        |path: &str, range: &str| ask(proxy.address(), "GET", path, &[&format!("Range: bytes={range}")]);
    get(proxy.address(), "/whole");
    let part = ranged("/whole", "2-4");
    assert_eq!(
        (part.status, part.body.as_str(), part.header("content-range")),
        (206, "234", Some("bytes 2-4/10"))
    );
    assert_eq!(ranged("/whole", "-3").body, "789");
    assert_eq!(ranged("/whole", "20-").status, 416);
    let wrong = ask(
        proxy.address(),
        "GET",
        "/whole",
        &["Range: bytes=2-4", "If-Range: \"y\""],
    );
    assert_eq!((wrong.status, wrong.body.as_str()), (200, "0123456789"));
    assert_eq!(origin.count(), 1);
    assert_eq!(ranged("/part", "10-19").status, 206);
    wait_until("the part is stored", || {
        proxy.status().is_some_and(|status| status["stored"] == 2)
    });
    let part = ranged("/part", "12-13");
    assert_eq!(
        (part.status, part.body.as_str(), part.header("content-range")),
        (206, "cd", Some("bytes 12-13/100"))
    );
    assert_eq!(origin.count(), 2, "the part that is there is enough");
    assert_eq!(
        get(proxy.address(), "/part").body,
        "0123456789",
        "a part is never the whole"
    );
}

/// Answers any range of 0 to 99 of a body whose bytes are their offsets in letters, with an entity tag by
/// path.
fn ranged_origin() -> Origin {
    Origin::start(|seen, before| {
        let all: String = (0..100u8).map(|n| char::from(b'!' + n % 90)).collect();
        let tag = match seen.path.as_str() {
            "/weak" => "ETag: W/\"x\"".to_owned(),
            "/changes" => format!("ETag: \"{before}\""),
            _ => "ETag: \"x\"".to_owned(),
        };
        let fields = ["Cache-Control: max-age=600", &tag];
        let range = seen.header("range").and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
        match range {
            Some((first, last)) => {
                let part = format!("Content-Range: bytes {first}-{last}/100");
                reply(
                    "206 Partial Content",
                    &[fields[0], fields[1], &part],
                    &all[first..=last],
                )
            }
            None => reply("200 OK", &fields, &all),
        }
    })
}

#[test]
fn parts_join_when_their_validator_is_strong_and_the_same() {
    let origin = ranged_origin();
    let proxy = Proxy::before(origin.address, "");
    let all: String = (0..100u8).map(|n| char::from(b'!' + n % 90)).collect();
    let stored = || {
        proxy
            .status()
            .map_or(0, |status| status["stored"].as_u64().unwrap_or(0))
    };
    let fetch = |path: &str, first: usize, last: usize| {
        let got = ask(
            proxy.address(),
            "GET",
            path,
            &[&format!("Range: bytes={first}-{last}")],
        );
        assert_eq!(
            (got.status, got.body.as_str()),
            (206, &all[first..=last]),
            "{path}"
        );
    };
    let store = |path: &str, first: usize, last: usize| {
        let before = stored();
        fetch(path, first, last);
        wait_until("the part is stored", || stored() == before + 1);
    };
    store("/a", 0, 29);
    store("/a", 50, 79);
    fetch("/a", 60, 70);
    assert_eq!(origin.count(), 2);
    // Over the gap: the origin is asked, and the gap is closed.
    store("/a", 25, 55);
    fetch("/a", 10, 75);
    fetch("/a", 0, 79);
    assert_eq!(origin.count(), 3, "three parts gave it");
    store("/a", 80, 99);
    let whole = get(proxy.address(), "/a");
    assert_eq!(
        (whole.status, whole.body.as_str()),
        (200, all.as_str()),
        "the parts are the whole"
    );
    assert_eq!(
        (whole.header("content-range"), whole.header("content-length")),
        (None, Some("100"))
    );
    fetch("/a", 3, 96);
    assert_eq!(origin.count(), 4);
    // A weak validator joins nothing, and of a resource that changed only the newest part is there.
    for path in ["/weak", "/changes"] {
        store(path, 0, 49);
        store(path, 50, 99);
        let before = origin.count();
        fetch(path, 50, 99);
        assert_eq!(origin.count(), before, "{path}: the newest part is there");
        store(path, 40, 60);
        assert_eq!(origin.count(), before + 1, "{path}: no bytes of two versions");
    }
}

#[test]
fn parts_of_many_megabytes_join_too() {
    let origin = Origin::start(|seen, _| {
        let (first, last) = match seen.header("range") {
            Some("bytes=0-1999999") => (0, 1_999_999),
            Some("bytes=2000000-2999999") => (2_000_000, 2_999_999),
            other => panic!("not asked for: {other:?}"),
        };
        let body: String = (first..=last)
            .map(|n: u32| char::from(b'a' + (n % 23) as u8))
            .collect();
        let part = format!("Content-Range: bytes {first}-{last}/3000000");
        reply(
            "206 Partial Content",
            &["Cache-Control: max-age=600", "ETag: \"x\"", &part],
            &body,
        )
    });
    let proxy = Proxy::before(origin.address, "");
    for (n, range) in ["0-1999999", "2000000-2999999"].into_iter().enumerate() {
        let got = ask(proxy.address(), "GET", "/a", &[&format!("Range: bytes={range}")]);
        assert_eq!(got.status, 206);
        wait_until("the part is stored", || {
            proxy.status().is_some_and(|status| status["stored"] == n + 1)
        });
    }
    let all: String = (0..3_000_000u32)
        .map(|n| char::from(b'a' + (n % 23) as u8))
        .collect();
    assert!(get(proxy.address(), "/a").body == all);
    let got = ask(proxy.address(), "GET", "/a", &["Range: bytes=1999990-2000009"]);
    assert_eq!(got.body, all[1_999_990..2_000_010]);
}

#[test]
fn large_object_is_stored_beside_its_fields_and_validated_without_its_bytes() {
    let body: String = (0..3_000_000)
        .map(|n| char::from(b'a' + (n % 23) as u8))
        .collect();
    let sent = body.clone();
    let origin = Origin::start(move |seen, _| match seen.header("if-none-match") {
        Some(_) => reply("304 Not Modified", &["ETag: \"x\""], ""),
        None => reply("200 OK", &["Cache-Control: max-age=0", "ETag: \"x\""], &sent),
    });
    let proxy = Proxy::before(origin.address, "");
    assert_eq!(get(proxy.address(), "/large").body, body);
    wait_until("it is stored", || {
        get(proxy.address(), "/large")
            .header("cache-status")
            .is_some_and(|how| how.contains("304"))
    });
    let before = proxy.status().expect("it runs")["store"]["admitted_bytes"]
        .as_u64()
        .expect("a number");
    assert!(get(proxy.address(), "/large").body == body);
    let after = proxy.status().expect("it runs")["store"]["admitted_bytes"]
        .as_u64()
        .expect("a number");
    assert!(
        after - before < 10_000,
        "only the fields were written: {} bytes",
        after - before
    );
    let part = ask(proxy.address(), "GET", "/large", &["Range: bytes=2999990-"]);
    assert_eq!(part.body, body[2_999_990..]);
}

#[test]
fn body_that_breaks_off_is_not_stored() {
    let origin = Origin::start(|_, before| {
        if before == 0 {
            "HTTP/1.1 200 OK\r\nContent-Length: 100\r\nCache-Control: max-age=600\r\n\r\nshort".to_owned()
        } else {
            fresh(before)
        }
    });
    let proxy = Proxy::before(origin.address, "");
    get(proxy.address(), "/a");
    assert_eq!(get(proxy.address(), "/a").body, "answer 1");
}

#[test]
fn old_origin_without_a_length_is_answered_in_the_version_of_the_proxy_and_stored() {
    let origin = Origin::start(|_, before| {
        format!("HTTP/1.0 200 OK\r\nCache-Control: max-age=600\r\n\r\nanswer {before}")
    });
    let proxy = Proxy::before(origin.address, "");
    let first = get(proxy.address(), "/a");
    assert!(
        first.head.starts_with("HTTP/1.1 200") && first.body == "answer 0",
        "{first:?}"
    );
    assert_eq!(get(proxy.address(), "/a").body, "answer 0");
}

#[test]
fn unsafe_request_ends_what_is_stored_of_its_url_and_those_it_names() {
    let origin = Origin::start(|seen, before| match seen.method.as_str() {
        "POST" => reply("303 See Other", &["Location: /b"], ""),
        _ => fresh(before),
    });
    let proxy = Proxy::before(origin.address, "");
    let (a, b, c) = (
        get(proxy.address(), "/a").body,
        get(proxy.address(), "/b").body,
        get(proxy.address(), "/c").body,
    );
    assert_eq!(
        ask(proxy.address(), "POST", "/a", &["Content-Length: 0"]).status,
        303
    );
    assert_ne!(get(proxy.address(), "/a").body, a);
    assert_ne!(get(proxy.address(), "/b").body, b);
    assert_eq!(get(proxy.address(), "/c").body, c);
}

#[test]
fn fields_that_origins_may_reflect_do_not_reach_them() {
    let origin = Origin::start(|seen, _| {
        let host = seen.header("x-forwarded-host").unwrap_or("none").to_owned();
        reply("200 OK", &["Cache-Control: max-age=600"], &host)
    });
    let poison = [
        "X-Forwarded-Host: evil.test",
        "X-Original-URL: /admin",
        "Connection: close, X-Hop",
        "X-Hop: 1",
    ];
    let proxy = Proxy::before(origin.address, "");
    assert_eq!(ask(proxy.address(), "GET", "/a", &poison).body, "none");
    let head = origin.seen()[0].head.to_ascii_lowercase();
    assert!(
        !head.contains("x-original-url") && !head.contains("x-hop"),
        "{head}"
    );
    let keyed = Proxy::before(origin.address, "[cache]\nkey_headers = [\"X-Forwarded-Host\"]\n");
    assert_eq!(
        ask(keyed.address(), "GET", "/a", &["X-Forwarded-Host: one"]).body,
        "one"
    );
    assert_eq!(
        ask(keyed.address(), "GET", "/a", &["X-Forwarded-Host: two"]).body,
        "two"
    );
    assert_eq!(get(keyed.address(), "/a").body, "none");
}

#[test]
fn request_that_came_by_before_ends_the_loop() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address")
        .port();
    let proxy = Proxy::start(&format!(
        "[[listen]]\naddress = \"127.0.0.1:{port}\"\n[[site]]\nhosts = [\"*\"]\norigins = [\"http://127.0.0.1:{port}\"]\n"
    ));
    assert_eq!(get(proxy.address(), "/a").status, 508);
}
