//! Checks that crates and modules keep the order of `structure.toml`, and tells how to mend breaches.

use super::manifest::{CrateOrder, Exception, FILE, Member, Structure};
use super::source::{Crate, Import, Place, Target};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;

/// Name of the crate's root in an exception.
const ROOT: &str = "crate root";

/// Imports between top-level modules, with the first place of each pair.
pub type Edges = BTreeMap<(String, String), Place>;

/// Returns all breaches of the order, each a message for a person. Empty if the order is kept.
pub fn breaches(root: &Path, structure: &Structure, members: &[(Member, Crate)]) -> Vec<String> {
    let mut found = crate_breaches(root, structure, members);
    let mut used = BTreeSet::new();
    for (member, source) in members {
        if let Some(order) = structure.crates.iter().find(|order| order.name == member.name) {
            found.extend(module_breaches(order, source, &structure.exceptions, &mut used));
        }
    }
    for (at, exception) in structure.exceptions.iter().enumerate() {
        if !used.contains(&at) {
            let Exception { krate, from, to, .. } = exception;
            found.push(format!(
                "{FILE}: the exception of crate {krate}, {from} to {to}, is stale: no import runs up there. \
                Remove it"
            ));
        }
        if exception.reason.trim().is_empty() {
            found.push(format!(
                "{FILE}: exception {} to {}: `reason` is empty",
                exception.from, exception.to
            ));
        }
    }
    found
}

fn crate_breaches(root: &Path, structure: &Structure, members: &[(Member, Crate)]) -> Vec<String> {
    let mut found = Vec::new();
    let height = |name: &str| structure.crates.iter().position(|order| order.name == name);
    for (at, order) in structure.crates.iter().enumerate() {
        let name = &order.name;
        if !members.iter().any(|(member, _)| member.name == *name) {
            found.push(format!(
                "{FILE}: crate \"{name}\" is not there. Remove its [[crate]]"
            ));
        }
        if height(name) != Some(at) {
            found.push(format!("{FILE}: crate \"{name}\" is listed twice"));
        }
        for below in &order.uses {
            if height(below).is_none_or(|below| below >= at) {
                found.push(format!(
                    "{FILE}: crate \"{name}\" uses \"{below}\", which does not stand below it. Crates are \
                    listed from the \
                     ground up: move one of the two, or put what both need into a crate below both"
                ));
            }
        }
    }
    for (member, source) in members {
        let Some(order) = structure.crates.iter().find(|order| order.name == member.name) else {
            found.push(unlisted_crate(root, structure, member, source));
            continue;
        };
        let manifest = member.dir.join("Cargo.toml");
        let manifest = manifest.strip_prefix(root).unwrap_or(&manifest).display();
        for dependency in &member.dependencies {
            if !order.uses.contains(&dependency.name) {
                found.push(format!(
                    "{manifest}:{}: crate \"{}\" depends on \"{}\", which {FILE} does not allow. Do without \
                    it, or add \
                     \"{}\" to `uses` of this crate",
                    dependency.line, member.name, dependency.name, dependency.name
                ));
            }
        }
        for unused in order
            .uses
            .iter()
            .filter(|name| !member.dependencies.iter().any(|d| d.name == **name))
        {
            found.push(format!(
                "{FILE}: crate \"{}\" may use \"{unused}\" and does not. Remove it from `uses`",
                member.name
            ));
        }
    }
    found
}

/// Returns the message for an unlisted crate, with lines ready to be pasted.
fn unlisted_crate(root: &Path, structure: &Structure, member: &Member, source: &Crate) -> String {
    let manifest = member.dir.join("Cargo.toml");
    let manifest = manifest.strip_prefix(root).unwrap_or(&manifest).display();
    let uses: Vec<&String> = member
        .dependencies
        .iter()
        .map(|dependency| &dependency.name)
        .collect();
    let after = structure
        .crates
        .iter()
        .rev()
        .find(|order| uses.contains(&&order.name));
    let place = after.map_or_else(
        || "as the first crate".into(),
        |order| format!("after crate \"{}\"", order.name),
    );
    let modules = ground_up(source);
    format!(
        "{manifest}: crate \"{name}\" is not listed. Add it to {FILE}, {place} and before the crates that \
        use it \
         (modules from the ground up as its imports are today; look at them):\n\n\
         [[crate]]\nname = \"{name}\"\nuses = {uses:?}\nmodules = {modules:?}\n",
        name = member.name
    )
}

