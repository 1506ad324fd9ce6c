//! The protocols of `docs/internals/crash-safety.md` as small models, checked in all their states by machine;
//! and for each step that was wrong once, or that a seeded bug leaves out, the shortest way to the harm.

mod ahead;
mod journal;
mod leases;
mod sessions;

use stateright::{Checker, Model};
use std::collections::HashSet;
use std::hash::Hash;

/// All states are right.
fn holds<M>(model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: std::hash::Hash + std::fmt::Debug + Clone + PartialEq + Send + Sync + 'static,
    M::Action: std::fmt::Debug + Clone + PartialEq + Send + Sync + 'static,
{
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states, no counter-example", checker.unique_state_count());
    assert!(checker.unique_state_count() > 100);
    checker.assert_properties();
}

/// A state, and how it was reached: from which one, by what.
type Reached<M> = (<M as Model>::State, Option<(usize, <M as Model>::Action)>);

/// The shortest counter-example to a property, in words; it must be there.
fn fails<M>(model: M, property: &'static str) -> Vec<String>
where
    M: Model,
    M::State: Hash + Eq + Clone,
    M::Action: std::fmt::Debug + Clone,
{
    let property = model.property(property);
    let mut states: Vec<Reached<M>> = model
        .init_states()
        .into_iter()
        .map(|state| (state, None))
        .collect();
    let mut seen: HashSet<M::State> = states.iter().map(|(state, _)| state.clone()).collect();
    let mut at = 0;
    while at < states.len() {
        let state = states[at].0.clone();
        if !(property.condition)(&model, &state) {
            let mut steps = Vec::new();
            while let Some((before, action)) = states[at].1.clone() {
                steps.push(format!("{action:?}"));
                at = before;
            }
            steps.reverse();
            println!(
                "{} steps to the end of \"{}\": {}",
                steps.len(),
                property.name,
                steps.join(", ")
            );
            return steps;
        }
        for (action, next) in model.next_steps(&state) {
            if seen.insert(next.clone()) {
                states.push((next, Some((at, action))));
            }
        }
        at += 1;
    }
    panic!(
        "no counter-example to \"{}\" in {} states",
        property.name,
        states.len()
    );
}
