//! Figures of size and naming: places to look at, not limits.

use super::order::circles;
use super::source::Crate;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 70;
const LINE_CHARS: usize = 110;
const SUBJECT_CHARS: usize = 72;
/// The commit after which subjects are counted.
const SINCE: &str = "6f0725b";

/// Returns the figures as lines of text. `places` lists each item that is counted.
pub fn text(root: &Path, crates: &[(String, &Crate)], places: bool) -> String {
    let mut out = String::new();
    let mut row = |what: &str, figure: String, listed: Vec<String>| {
        let _ = writeln!(out, "{what:<44} {figure}");
        if places {
            for line in listed {
                let _ = writeln!(out, "    {line}");
            }
        }
    };
    let (figure, listed) = circle_figure(crates);
    row("circles of top-level modules", figure, listed);

    let of_kernelfs = crates
        .iter()
        .find(|(name, _)| name == "kernelfs")
        .map(|(_, source)| *source);
    let mut files: Vec<&str> = of_kernelfs
        .into_iter()
        .flat_map(|source| &source.inherent_impls)
        .filter(|found| found.name == "KernelFs")
        .map(|found| found.place.file.as_str())
        .collect();
    files.dedup();
    let fields = of_kernelfs
        .and_then(|source| source.fields.get("KernelFs"))
        .copied()
        .unwrap_or(0);
    row(
        "files with `impl KernelFs`; its fields",
        format!("{}; {fields}", files.len()),
        files.iter().map(ToString::to_string).collect(),
    );

    let files = crates
        .iter()
        .flat_map(|(_, source)| &source.files)
        .map(|(file, lines)| (*lines, file.clone()));
    let (figure, listed) = over(FILE_LINES, files);
    row("files over 600 lines, longest", figure, listed);

    let functions = crates
        .iter()
        .flat_map(|(_, source)| &source.functions)
        .map(|function| (function.lines, format!("{} {}", function.place, function.name)));
    let (figure, listed) = over(FUNCTION_LINES, functions);
    row("functions over 70 lines, longest", figure, listed);

    let (figure, listed) = long_lines(root);
    row("lines over 110 characters (of these, comments)", figure, listed);

    let twice = twice(crates);
    row("type names twice in a crate", twice.len().to_string(), twice);

    let (figure, listed) = long_subjects(root);
    row("commit subjects over 72 characters", figure, listed);
    out
}

fn circle_figure(crates: &[(String, &Crate)]) -> (String, Vec<String>) {
    let all: Vec<(String, Vec<String>)> = crates
        .iter()
        .flat_map(|(name, source)| {
            circles(source)
                .into_iter()
                .map(move |group| (name.clone(), group))
        })
        .collect();
    let short: Vec<String> = all
        .iter()
        .map(|(name, group)| format!("{name}: of {}", group.len()))
        .collect();
    let figure = if short.is_empty() {
        "none".into()
    } else {
        short.join(", ")
    };
    (
        figure,
        all.iter()
            .map(|(name, group)| format!("{name}: {}", group.join(", ")))
            .collect(),
    )
}

/// Returns the number of items over `limit` with the longest, and the list of these items, the longest first.
fn over(limit: usize, all: impl Iterator<Item = (usize, String)>) -> (String, Vec<String>) {
    let mut all: Vec<(usize, String)> = all.collect();
    all.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    let longest = all
        .first()
        .map_or_else(String::new, |(lines, place)| format!("{lines} ({place})"));
    all.retain(|(lines, _)| *lines > limit);
    (
        format!("{}, {longest}", all.len()),
        all.iter()
            .map(|(lines, place)| format!("{lines} {place}"))
            .collect(),
    )
}

/// Counts the long lines of all Rust files of the repository, tests and benches included.
fn long_lines(root: &Path) -> (String, Vec<String>) {
    let (mut lines, mut comments, mut listed) = (0, 0, BTreeMap::<String, usize>::new());
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if name != "target" && !name.to_string_lossy().starts_with('.') {
                    dirs.push(path);
                }
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                for line in text.lines().filter(|line| line.chars().count() > LINE_CHARS) {
                    lines += 1;
                    comments += usize::from(line.trim_start().starts_with("//"));
                    *listed
                        .entry(path.strip_prefix(root).unwrap_or(&path).display().to_string())
                        .or_default() += 1;
                }
            }
        }
    }
    let mut listed: Vec<(usize, String)> = listed.into_iter().map(|(file, lines)| (lines, file)).collect();
    listed.sort_by(|a, b| b.cmp(a));
    (
        format!("{lines} ({comments})"),
        listed
            .into_iter()
            .map(|(lines, file)| format!("{lines} {file}"))
            .collect(),
    )
}

fn twice(crates: &[(String, &Crate)]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, source) in crates {
        let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for item in &source.types {
            places.entry(&item.name).or_default().push(item.place.to_string());
        }
        for (item, places) in places.into_iter().filter(|(_, places)| places.len() > 1) {
            found.push(format!("{name}: {item} ({})", places.join(", ")));
        }
    }
    found
}

fn long_subjects(root: &Path) -> (String, Vec<String>) {
    let range = format!("{SINCE}..HEAD");
    let log = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["log", "--no-merges", "--format=%s", &range])
        .output();
    let Some(log) = log.ok().filter(|log| log.status.success()) else {
        return (format!("unknown: git has no {SINCE} here"), Vec::new());
    };
    let text = String::from_utf8_lossy(&log.stdout);
    let long: Vec<String> = text
        .lines()
        .filter(|line| line.chars().count() > SUBJECT_CHARS)
        .map(Into::into)
        .collect();
    (
        format!("{} of {} since {SINCE}", long.len(), text.lines().count()),
        long,
    )
}
