#![allow(clippy::unwrap_used)]
use super::{Decision, Holds, Limits, Refusal, Table, Ticket};
use proptest::prelude::{Strategy, any, prop, prop_oneof, proptest};
use std::collections::HashMap;
use varve_format::{InodeKey, LeaseNo, SessionId};
use varve_ipc::{LeaseMode, Want};

const LIMITS: Limits = Limits {
    min_hold_ms: 2,
    lease_ms: 2000,
};
const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);

fn table() -> Table {
    Table::new(LIMITS, LeaseNo(1))
}

fn key(n: u64) -> InodeKey {
    InodeKey::new(n, 1)
}

fn want(n: u64, mode: LeaseMode) -> Want {
    Want { key: key(n), mode }
}

fn write(n: u64) -> Want {
    want(n, LeaseMode::Write)
}

fn read(n: u64) -> Want {
    want(n, LeaseMode::Read)
}

/// Requests and confirms leases; they must be granted at once.
fn grant(table: &mut Table, session: SessionId, wants: &[Want], now: u64) -> Decision {
    let ticket = table.request(session, wants, now).unwrap();
    let decisions = table.decide(now);
    let decision = decisions
        .into_iter()
        .find(|decision| decision.ticket == ticket)
        .unwrap();
    table.confirm(session, &decision.leases, now);
    decision
}

fn give_back(table: &mut Table, session: SessionId, n: u64, now: u64) {
    let (lease, _) = table.lease(session, key(n)).unwrap();
    table.begin_release(session, key(n), lease).unwrap();
    table.finish_release(session, key(n), lease, false, now);
}

#[test]
fn read_leases_are_shared_and_a_writer_waits_for_all_of_them() {
    let mut table = table();
    grant(&mut table, A, &[read(5)], 0);
    grant(&mut table, B, &[read(5)], 0);
    let ticket = table.request(SessionId(3), &[write(5)], 0).unwrap();
    assert!(table.decide(0).is_empty());
    assert!(table.revocations(1).is_empty(), "minimum hold");
    assert_eq!(table.revocations(2).len(), 2);
    assert!(table.revocations(3).is_empty(), "asked once");
    give_back(&mut table, A, 5, 3);
    assert!(table.decide(3).is_empty());
    give_back(&mut table, B, 5, 4);
    let decisions = table.decide(4);
    assert_eq!((decisions.len(), decisions[0].ticket), (1, ticket));
    table.check();
}

#[test]
fn read_lease_is_there_again_when_what_replaced_it_is_undone() {
    let mut table = table();
    let read_lease = grant(&mut table, A, &[read(5)], 0).leases[0].lease;
    table.note_mapped(A, key(5));
    let ticket = table.request(A, &[write(5), write(6)], 1).unwrap();
    let decision = table.decide(1).remove(0);
    assert_eq!(
        (decision.ticket, decision.leases[0].replaces),
        (ticket, Some(read_lease))
    );
    table.undo(A, &decision.leases, 2);
    table.check();
    assert_eq!(table.lease(A, key(5)), Some((read_lease, LeaseMode::Read)));
    assert_eq!(table.mappers(key(5)).collect::<Vec<_>>(), [A]);
    assert_eq!(table.lease(A, key(6)), None);
    // A session that has ended gets nothing back.
    table.request(A, &[write(5)], 3).unwrap();
    let decision = table.decide(3).remove(0);
    table.drop_session(A);
    table.undo(A, &decision.leases, 4);
    assert_eq!(table.lease(A, key(5)), None);
    table.check();
}

#[test]
fn reader_does_not_overtake_a_waiting_writer() {
    let mut table = table();
    grant(&mut table, A, &[read(5)], 0);
    table.request(B, &[write(5)], 0).unwrap();
    table.request(SessionId(3), &[read(5)], 0).unwrap();
    assert!(table.decide(0).is_empty());
    assert_eq!(table.revocations(10)[0].keep, None);
    give_back(&mut table, A, 5, 10);
    let decisions = table.decide(10);
    assert_eq!((decisions.len(), decisions[0].session), (1, B));
}

