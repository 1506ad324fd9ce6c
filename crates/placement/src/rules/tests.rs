#![allow(clippy::unwrap_used)]
use super::*;

#[derive(Deserialize)]
struct Written {
    #[serde(default)]
    rule: Vec<RuleSpec>,
}

fn rules(text: &str) -> Rules {
    Rules::new(toml::from_str::<Written>(text).unwrap().rule).unwrap()
}

fn error(text: &str) -> RuleError {
    Rules::new(toml::from_str::<Written>(text).unwrap().rule).unwrap_err()
}

fn file(path: &str, size_bytes: u64, days: u64) -> File<'_> {
    File {
        path,
        size_bytes,
        age: Duration::from_secs(days * 86_400),
    }
}

const LOGS: &str = r#"
[[rule]]
match = ["*.log", "/var/spool/**"]
older_than = "7d"
larger_than = "1MiB"
tier = "hdd"

[[rule]]
match = "/db/**"
tier = "ssd"

[[rule]]
match = "**"
smaller_than = "16KiB"
tier = "nvm"
"#;

#[test]
fn first_rule_that_matches_wins_and_the_others_say_why_not() {
    let rules = rules(LOGS);
    let old = rules.explain(&file("/a/b/x.log", 2 << 20, 8));
    assert_eq!((old.to, old.rule), (PinTo::Tier(Tier::Hdd), Some(1)));
    let young = rules.explain(&file("/db/x.log", 2 << 20, 1));
    assert_eq!(young.to, PinTo::Tier(Tier::Ssd));
    let miss = Miss::Young {
        older_than_s: 7 * 86_400,
    };
    assert_eq!(young.passed, [(1, miss)]);
    let none = rules.explain(&file("/home/film", 2 << 30, 1));
    assert_eq!((none.to, none.rule), (PinTo::Policy, None));
    assert_eq!(none.passed.len(), 3);
    assert_eq!(none.passed[2].1, Miss::Large { smaller_than: 16384 });
}

#[test]
fn star_stays_within_a_directory_and_two_cross_them() {
    let rules =
        rules("[[rule]]\nmatch = '/a/*.x'\nexclude = true\n[[rule]]\nmatch = '/b/**/c'\nexclude = true");
    for (path, matches) in [
        ("/a/1.x", true),
        ("/a/d/1.x", false),
        ("/b/1/2/c", true),
        ("/b/c", true),
        ("/c", false),
    ] {
        let to = rules.explain(&file(path, 0, 0)).to;
        assert_eq!(to == PinTo::Stay, matches, "{path}");
    }
}

#[test]
fn wrong_rules_are_refused_with_their_number_and_what_to_do() {
    let good = "[[rule]]\nmatch = 'a'\nexclude = true\n[[rule]]\n";
    for (text, part) in [
        ("match = 'a'", "rule 2: give one of tier and exclude"),
        ("match = 'a'\ntier = 'ssd'\nexclude = true", "rule 2: give one of"),
        ("match = []\nexclude = true", "rule 2: match is empty"),
        ("match = ''\nexclude = true", "rule 2: match is empty"),
        (
            "match = 'd/*.log'\nexclude = true",
            "rule 2: \"d/*.log\" can match no path",
        ),
        (
            "match = '/d/'\nexclude = true",
            "rule 2: \"/d/\" can match no file",
        ),
        ("match = 'a['\nexclude = true", "rule 2: \"a[\" is no pattern"),
        (
            "match = 'a'\nexclude = true\nolder_than = '2d'\nyounger_than = '1d'",
            "rule 2: no file can match",
        ),
    ] {
        let said = error(&format!("{good}{text}")).to_string();
        assert!(said.contains(part), "{said}");
    }
    for text in [
        "match = 'a'\ntier = 'tape'",
        "match = 'a'\nexclude = true\nolder_than = '7 moons'",
        "match = 'a'\nx = 1",
    ] {
        assert!(
            toml::from_str::<Written>(&format!("[[rule]]\n{text}")).is_err(),
            "{text}"
        );
    }
}

#[test]
fn units_are_read_and_what_passes_the_largest_number_is_refused() {
    let text = |size| format!("[[rule]]\nmatch = '**'\nexclude = true\nlarger_than = {size}");
    for (size, bytes) in [
        ("'64KiB'", 65536),
        ("'3 GiB'", 3 << 30),
        ("100", 100),
        ("'12'", 0),
    ] {
        let read = toml::from_str::<Written>(&text(size));
        match bytes {
            0 => assert!(read.is_err(), "a number in quotes needs a unit"),
            _ => {
                let rules = Rules::new(read.unwrap().rule).unwrap();
                assert_eq!(rules.explain(&file("/a", bytes, 0)).to, PinTo::Policy);
                assert_eq!(rules.explain(&file("/a", bytes + 1, 0)).to, PinTo::Stay);
            }
        }
    }
    assert!(toml::from_str::<Written>(&text("'99999999999TiB'")).is_err());
}
