//! The structure of a crate as its sources show it: modules, imports between them, functions, types.
//!
//! Owns the reading: `mod` declarations are followed from the crate's root, and test-only code is left out.
//! Knows no order.

use proc_macro2::{Span, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};

/// A place in a file, as compilers print it; the path is relative to the repository.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub file: String,
    pub line: usize,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// The target of an import.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// An item in a top-level module.
    Module(String),
    /// An item that `lib.rs` or `main.rs` defines itself.
    Root(String),
}

/// A use of one top-level module's item in another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    pub from: String,
    pub to: Target,
    pub place: Place,
}

/// A function with a body.
#[derive(Debug, Clone)]
pub struct Function {
    pub name: String,
    pub place: Place,
    /// Lines from that of its signature to that of its closing brace.
    pub lines: usize,
}

/// A type that is visible outside its module.
#[derive(Debug, Clone)]
pub struct TypeName {
    pub name: String,
    pub place: Place,
}

/// The facts about one crate. Test code is left out.
#[derive(Debug, Default)]
pub struct Crate {
    /// Top-level modules, in the order of their declarations.
    pub modules: Vec<(String, Place)>,
    pub imports: Vec<Import>,
    pub functions: Vec<Function>,
    pub types: Vec<TypeName>,
    /// Files and their lengths in lines.
    pub files: Vec<(String, usize)>,
    /// Types with `impl Type { … }`, and the place of each.
    pub inherent_impls: Vec<TypeName>,
    /// Number of fields of each struct.
    pub fields: BTreeMap<String, usize>,
}

/// Reads the crate in `dir` (with `src/lib.rs` or `src/main.rs`) of the repository at `root`.
///
/// # Errors
/// A file that cannot be read or parsed, named in the message.
pub fn read(root: &Path, dir: &Path) -> Result<Crate, String> {
    let src = dir.join("src");
    let top = ["lib.rs", "main.rs"]
        .map(|name| src.join(name))
        .into_iter()
        .find(|path| path.exists());
    let top = top.ok_or_else(|| format!("{}: neither lib.rs nor main.rs is there", src.display()))?;
    let mut reader = Reader {
        root,
        found: Crate::default(),
        raw: Vec::new(),
        exports: BTreeMap::new(),
        own: BTreeSet::new(),
        file: PathBuf::new(),
        children: src,
        module: Vec::new(),
        failed: None,
    };
    reader.read_file(&top)?;
    if let Some(why) = reader.failed.take() {
        return Err(why);
    }
    reader.resolve();
    Ok(reader.found)
}

/// A path that begins at the crate's root, not yet attributed to a module.
struct RawPath {
    from: String,
    first: String,
    place: Place,
}

struct Reader<'a> {
    root: &'a Path,
    found: Crate,
    raw: Vec<RawPath>,
    /// Names that the root re-exports, and the top-level module of each.
    exports: BTreeMap<String, String>,
    /// Names that the root defines itself.
    own: BTreeSet<String>,
    file: PathBuf,
    /// Directory of the files of modules that are declared at this point.
    children: PathBuf,
    /// Path of the present module from the root.
    module: Vec<String>,
    failed: Option<String>,
}

