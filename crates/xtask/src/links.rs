//! `cargo xtask links`: finds dead links in documents, and paths named in documents and comments that do not
//! exist.
//!
//! Owns the definitions of a link and of a path. Addresses of other hosts are not checked.

use pulldown_cmark::{Event, Options as Markdown, Parser, Tag, TagEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// A document may name paths that do not exist yet between these two comments.
const PLANNED: (&str, &str) = ("<!-- planned paths -->", "<!-- end of planned paths -->");
/// Directories that hold no text of the repository itself.
const SKIPPED: [&str; 2] = ["target", "node_modules"];

/// The tree to check.
#[derive(Debug, PartialEq, Eq)]
pub struct LinkOptions {
    root: PathBuf,
}

impl LinkOptions {
    /// Reads the arguments.
    ///
    /// # Errors
    /// A message that names the wrong argument.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        while let Some(word) = args.next() {
            match &*word {
                "--root" => root = args.next().ok_or("--root needs a directory")?.into(),
                other => return Err(format!("`{other}` is no argument of links")),
            }
        }
        Ok(Self { root })
    }
}

/// Checks all links and paths, and prints their number.
///
/// # Errors
/// The dead links and missing paths, or the file that cannot be read.
pub fn run(options: &LinkOptions) -> Result<(), String> {
    let look = look(&options.root)?;
    println!(
        "{} links and {} paths in {} files",
        look.links, look.paths, look.files
    );
    if look.dead.is_empty() {
        return Ok(());
    }
    Err(format!(
        "\n{}\n\n{} dead links or paths",
        look.dead.join("\n"),
        look.dead.len()
    ))
}

/// The result of one check of a tree.
#[derive(Debug, Default)]
struct Look {
    files: usize,
    links: usize,
    paths: usize,
    dead: Vec<String>,
}

fn look(root: &Path) -> Result<Look, String> {
    let root = root
        .canonicalize()
        .map_err(|e| format!("{}: {e}", root.display()))?;
    let tree = Tree::read(&root)?;
    let mut look = Look::default();
    for file in &tree.files {
        let text =
            || std::fs::read_to_string(root.join(file)).map_err(|e| format!("{}: {e}", file.display()));
        match file.extension().and_then(|end| end.to_str()) {
            Some("md") => look.document(file, &text()?, &tree, &root),
            Some("rs") => look.comments(file, &text()?, &tree),
            _ => continue,
        }
        look.files += 1;
    }
    Ok(look)
}

/// All files and directories, relative to the root.
struct Tree {
    files: BTreeSet<PathBuf>,
    /// Every suffix of every path: `crates/xtask` has `xtask` and itself.
    tails: BTreeSet<String>,
    /// First components that mark a text as a path: entries of the root and of `crates/`.
    tops: BTreeSet<String>,
}

impl Tree {
    fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self {
            files: BTreeSet::new(),
            tails: BTreeSet::new(),
            tops: BTreeSet::new(),
        };
        let mut dirs = vec![root.to_path_buf()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir)
                .map_err(|e| format!("{}: {e}", dir.display()))?
                .flatten()
            {
                let path = entry.path();
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let name = entry.file_name().to_string_lossy().into_owned();
                if is_dir && (SKIPPED.contains(&&*name) || name == ".git") {
                    continue;
                }
                let inside = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
                tree.note(&inside);
                if is_dir {
                    dirs.push(path);
                } else {
                    tree.files.insert(inside);
                }
            }
        }
        Ok(tree)
    }

    fn note(&mut self, inside: &Path) {
        let parts: Vec<String> = inside
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        for start in 0..parts.len() {
            self.tails.insert(parts[start..].join("/"));
        }
        match &*parts {
            [top] => drop(self.tops.insert(top.clone())),
            [crates, name] if crates == "crates" => drop(self.tops.insert(name.clone())),
            _ => {}
        }
    }

    /// Whether `text` is written like a path of this repository.
    fn looks_like_path(&self, text: &str) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./{},*".contains(c);
        let top = text.split('/').next().unwrap_or_default();
        text.chars().all(plain)
            && !text.contains("..")
            && !text.starts_with(['/', '.', '*', '{', '-'])
            && (text.ends_with(".rs")
                || text.ends_with(".md")
                || text.contains('/') && self.tops.contains(top))
    }

    /// Whether `path` is a suffix of an existing path. `{a,b}` stands for both, `*` for anything without a
    /// slash.
    fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        if let Some((before, rest)) = path.split_once('{')
            && let Some((choices, after)) = rest.split_once('}')
        {
            return choices
                .split(',')
                .all(|choice| self.has(&format!("{before}{}{after}", choice.trim())));
        }
        if path.contains('*') {
            return self.tails.iter().any(|tail| matches(path, tail));
        }
        self.tails.contains(path)
    }
}

/// Whether `text` matches `pattern`, in which `*` stands for anything without a slash.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            let end = rest.find('/').unwrap_or(rest.len());
            (0..=end).any(|at| rest.get(at..).is_some_and(|rest| matches(after, rest)))
        }),
    }
}