#[test]
fn waiting_request_pins_nothing_so_crossed_requests_both_end() {
    let mut table = table();
    grant(&mut table, A, &[write(1)], 0);
    grant(&mut table, B, &[write(2)], 0);
    // Each session wants both leases: its own lease is asked back while it waits.
    table.request(A, &[write(1), write(2)], 5).unwrap();
    table.request(B, &[write(2), write(1)], 5).unwrap();
    assert!(table.decide(5).is_empty());
    let asked: Vec<_> = table.revocations(5).iter().map(|r| (r.session, r.key)).collect();
    assert_eq!(asked, [(A, key(1)), (B, key(2))]);
    give_back(&mut table, A, 1, 5);
    give_back(&mut table, B, 2, 5);
    let decisions = table.decide(5);
    assert_eq!((decisions.len(), decisions[0].session), (1, A), "first come");
    table.confirm(A, &decisions[0].leases, 5);
    assert_eq!(table.revocations(7).len(), 2);
    give_back(&mut table, A, 1, 8);
    assert!(table.decide(8).is_empty(), "all or nothing");
    give_back(&mut table, A, 2, 8);
    assert_eq!(table.decide(8)[0].session, B);
}

#[test]
fn two_readers_that_both_upgrade_are_served_in_order() {
    let mut table = table();
    grant(&mut table, A, &[read(1)], 0);
    grant(&mut table, B, &[read(1)], 0);
    table.request(A, &[write(1)], 5).unwrap();
    table.request(B, &[write(1)], 5).unwrap();
    assert_eq!(table.revocations(5).len(), 2);
    give_back(&mut table, A, 1, 6);
    assert!(table.decide(6).is_empty());
    give_back(&mut table, B, 1, 6);
    assert_eq!(table.decide(6)[0].session, A);
    table.check();
}

#[test]
fn upgrade_is_granted_at_once_when_nobody_else_reads() {
    let mut table = table();
    let first = grant(&mut table, A, &[read(1)], 0);
    let second = grant(&mut table, A, &[write(1)], 0);
    assert_eq!(second.leases[0].replaces, Some(first.leases[0].lease));
    assert_eq!(table.count(A), 1);
    let third = grant(&mut table, A, &[read(1)], 0);
    assert_eq!(
        (third.leases[0].fresh, third.leases[0].mode),
        (false, LeaseMode::Write)
    );
}

#[test]
fn lease_being_asked_back_is_not_confirmed_again() {
    let mut table = table();
    grant(&mut table, A, &[write(1)], 0);
    table.request(B, &[read(1)], 5).unwrap();
    assert_eq!(table.revocations(5)[0].keep, Some(LeaseMode::Read));
    table.request(A, &[read(1)], 5).unwrap();
    assert!(table.decide(5).is_empty());
    let (lease, _) = table.lease(A, key(1)).unwrap();
    assert_eq!(table.begin_release(A, key(1), lease), Some(LeaseMode::Write));
    assert!(
        table.finish_release(A, key(1), lease, true, 6),
        "a read lease stays"
    );
    assert_eq!(table.decide(6).len(), 2);
    table.check();
}

#[test]
fn stale_release_is_ignored_when_the_number_is_another() {
    let mut table = table();
    let decision = grant(&mut table, A, &[write(1)], 0);
    let lease = decision.leases[0].lease;
    assert_eq!(table.begin_release(A, key(1), LeaseNo(lease.0 + 1)), None);
    assert_eq!(table.begin_release(B, key(1), lease), None);
    assert_eq!(table.begin_release(A, key(2), lease), None);
    assert!(table.begin_release(A, key(1), lease).is_some());
    assert_eq!(table.begin_release(A, key(1), lease), None, "once");
}