fn module_breaches(
    order: &CrateOrder,
    source: &Crate,
    exceptions: &[Exception],
    used: &mut BTreeSet<usize>,
) -> Vec<String> {
    let mut found = Vec::new();
    let name = &order.name;
    let height = |module: &str| order.modules.iter().position(|listed| listed == module);
    for (at, module) in order.modules.iter().enumerate() {
        if !source.modules.iter().any(|(declared, _)| declared == module) {
            found.push(format!(
                "{FILE}: crate \"{name}\" has no module \"{module}\". Remove it from `modules`"
            ));
        } else if height(module) != Some(at) {
            found.push(format!(
                "{FILE}: crate \"{name}\" lists module \"{module}\" twice"
            ));
        }
    }
    for (module, place) in &source.modules {
        if height(module).is_none() {
            let below: Vec<String> = edges(source)
                .into_keys()
                .filter(|(from, _)| from == module)
                .map(|(_, to)| to)
                .collect();
            let after = order.modules.iter().rev().find(|listed| below.contains(listed));
            let after = after.map_or_else(|| "first".into(), |module| format!("after \"{module}\""));
            found.push(format!(
                "{place}: module \"{module}\" is not listed. Add it to `modules` of crate \"{name}\" in \
                {FILE}: {after}, or \
                 higher, below the modules that use it"
            ));
        }
    }
    let mut said = BTreeSet::new();
    for import in &source.imports {
        let (to, above) = match &import.to {
            Target::Module(module) => (module.as_str(), height(module) > height(&import.from)),
            Target::Root(_) => (ROOT, true),
        };
        if !above || height(&import.from).is_none() {
            continue;
        }
        let known = |e: &Exception| e.krate == *name && e.from == import.from && e.to == to;
        if let Some(at) = exceptions.iter().position(known) {
            used.insert(at);
        } else if said.insert((import.from.clone(), import.to.clone())) {
            found.push(upward(source, import));
        }
    }
    found
}

/// Returns the message for an import that runs up, with the circle that it closes if there is one.
fn upward(source: &Crate, import: &Import) -> String {
    let Import { from, to, place } = import;
    let to = match to {
        Target::Root(item) => {
            return format!(
                "{place}: module \"{from}\" uses `{item}` of the crate's root, which stands above all \
                modules. Move `{item}` \
                 into a module below \"{from}\""
            );
        }
        Target::Module(to) => to,
    };
    let advice = format!(
        "Move what both need into a module below both, or give \"{from}\" a trait or a value that \"{to}\" \
        fills in; if \"{to}\" \
         belongs below \"{from}\", change `modules` in {FILE}"
    );
    match way(&edges(source), to, from) {
        None => format!(
            "{place}: an import runs up: module \"{from}\" uses \"{to}\", which stands above it. {advice}"
        ),
        Some(circle) => {
            let steps: Vec<String> = circle
                .iter()
                .map(|(to, place)| format!("\"{to}\" ({place})"))
                .collect();
            format!(
                "{place}: imports run in a circle: \"{from}\" uses \"{to}\", which uses {}. {advice}",
                steps.join(", which uses ")
            )
        }
    }
}

/// Returns the imports between modules, without those of the root's own items.
pub fn edges(source: &Crate) -> Edges {
    let mut edges = Edges::new();
    for import in &source.imports {
        if let Target::Module(to) = &import.to {
            edges
                .entry((import.from.clone(), to.clone()))
                .or_insert_with(|| import.place.clone());
        }
    }
    edges
}

/// Returns the shortest path from `start` to `end` along imports, each module with the place that imports it.
fn way(edges: &Edges, start: &str, end: &str) -> Option<Vec<(String, Place)>> {
    let mut came: BTreeMap<&str, (&str, &Place)> = BTreeMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(at) = next.pop_front() {
        if at == end {
            let mut steps = Vec::new();
            let mut at = end;
            while at != start {
                let (before, place) = came[at];
                steps.push((at.to_owned(), place.clone()));
                at = before;
            }
            steps.reverse();
            return Some(steps);
        }
        for ((from, to), place) in edges {
            if from == at && to != start && !came.contains_key(to.as_str()) {
                came.insert(to, (at, place));
                next.push_back(to);
            }
        }
    }
    None
}

/// Returns the groups of modules that all reach each other by imports.
pub fn circles(source: &Crate) -> Vec<Vec<String>> {
    let edges = edges(source);
    let mut left: BTreeSet<&String> = source.modules.iter().map(|(name, _)| name).collect();
    let mut found = Vec::new();
    while let Some(one) = left.pop_first() {
        let mut group = vec![one.clone()];
        let others: Vec<&String> = left.iter().copied().collect();
        for other in others {
            if way(&edges, one, other).is_some() && way(&edges, other, one).is_some() {
                left.remove(other);
                group.push(other.clone());
            }
        }
        if group.len() > 1 {
            found.push(group);
        }
    }
    found
}

/// Returns the modules, each after those that it imports as far as circles allow.
fn ground_up(source: &Crate) -> Vec<String> {
    fn put(module: &str, edges: &Edges, seen: &mut BTreeSet<String>, order: &mut Vec<String>) {
        if !seen.insert(module.to_owned()) {
            return;
        }
        for (from, to) in edges.keys() {
            if from == module {
                put(to, edges, seen, order);
            }
        }
        order.push(module.to_owned());
    }
    let (edges, mut seen, mut order) = (edges(source), BTreeSet::new(), Vec::new());
    for (module, _) in &source.modules {
        put(module, &edges, &mut seen, &mut order);
    }
    order
}