impl Look {
    fn document(&mut self, file: &Path, text: &str, tree: &Tree, root: &Path) {
        let mut planned = false;
        for (event, range) in Parser::new_ext(text, Markdown::ENABLE_TABLES).into_offset_iter() {
            let line = 1 + text[..range.start].matches('\n').count();
            match event {
                Event::Html(html) | Event::InlineHtml(html) => match html.trim() {
                    start if start == PLANNED.0 => planned = true,
                    end if end == PLANNED.1 => planned = false,
                    _ => {}
                },
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    self.link(file, line, &dest_url, root);
                }
                Event::Code(code) if !planned => self.path(file, line, &code, tree),
                _ => {}
            }
        }
    }

    /// Checks paths in backticks in a source's comments.
    fn comments(&mut self, file: &Path, text: &str, tree: &Tree) {
        for (at, line) in text.lines().enumerate() {
            if let Some(comment) = line.trim_start().strip_prefix("//") {
                for code in comment.split('`').skip(1).step_by(2) {
                    self.path(file, at + 1, code, tree);
                }
            }
        }
    }

    fn path(&mut self, file: &Path, line: usize, code: &str, tree: &Tree) {
        // A line number may follow behind a colon.
        let path = code.split_once(":").map_or(code, |(path, _)| path);
        if tree.looks_like_path(path) && !SKIPPED.iter().any(|skipped| path.starts_with(skipped)) {
            self.paths += 1;
            if !tree.has(path) {
                self.dead
                    .push(format!("{}:{line}: there is no `{path}`", file.display()));
            }
        }
    }

    fn link(&mut self, file: &Path, line: usize, link: &str, root: &Path) {
        if link.contains("://") || link.starts_with("mailto:") {
            return;
        }
        self.links += 1;
        let (path, anchor) = link
            .split_once('#')
            .map_or((link, None), |(path, anchor)| (path, Some(anchor)));
        let target = match path {
            "" => Some(file.to_path_buf()),
            path => inside(file.parent().unwrap_or(Path::new("")), path),
        };
        let place = format!("{}:{line}", file.display());
        match target.filter(|target| root.join(target).exists()) {
            None => self
                .dead
                .push(format!("{place}: link to {link}: there is no such file")),
            Some(target) => {
                let text = std::fs::read_to_string(root.join(&target)).unwrap_or_default();
                if let Some(anchor) = anchor.filter(|anchor| !anchors(&text).contains(*anchor)) {
                    let target = target.display();
                    self.dead.push(format!(
                        "{place}: link to {link}: {target} has no heading #{anchor}"
                    ));
                }
            }
        }
    }
}

/// Returns `path` from the directory `dir`, without dots. `None` if it leaves the repository.
fn inside(dir: &Path, path: &str) -> Option<PathBuf> {
    let mut at = dir.to_path_buf();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => at.push(name),
            Component::ParentDir => at.pop().then_some(())?,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(at)
}

/// Returns the anchors of a document's headings, as code hosts form them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut heading: Option<String> = None;
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for event in Parser::new_ext(text, Markdown::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let name = anchor(&heading.take().unwrap_or_default());
                let before = seen.entry(name.clone()).or_default();
                found.insert(if *before == 0 {
                    name
                } else {
                    format!("{name}-{before}")
                });
                *before += 1;
            }
            _ => {}
        }
    }
    found
}

fn anchor(heading: &str) -> String {
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase)
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{LinkOptions, anchor, look};

    fn dead(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().expect("temporary directory");
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("below the root")).expect("directory");
            std::fs::write(path, text).expect("file");
        }
        look(dir.path()).expect("readable").dead
    }

    #[test]
    fn repository_has_no_dead_link_and_names_no_missing_path() {
        let options = LinkOptions::parse(std::iter::empty()).expect("no arguments");
        let look = look(&options.root).expect("readable");
        assert_eq!(look.dead, Vec::<String>::new());
        assert!(
            look.links > 50 && look.paths > 100,
            "{} links, {} paths",
            look.links,
            look.paths
        );
    }

    #[test]
    fn links_are_dead_when_file_or_heading_is_missing() {
        let page = "# Lock order\n[a](b.md) [b](#lock-order) [c](c.md)\n\n[d](b.md#no) [e](../../x) \
            [f](https://x.example/y)\n";
        let found = dead(&[("docs/a.md", page), ("docs/b.md", "# B\n")]);
        let expected = [
            "docs/a.md:2: link to c.md: there is no such file",
            "docs/a.md:4: link to b.md#no: docs/b.md has no heading #no",
            "docs/a.md:4: link to ../../x: there is no such file",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn paths_in_documents_and_comments_are_dead_when_nothing_is_there() {
        let page = "`media/src/lib.rs` `src/lib.rs:3` `gone.rs` `a/b` `media/src/{lib,gone}.rs` \
            `media/src/l*.rs`\n\n```\n`x.rs`\n```\n";
        let source = "//! See `media/src/lib.rs` and `old/name.rs`.\nconst X: &str = \"`y.rs`\";\n";
        let found = dead(&[("page.md", page), ("crates/media/src/lib.rs", source)]);
        let expected = [
            "crates/media/src/lib.rs:1: there is no `old/name.rs`",
            "page.md:1: there is no `gone.rs`",
            "page.md:1: there is no `media/src/{lib,gone}.rs`",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn paths_that_are_planned_need_not_be_there() {
        let page =
            "<!-- planned paths -->\n\n`crates/raid/`\n\n<!-- end of planned paths -->\n\n`crates/object/`\n";
        assert_eq!(
            dead(&[("page.md", page), ("crates/x", "")]),
            ["page.md:7: there is no `crates/object/`"]
        );
    }

    #[test]
    fn anchor_is_made_as_code_hosts_make_it() {
        assert_eq!(anchor("What `a::b` does, and when"), "what-ab-does-and-when");
    }
}