#[test]
fn session_expires_when_it_keeps_a_lease_too_long() {
    let mut table = table();
    grant(&mut table, A, &[write(1)], 0);
    table.request(B, &[write(1)], 10).unwrap();
    assert_eq!(table.revocations(10).len(), 1);
    assert_eq!(table.revocations(510).len(), 1, "asked again");
    assert!(table.expired(2009).is_empty());
    assert_eq!(table.expired(2010), [A]);
    table.drop_session(A);
    assert!(table.expired(2010).is_empty());
    assert_eq!(table.decide(2010)[0].session, B);
}

#[test]
fn session_is_not_late_for_the_time_that_the_daemon_takes_but_cannot_gain_more_than_that() {
    let mut table = table();
    grant(&mut table, A, &[write(1), write(2)], 0);
    table.request(B, &[write(1)], 10).unwrap();
    assert_eq!(table.revocations(10).len(), 1);
    table.begin_work(A, 100);
    table.begin_work(A, 200);
    table.end_work(A, 1000);
    assert!(table.expired(2500).is_empty(), "the daemon is at work since 100");
    table.end_work(A, 3100);
    assert!(table.expired(5009).is_empty());
    assert_eq!(table.expired(5010), [A], "two of its own seconds");
    table.begin_work(A, 5000);
    assert!(table.expired(13_000).is_empty());
    assert_eq!(table.expired(14_010), [A], "not for ever");
    table.drop_session(A);
    table.end_work(A, 14_020);
    assert!(table.work.is_empty());
}

#[test]
fn contended_inode_is_refused_for_writing_until_it_is_quiet() {
    let mut table = table();
    let mut now = 0;
    let mut last = A;
    loop {
        let session = if last == A { B } else { A };
        match table.request(session, &[write(1)], now) {
            Err(refusal) => {
                assert_eq!(refusal, Refusal::Contended);
                break;
            }
            Ok(ticket) => {
                let decision = table.decide(now).pop().unwrap();
                assert_eq!(decision.ticket, ticket);
                table.confirm(session, &decision.leases, now);
                give_back(&mut table, session, 1, now);
            }
        }
        last = session;
        now += 5;
        assert!(now < 100);
    }
    assert!(table.request(A, &[read(1)], now).is_ok());
    table.drop_session(A);
    let internal = table.internal_session();
    assert!(table.request(internal, &[write(1)], now).is_ok());
    assert!(table.request(A, &[write(1)], now + 150).is_err());
    assert!(table.request(A, &[write(1)], now + 300).is_ok());
}

/// A and B take key 1 from each other, with `changes` changes each time, until it is contended or `until_ms`.
/// Returns the time of the contention.
fn take_turns(table: &mut Table, mut now: u64, until_ms: u64, changes: u64) -> Option<u64> {
    let mut session = A;
    while now < until_ms {
        if table.request(session, &[write(1)], now) == Err(Refusal::Contended) {
            assert!(table.is_contended(key(1), now));
            return Some(now);
        }
        let decision = table.decide(now).pop().unwrap();
        table.confirm(session, &decision.leases, now);
        assert!(table.is_written(key(1)));
        table.note_changes(key(1), session, changes);
        give_back(table, session, 1, now);
        session = if session == A { B } else { A };
        now += 5;
    }
    None
}

#[test]
fn lease_that_is_worth_its_way_goes_on_from_hand_to_hand() {
    let mut table = table();
    assert_eq!(take_turns(&mut table, 0, 5000, 100), None);
    assert!(take_turns(&mut table, 5000, 6000, 3).is_some());
}