impl Reader<'_> {
    fn read_file(&mut self, path: &Path) -> Result<(), String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let parsed = syn::parse_file(&text)
            .map_err(|e| format!("{}:{}: {e}", path.display(), e.span().start().line))?;
        let before = std::mem::replace(&mut self.file, path.to_path_buf());
        let name = self.relative();
        self.found.files.push((name, text.lines().count()));
        for item in &parsed.items {
            self.visit_item(item);
        }
        self.file = before;
        Ok(())
    }

    fn relative(&self) -> String {
        let path = self.file.strip_prefix(self.root).unwrap_or(&self.file);
        path.display().to_string()
    }

    fn place(&self, span: Span) -> Place {
        Place {
            file: self.relative(),
            line: span.start().line,
        }
    }

    /// Reads a module, in this file or in its own.
    fn read_module(&mut self, module: &syn::ItemMod) -> Result<(), String> {
        let name = module.ident.to_string();
        if self.module.is_empty() {
            let place = self.place(module.ident.span());
            self.found.modules.push((name.clone(), place));
        }
        let children = self.children.join(&name);
        let before = std::mem::replace(&mut self.children, children.clone());
        self.module.push(name.clone());
        let done = match &module.content {
            Some((_, items)) => {
                items.iter().for_each(|item| self.visit_item(item));
                Ok(())
            }
            None => {
                let beside = before.join(format!("{name}.rs"));
                let inside = children.join("mod.rs");
                let path = match path_attribute(&module.attrs) {
                    Some(path) => self.file.parent().unwrap_or(Path::new("")).join(path),
                    None if beside.exists() => beside,
                    None => inside,
                };
                self.read_file(&path)
            }
        };
        self.module.pop();
        self.children = before;
        done
    }

    /// Returns the first name below the root of a path that begins with `crate`, `self` or `super`s.
    fn below_root(&self, names: &[String]) -> Option<String> {
        let mut at = match names.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => self.module.clone(),
            _ => return None,
        };
        let mut rest = names
            .iter()
            .skip_while(|name| matches!(&***name, "crate" | "self"));
        let mut next = rest.next();
        while next.is_some_and(|name| name == "super") {
            at.pop()?;
            next = rest.next();
        }
        at.into_iter().next().or_else(|| next.cloned())
    }

    fn note(&mut self, names: &[String], span: Span) {
        let (Some(from), Some(first)) = (self.module.first(), self.below_root(names)) else {
            return;
        };
        if *from != first {
            let (from, place) = (from.clone(), self.place(span));
            self.raw.push(RawPath { from, first, place });
        }
    }

    /// Records the paths of a `use`, and the root's re-exports.
    fn note_use(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |ident: &syn::Ident| [before, &[ident.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.note_use(&path.tree, &with(&path.ident)),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.note_use(tree, before)),
            syn::UseTree::Name(name) => self.note_leaf(&with(&name.ident), &name.ident, name.ident.span()),
            syn::UseTree::Rename(name) => self.note_leaf(&with(&name.ident), &name.rename, name.ident.span()),
            syn::UseTree::Glob(glob) => {
                self.note(&[before, &["*".into()]].concat(), glob.star_token.spans[0])
            }
        }
    }

    fn note_leaf(&mut self, names: &[String], called: &syn::Ident, span: Span) {
        if self.module.is_empty() {
            let mut names = names
                .iter()
                .skip_while(|name| matches!(&***name, "crate" | "self"));
            if let Some(first) = names.next() {
                self.exports.insert(called.to_string(), first.clone());
            }
        } else {
            self.note(names, span);
        }
    }

    /// Records paths in the tokens of a macro call: `crate::name` and `super::name`.
    fn note_tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.note_tokens(group.stream()),
                TokenTree::Ident(first) if *first == "crate" || *first == "super" => {
                    let names = path_in_tokens(&tokens[at..]);
                    self.note(&names, first.span());
                    // Each further name takes two colons and itself.
                    at += (names.len() - 1) * 3;
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Attributes the recorded paths to modules, after all modules and re-exports are known.
    fn resolve(&mut self) {
        let modules: BTreeSet<&String> = self.found.modules.iter().map(|(name, _)| name).collect();
        for path in std::mem::take(&mut self.raw) {
            let to = if modules.contains(&path.first) {
                Target::Module(path.first)
            } else if let Some(module) = self
                .exports
                .get(&path.first)
                .filter(|name| modules.contains(name))
            {
                Target::Module(module.clone())
            } else if self.own.contains(&path.first) || path.first == "*" {
                Target::Root(path.first)
            } else {
                // A name of another crate.
                continue;
            };
            if to != Target::Module(path.from.clone()) {
                self.found.imports.push(Import {
                    from: path.from,
                    to,
                    place: path.place,
                });
            }
        }
    }

    fn note_function(&mut self, name: &syn::Ident, signature: Span, block: &syn::Block) {
        let (start, end) = (signature.start().line, block.brace_token.span.close().end().line);
        let place = self.place(signature);
        self.found.functions.push(Function {
            name: name.to_string(),
            place,
            lines: end - start + 1,
        });
    }

    fn note_type(&mut self, name: &syn::Ident, visible: &syn::Visibility) {
        let wide = match visible {
            syn::Visibility::Public(_) => true,
            syn::Visibility::Restricted(to) => to.path.is_ident("crate"),
            _ => false,
        };
        if wide {
            let place = self.place(name.span());
            self.found.types.push(TypeName {
                name: name.to_string(),
                place,
            });
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if only_for_tests(item_attributes(item)) {
            return;
        }
        if self.module.is_empty()
            && let Some(name) = item_name(item)
        {
            self.own.insert(name);
        }
        match item {
            syn::Item::Mod(module) => {
                if let Err(why) = self.read_module(module) {
                    self.failed.get_or_insert(why);
                }
            }
            syn::Item::Use(import) => self.note_use(&import.tree, &[]),
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.note_function(&item.sig.ident, item.sig.fn_token.span, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.note_type(&item.ident, &item.vis);
        self.found
            .fields
            .insert(item.ident.to_string(), item.fields.len());
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.note_type(&item.ident, &item.vis);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.note_type(&item.ident, &item.vis);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.note_type(&item.ident, &item.vis);
        visit::visit_item_type(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if item.trait_.is_none()
            && let syn::Type::Path(path) = &*item.self_ty
            && let Some(last) = path.path.segments.last()
        {
            let place = self.place(last.ident.span());
            self.found.inherent_impls.push(TypeName {
                name: last.ident.to_string(),
                place,
            });
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        if let syn::ImplItem::Fn(function) = item {
            if only_for_tests(&function.attrs) {
                return;
            }
            self.note_function(&function.sig.ident, function.sig.fn_token.span, &function.block);
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        if let syn::TraitItem::Fn(function) = item
            && let Some(block) = &function.default
        {
            self.note_function(&function.sig.ident, function.sig.fn_token.span, block);
        }
        visit::visit_trait_item(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !only_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !only_for_tests(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string())
            .collect();
        if let (None, Some(first)) = (&path.leading_colon, path.segments.first()) {
            self.note(&names, first.ident.span());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.note_tokens(call.tokens.clone());
    }

    // `pub(in crate::a)` and attributes import nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}

/// Returns the names of the path that `tokens` begin with.
fn path_in_tokens(tokens: &[TokenTree]) -> Vec<String> {
    let is_colon =
        |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == ':');
    let mut names = Vec::new();
    let mut at = 0;
    while let Some(TokenTree::Ident(name)) = tokens.get(at) {
        names.push(name.to_string());
        if !is_colon(tokens.get(at + 1)) || !is_colon(tokens.get(at + 2)) {
            break;
        }
        at += 3;
    }
    names
}

/// Whether these attributes limit an item to test builds.
fn only_for_tests(attributes: &[syn::Attribute]) -> bool {
    fn needs_test(meta: &syn::Meta) -> bool {
        let inner = |list: &syn::MetaList| {
            list.parse_args_with(Punctuated::<syn::Meta, syn::Token![,]>::parse_terminated)
                .map(|metas| metas.into_iter().collect::<Vec<_>>())
                .unwrap_or_default()
        };
        match meta {
            syn::Meta::Path(path) => path.is_ident("test"),
            syn::Meta::List(list) if list.path.is_ident("all") => inner(list).iter().any(needs_test),
            syn::Meta::List(list) if list.path.is_ident("any") => inner(list).iter().all(needs_test),
            _ => false,
        }
    }
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute
                    .parse_args::<syn::Meta>()
                    .is_ok_and(|meta| needs_test(&meta))
    })
}

/// Returns the file that `#[path = "…"]` names.
fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit {
                lit: syn::Lit::Str(path),
                ..
            }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    })
}

fn item_attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::ExternCrate(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::ForeignMod(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::TraitAlias(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the name of an item that can be named by way of the crate's root.
fn item_name(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}
