//! `cargo xtask structure`: checks that crates and modules keep the order of `structure.toml`, and prints
//! figures of size and naming.
//!
//! Owns the command. An import that runs up or in a circle fails; a figure never does.

mod figures;
mod manifest;
mod order;
mod source;
#[cfg(test)]
mod tests;

use manifest::{Member, Structure};
use source::Crate;
use std::path::PathBuf;

/// The repository to check, and the output.
#[derive(Debug, PartialEq, Eq)]
pub struct StructureOptions {
    root: PathBuf,
    places: bool,
    figures_only: bool,
}

impl StructureOptions {
    /// Reads the arguments.
    ///
    /// # Errors
    /// A message that names the wrong argument.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut options = Self {
            root,
            places: false,
            figures_only: false,
        };
        while let Some(word) = args.next() {
            match &*word {
                "--places" => options.places = true,
                "--figures" => options.figures_only = true,
                "--root" => options.root = args.next().ok_or("--root needs a directory")?.into(),
                other => return Err(format!("`{other}` is no argument of structure")),
            }
        }
        Ok(options)
    }
}

/// The result of one check of a repository.
struct Look {
    breaches: Vec<String>,
    figures: String,
    crates: usize,
    modules: usize,
}

fn look(options: &StructureOptions) -> Result<Look, String> {
    let root = options
        .root
        .canonicalize()
        .map_err(|e| format!("{}: {e}", options.root.display()))?;
    let mut members: Vec<(Member, Crate)> = Vec::new();
    for member in manifest::members(&root)? {
        let source = source::read(&root, &member.dir)?;
        members.push((member, source));
    }
    let breaches = if options.figures_only {
        Vec::new()
    } else {
        order::breaches(&root, &Structure::load(&root)?, &members)
    };
    let named: Vec<(String, &Crate)> = members
        .iter()
        .map(|(member, source)| (member.name.clone(), source))
        .collect();
    Ok(Look {
        breaches,
        figures: figures::text(&root, &named, options.places),
        crates: members.len(),
        modules: members.iter().map(|(_, source)| source.modules.len()).sum(),
    })
}

/// Prints figures and breaches.
///
/// # Errors
/// The order is broken, or a file cannot be read.
pub fn run(options: &StructureOptions) -> Result<(), String> {
    let look = look(options)?;
    print!("{}", look.figures);
    if options.figures_only {
        return Ok(());
    }
    if look.breaches.is_empty() {
        println!(
            "order of {} crates and {} modules: kept",
            look.crates, look.modules
        );
        return Ok(());
    }
    Err(format!(
        "\n{}\n\n{} breaches of {}",
        look.breaches.join("\n\n"),
        look.breaches.len(),
        manifest::FILE
    ))
}
