//! Policies on the same simulated devices and loads, all sides in one run, as Markdown tables:
//! `cargo bench -p varve-placement [-- [--quick] [measured|wardrop|balance|writes …]]`.

mod balance;
mod seeds;
mod side;
mod writes;

/// A part of the bench, and its name on the command line.
type Part = (&'static str, fn(bool));

fn main() {
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let quick = words.iter().any(|word| word == "--quick");
    let parts: [Part; 4] = [
        ("measured", seeds::measured),
        ("wardrop", seeds::wardrop),
        ("balance", balance::all),
        ("writes", writes::all),
    ];
    let chosen = |name: &str| words.iter().any(|word| word == name);
    let any = parts.iter().any(|(name, _)| chosen(name));
    for (name, part) in parts {
        if !any || chosen(name) {
            part(quick);
        }
    }
}