#[test]
fn leases_are_tried_again_now_and_then_while_sessions_take_turns() {
    let mut table = table();
    // Sessions take turns during forwarding, too.
    let forwarded = |table: &mut Table, mut now: u64| {
        let mut session = A;
        while table.is_contended(key(1), now) {
            table.note_forwarded(key(1), session, now);
            session = if session == A { B } else { A };
            now += 1;
        }
        // A late forwarded operation does not end the trial; hand-overs without work do.
        table.note_forwarded(key(1), session, now);
        assert!(!table.is_contended(key(1), now));
        now
    };
    let (mut now, mut phases) = (0, Vec::new());
    for _ in 0..8 {
        let first = take_turns(&mut table, now, now + 1000, 3).unwrap();
        assert!(first < now + 30);
        now = forwarded(&mut table, first);
        phases.push(now - first);
    }
    assert!(phases[0] <= 110 && phases.is_sorted(), "{phases:?}");
    assert!((3100..3400).contains(&phases[7]), "{phases:?}");
    // Once leases have paid, the next trial comes soon again.
    assert_eq!(take_turns(&mut table, now, now + 1000, 100), None);
    let first = take_turns(&mut table, now + 1000, now + 2000, 3).unwrap();
    let again = forwarded(&mut table, first);
    assert!(again < first + 110);
    let again = take_turns(&mut table, again, again + 1000, 3).unwrap();
    // A session that is alone does not wait for a trial.
    table.note_forwarded(key(1), A, again);
    table.note_forwarded(key(1), A, again + 150);
    assert!(table.is_contended(key(1), again + 150));
    assert!(!table.is_contended(key(1), again + 200));
}

/// A request that waits while a lease changes hands does not know the time of the recall: it is woken when
/// that is known.
#[test]
fn who_waits_hears_when_a_lease_has_come_into_other_hands() {
    let mut table = table();
    table.request(A, &[write(1)], 0).unwrap();
    let decision = table.decide(0).remove(0);
    let waiter = table.request(B, &[write(1), write(2)], 1).unwrap();
    assert!(table.decide(1).is_empty() && table.with_news().is_empty());
    assert_eq!(table.next_event_ms(1), None, "it is not durable yet");
    table.confirm(A, &decision.leases, 3);
    assert_eq!(table.with_news(), [waiter]);
    assert!(table.with_news().is_empty(), "once");
    let due = 3 + LIMITS.min_hold_ms;
    assert_eq!(table.next_event_ms(3), Some(due));
    assert_eq!(table.revocations(due).len(), 1);
    table.check();
}

/// A session that only polls (a lock file that exists) keeps no other waiting, and gets the usual hold time
/// again when it changes something.
#[test]
fn who_changed_nothing_under_its_last_lease_is_asked_for_the_next_at_once() {
    let mut table = table();
    let mut now = 0;
    for (session, changes, held_ms) in [
        (A, 100, LIMITS.min_hold_ms),
        (B, 0, LIMITS.min_hold_ms),
        (A, 100, LIMITS.min_hold_ms),
        (B, 0, 0),
        (A, 100, LIMITS.min_hold_ms),
        (B, 7, 0),
        (A, 100, LIMITS.min_hold_ms),
        (B, 0, LIMITS.min_hold_ms),
    ] {
        grant(&mut table, session, &[write(1)], now);
        let other = if session == A { B } else { A };
        let ticket = table.request(other, &[write(1)], now).unwrap();
        let early = table.revocations(now + held_ms.saturating_sub(1));
        assert_eq!(early.is_empty(), held_ms > 0);
        let due = table.revocations(now + held_ms);
        assert_eq!(early.len() + due.len(), 1);
        table.cancel(ticket);
        now += held_ms + 50;
        table.note_changes(key(1), session, changes);
        give_back(&mut table, session, 1, now);
    }
    table.check();
}

#[test]
fn read_lease_on_a_contended_inode_is_asked_back_at_once() {
    let mut table = table();
    let now = take_turns(&mut table, 0, 1000, 0).unwrap();
    grant(&mut table, A, &[read(1), read(2)], now);
    assert!(!table.is_written(key(1)));
    let internal = table.internal_session();
    table.request(internal, &[write(1), write(2)], now).unwrap();
    assert!(table.decide(now).is_empty());
    let asked: Vec<_> = table.revocations(now).iter().map(|r| r.key).collect();
    assert_eq!(asked, [key(1)], "the other has its minimum hold");
    assert_eq!(table.next_event_ms(now), Some(now + LIMITS.min_hold_ms));
    give_back(&mut table, A, 1, now);
    assert_eq!(table.revocations(now + LIMITS.min_hold_ms).len(), 1);
    give_back(&mut table, A, 2, now + 2);
    assert_eq!(table.decide(now + 2).len(), 1);
    assert!(!table.is_written(key(1)), "the daemon itself is no client");
    table.check();
}

#[test]
fn oldest_write_leases_are_asked_back_when_rows_run_out() {
    let mut table = table();
    for n in 1..=10 {
        grant(&mut table, A, &[write(n)], n);
    }
    grant(&mut table, B, &[read(20)], 20);
    let asked = table.revoke_oldest(3, 30);
    assert_eq!(
        asked.iter().map(|r| r.key).collect::<Vec<_>>(),
        [key(1), key(2), key(3)]
    );
    assert_eq!(
        table.revoke_excess(A, 5, 30).len(),
        2,
        "three of the five oldest are asked already"
    );
    table.check();
}

#[test]
fn malformed_requests_are_refused() {
    let mut table = table();
    assert_eq!(table.request(A, &[], 0), Err(Refusal::Malformed));
    assert_eq!(table.request(A, &[read(1), write(1)], 0), Err(Refusal::Malformed));
    table.check();
}

#[test]
fn holds_name_the_inodes_that_nobody_keeps_when_a_session_ends() {
    let mut holds = Holds::default();
    holds.add(A, key(1));
    holds.add(A, key(1));
    holds.add(A, key(2));
    holds.add(B, key(2));
    assert!(holds.held(key(2), &[A]) && !holds.held(key(1), &[A]));
    holds.copy(A, SessionId(3), &[key(1), key(9)]);
    assert_eq!(holds.drop_session(A), []);
    assert!(holds.remove(SessionId(3), key(1)));
    assert!(!holds.remove(SessionId(3), key(1)));
    assert_eq!(holds.drop_session(B), [key(2)]);
}

#[derive(Debug, Clone)]
enum Step {
    Request { session: u64, wants: Vec<(u64, bool)> },
    Release { session: u64, n: u64, downgrade: bool },
    BatchPrefetch { session: u64, n: u64, exclusive: bool },
    Time(u64),
    Drop(u64),
    Cancel(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1_u64..5, prop::collection::vec((1_u64..6, any::<bool>()), 1..4))
            .prop_map(|(session, wants)| Step::Request { session, wants }),
        3 => (1_u64..5, 1_u64..6, any::<bool>())
            .prop_map(|(session, n, downgrade)| Step::Release { session, n, downgrade }),
        2 => (1_u64..5, 1_u64..6, any::<bool>())
            .prop_map(|(session, n, exclusive)| Step::BatchPrefetch { session, n, exclusive }),
        2 => (1_u64..30).prop_map(Step::Time),
        1 => (1_u64..5).prop_map(Step::Drop),
        1 => any::<usize>().prop_map(Step::Cancel),
    ];
    prop::collection::vec(step, 1..60)
}

/// Grants as many requests as possible and checks that none was overtaken.
fn settle(table: &mut Table, waiting: &mut Vec<(Ticket, SessionId, Vec<Want>)>, now: u64) {
    for decision in table.decide(now) {
        let at = waiting
            .iter()
            .position(|(ticket, ..)| *ticket == decision.ticket)
            .unwrap();
        let (_, session, wants) = waiting.remove(at);
        assert_eq!(session, decision.session);
        assert_eq!(wants.len(), decision.leases.len());
        for (want, lease) in wants.iter().zip(&decision.leases) {
            assert!(lease.mode >= want.mode && lease.key == want.key);
        }
        for (_, other, earlier) in &waiting[..at] {
            let fresh = decision.leases.iter().filter(|lease| lease.fresh);
            for lease in fresh {
                let crossed = earlier.iter().any(|want| {
                    want.key == lease.key && (want.mode == LeaseMode::Write || lease.mode == LeaseMode::Write)
                });
                assert!(!crossed, "{other} was overtaken at {}", lease.key);
            }
        }
        table.confirm(session, &decision.leases, now);
        table.check();
    }
}

proptest! {
    #[test]
    fn table_keeps_its_rules_and_everyone_is_served(steps in steps()) {
        let mut table = table();
        let mut now = 0;
        let mut waiting: Vec<(Ticket, SessionId, Vec<Want>)> = Vec::new();
        for step in steps {
            match step {
                Step::Request { session, wants } => {
                    let wants: HashMap<_, _> = wants.into_iter().collect();
                    let wants: Vec<_> = wants
                        .into_iter()
                        .map(|(n, exclusive)| if exclusive { write(n) } else { read(n) })
                        .collect();
                    if let Ok(ticket) = table.request(SessionId(session), &wants, now) {
                        waiting.push((ticket, SessionId(session), wants));
                    }
                }
                Step::Release { session, n, downgrade } => {
                    let session = SessionId(session);
                    if let Some((lease, _)) = table.lease(session, key(n))
                        && table.begin_release(session, key(n), lease).is_some()
                    {
                        settle(&mut table, &mut waiting, now);
                        table.finish_release(session, key(n), lease, downgrade, now);
                    }
                }
                Step::BatchPrefetch { session, n, exclusive } => {
                    let session = SessionId(session);
                    let want = if exclusive { write(n) } else { read(n) };
                    if let Some(lease) = table.take_free(session, &want, now) {
                        assert!(lease.fresh && lease.mode == want.mode);
                        assert!(
                            waiting.iter().all(|(_, _, wants)| wants.iter().all(|other| other.key != key(n)))
                        );
                        table.confirm(session, &[lease], now);
                    }
                }
                Step::Time(ms) => now += ms,
                Step::Drop(session) => {
                    let gone = table.drop_session(SessionId(session));
                    waiting.retain(|(ticket, ..)| !gone.contains(ticket));
                }
                Step::Cancel(n) => {
                    if !waiting.is_empty() {
                        let at = n % waiting.len();
                        table.cancel(waiting.remove(at).0);
                    }
                }
            }
            table.check();
            settle(&mut table, &mut waiting, now);
            table.revocations(now);
            table.check();
        }
        // Clients are obedient from here on: every request is served.
        for _ in 0..200 {
            if waiting.is_empty() {
                break;
            }
            now += LIMITS.min_hold_ms + LIMITS.lease_ms / 4;
            for revocation in table.revocations(now) {
                if table.begin_release(revocation.session, revocation.key, revocation.lease).is_some() {
                    table.finish_release(revocation.session, revocation.key, revocation.lease, true, now);
                }
            }
            settle(&mut table, &mut waiting, now);
        }
        assert!(waiting.is_empty(), "not served: {waiting:?}");
    }
}

#[test]
fn lease_ahead_is_taken_from_nobody_and_before_nobody() {
    let mut table = table();
    let first = table.take_free(A, &read(5), 0).unwrap();
    table.confirm(A, &[first], 0);
    assert!(table.take_free(A, &read(5), 0).is_none(), "it has it");
    assert!(table.take_free(B, &write(5), 0).is_none(), "A reads");
    let shared = table.take_free(B, &read(5), 0).unwrap();
    table.confirm(B, &[shared], 0);
    assert!(table.take_free(A, &write(5), 0).is_none(), "B reads");
    assert!(table.revocations(1000).is_empty(), "nobody waits");
    // Its own read lease is no obstacle to the write lease.
    let alone = table.take_free(A, &read(6), 0).unwrap();
    table.confirm(A, &[alone], 0);
    let more = table.take_free(A, &write(6), 0).unwrap();
    assert_eq!(more.replaces, Some(alone.lease));
    table.confirm(A, &[more], 0);
    // A waiting session comes first.
    table.request(B, &[write(6)], 10).unwrap();
    assert!(table.take_free(SessionId(3), &read(6), 10).is_none());
    table.check();
}

#[test]
fn no_lease_ahead_where_sessions_take_turns() {
    let mut table = table();
    let now = take_turns(&mut table, 0, 1000, 0).unwrap();
    assert!(table.take_free(A, &read(1), now).is_none());
    assert!(table.take_free(A, &read(2), now).is_some());
}

#[test]
fn waits_name_the_holders_in_the_way_and_who_is_before() {
    let mut table = table();
    grant(&mut table, A, &[write(5), read(6)], 0);
    table.request(B, &[write(5), write(6)], 10).unwrap();
    table.request(SessionId(3), &[read(5)], 20).unwrap();
    assert!(table.decide(20).is_empty());
    table.revocations(20);
    let waits = table.waits(50);
    let brief: Vec<_> = waits
        .iter()
        .map(|wait| {
            (
                wait.session,
                wait.inode,
                &*wait.mode,
                wait.waited_ms,
                wait.before,
                wait.holders.len(),
            )
        })
        .collect();
    assert_eq!(
        brief,
        [
            (2, 5, "write", 40, 0, 1),
            (2, 6, "write", 40, 0, 1),
            (3, 5, "read", 30, 1, 1)
        ]
    );
    let holder = &waits[0].holders[0];
    assert_eq!(
        (holder.session, &*holder.state, holder.asked_ms),
        (1, "asked back", Some(30))
    );
    assert_eq!(table.asked_back(A), 2);
    let leases = table.leases_of(A, 10, 50);
    assert_eq!(leases.len(), 2);
    assert!(leases.iter().all(|lease| lease.awaited));
    assert_eq!(table.leases_of(A, 1, 50).len(), 1);
    give_back(&mut table, A, 5, 60);
    give_back(&mut table, A, 6, 60);
    assert_eq!(table.decide(60).len(), 1, "the first of the two");
    assert_eq!(table.waits(60).len(), 1);
}

#[test]
fn lease_asked_back_ahead_is_late_only_after_somebody_waits() {
    let mut table = table();
    let lease_ms = LIMITS.lease_ms;
    grant(&mut table, A, &[write(5)], 0);
    assert!(
        table.revoke_ahead(B, &[read(5)], 50).is_empty(),
        "granted a moment ago"
    );
    assert!(table.revoke_ahead(A, &[write(5)], 200).is_empty(), "its own");
    assert_eq!(table.revoke_ahead(B, &[read(5)], 200).len(), 1);
    assert!(table.revoke_ahead(B, &[read(5)], 400).is_empty(), "asked once");
    assert!(table.revocations(200 + 8 * lease_ms - 1).is_empty());
    assert_eq!(table.asked_back(A), 1);
    let late = 200 + 100 * lease_ms;
    assert!(table.revocations(late).is_empty(), "nobody waits");
    assert_eq!(table.next_event_ms(late), None);
    assert!(table.expired(late).is_empty());
    assert_eq!(table.asked_back(A), 0, "it may stay");
    table.request(B, &[read(5)], late).unwrap();
    assert_eq!(table.revocations(late).len(), 1, "asked again");
    assert!(table.expired(late + lease_ms - 1).is_empty());
    assert_eq!(table.expired(late + lease_ms), [A]);
    table.check();
}

#[test]
fn lease_that_several_share_is_not_taken_ahead_of_a_change() {
    let mut table = table();
    for session in [A, B] {
        grant(&mut table, session, &[read(5)], 0);
    }
    grant(&mut table, A, &[read(6)], 0);
    let walker = SessionId(3);
    assert!(
        table.revoke_ahead(walker, &[read(5), read(6)], 200).is_empty(),
        "no conflict"
    );
    let taken = table.revoke_ahead(walker, &[write(5), write(6)], 200);
    assert_eq!((taken.len(), taken[0].key), (1, key(6)));
}
