//! Whether a history can have been: pure functions over records. An operation comes before another if it
//! ended before the other began; all that this leaves open is allowed. What cannot have been is told with the
//! records that prove it.

use crate::record::{Kind, Record};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

/// Something that cannot have been, and the records that prove it.
#[derive(Debug, Clone)]
pub struct Fault {
    pub what: String,
    pub proof: Vec<Record>,
}

fn fault(what: impl Into<String>, proof: &[Record]) -> Fault {
    Fault {
        what: what.into(),
        proof: proof.to_vec(),
    }
}

/// All operations on one value: its write and its reads.
struct Cluster {
    write: Record,
    /// The one that ended first, and the one that began last.
    ended_first: Record,
    began_last: Record,
}

/// Writes of values that nobody else writes, and reads, of one register that is 0 at first: linearizable
/// (Gibbons and Korach 1997, §4.2: no two forward zones overlap and none contains a backward one). A read
/// that found two values counts as one of the first; of the other it is required that it was there at some
/// moment of the read.
pub fn register(records: &[Record]) -> Vec<Fault> {
    let (mut faults, mut clusters) = (Vec::new(), HashMap::new());
    let is_write = |record: &Record| matches!(record.kind, Kind::RegWrite | Kind::Replace);
    let nobody = Record {
        process: u8::MAX,
        kind: Kind::RegWrite,
        object: 0,
        errno: 0,
        start: 0,
        end: 0,
        a: 0,
        b: 0,
    };
    let (writes, reads): (Vec<Record>, Vec<Record>) = records.iter().copied().partition(is_write);
    for write in writes.iter().chain([&nobody]) {
        let cluster = Cluster {
            write: *write,
            ended_first: *write,
            began_last: *write,
        };
        clusters.insert(write.a, cluster);
    }
    for read in &reads {
        match clusters.get_mut(&read.a) {
            None => faults.push(fault("a value that nobody wrote", &[*read])),
            Some(cluster) if read.end < cluster.write.start => {
                faults.push(fault("a read from the future", &[*read, cluster.write]));
            }
            Some(cluster) => {
                if read.end < cluster.ended_first.end {
                    cluster.ended_first = *read;
                }
                if read.start > cluster.began_last.start {
                    cluster.began_last = *read;
                }
            }
        }
    }
    let mut forward = Vec::new();
    let mut backward = Vec::new();
    for cluster in clusters.values() {
        if cluster.ended_first.end < cluster.began_last.start {
            forward.push(cluster);
        } else {
            backward.push(cluster);
        }
    }
    forward.sort_by_key(|cluster| cluster.ended_first.end);
    for pair in forward.windows(2) {
        if pair[1].ended_first.end < pair[0].began_last.start {
            let mut proof = Vec::new();
            for cluster in pair {
                proof.extend([cluster.write, cluster.ended_first, cluster.began_last]);
            }
            faults.push(fault("a stale read: two values, each before the other", &proof));
        }
    }
    for cluster in backward {
        let (low, high) = (cluster.began_last.start, cluster.ended_first.end);
        let before = forward.partition_point(|zone| zone.ended_first.end < low);
        if let Some(zone) = before.checked_sub(1).map(|at| forward[at])
            && high < zone.began_last.start
        {
            let proof = [
                zone.write,
                zone.ended_first,
                zone.began_last,
                cluster.write,
                cluster.began_last,
            ];
            faults.push(fault("a stale read: a value was back after another", &proof));
        }
    }
    faults.extend(other_words(&writes, &reads, &clusters));
    faults
}

fn other_words(writes: &[Record], reads: &[Record], clusters: &HashMap<u64, Cluster>) -> Vec<Fault> {
    let mut by_start = writes.to_vec();
    by_start.sort_by_key(|write| write.start);
    // Of the writes from here on, the one that ended first.
    let mut first_end = by_start.clone();
    for at in (1..first_end.len()).rev() {
        if first_end[at].end < first_end[at - 1].end {
            first_end[at - 1] = first_end[at];
        }
    }
    let mut faults = Vec::new();
    for read in reads.iter().filter(|read| read.a != read.b) {
        let Some(cluster) = clusters.get(&read.b) else {
            faults.push(fault("a value that nobody wrote, amid a block", &[*read]));
            continue;
        };
        if read.end < cluster.write.start {
            faults.push(fault(
                "a read from the future, amid a block",
                &[*read, cluster.write],
            ));
        }
        let later = by_start.partition_point(|write| write.start <= cluster.write.end);
        if let Some(over) = first_end.get(later)
            && over.end < read.start
        {
            faults.push(fault("a stale read amid a block", &[*read, cluster.write, *over]));
        }
    }
    faults
}

/// What is known of one name: when it was made and taken away by calls that succeeded.
pub struct Name {
    by_start: Vec<Record>,
    last_end: Vec<u64>,
    there: Vec<i64>,
}

fn makes(record: &Record) -> bool {
    matches!(record.kind, Kind::Create | Kind::Mkdir)
}

impl Name {
    pub fn new(changes: &[Record]) -> Self {
        let mut by_start = changes.to_vec();
        by_start.sort_by_key(|change| change.start);
        let (mut last, mut sum) = (0, 0);
        let (mut last_end, mut there) = (vec![0], vec![0]);
        for change in &by_start {
            last = last.max(change.end);
            sum += if makes(change) { 1 } else { -1 };
            last_end.push(last);
            there.push(sum);
        }
        Self {
            by_start,
            last_end,
            there,
        }
    }

    /// Whether it was there throughout, or at no moment; nothing if it changed meanwhile or may have.
    pub fn known(&self, look: &Record) -> Option<bool> {
        let before = self.by_start.partition_point(|change| change.start <= look.end);
        (self.last_end[before] < look.start).then(|| self.there[before] == 1)
    }

    /// The changes next to a look, for a proof.
    fn around(&self, look: &Record) -> Vec<Record> {
        let before = self.by_start.partition_point(|change| change.start <= look.end);
        let near = before.saturating_sub(2)..self.by_start.len().min(before + 1);
        [*look]
            .into_iter()
            .chain(self.by_start[near].iter().copied())
            .collect()
    }
}

/// A name that is made and taken away by turns, absent at first: the successful changes can be put into such
/// an order, and who looked, or was told that it is there or not, was told so rightly.
pub fn name(records: &[Record]) -> Vec<Fault> {
    let changes: Vec<Record> = records
        .iter()
        .copied()
        .filter(|record| record.errno == 0 && record.kind != Kind::Look)
        .collect();
    let mut faults = Vec::from_iter(alternate(&changes));
    let known = Name::new(&changes);
    for look in records {
        let told = match (look.kind, i32::from(look.errno)) {
            (Kind::Look, 0) | (Kind::Create | Kind::Mkdir, libc::EEXIST) => true,
            (Kind::Look | Kind::Unlink | Kind::Rmdir, libc::ENOENT) => false,
            _ => continue,
        };
        if known.known(look) == Some(!told) {
            let what = if told {
                "a name that was not there"
            } else {
                "a name missed that was there"
            };
            faults.push(fault(what, &known.around(look)));
        }
    }
    faults
}

/// Whether the changes can have come by turns, a making first. Takes, of those that no other one is wholly
/// before, the one that ended first: if any order is possible, one with this choice is.
fn alternate(changes: &[Record]) -> Option<Fault> {
    let mut by_start: Vec<usize> = (0..changes.len()).collect();
    by_start.sort_by_key(|at| changes[*at].start);
    let mut by_end: Vec<usize> = (0..changes.len()).collect();
    by_end.sort_by_key(|at| changes[*at].end);
    let mut waiting = [BinaryHeap::new(), BinaryHeap::new()];
    let (mut done, mut next_start, mut next_end) = (vec![false; changes.len()], 0, 0);
    let mut last = None;
    for turn in 0..changes.len() {
        while done[by_end[next_end]] {
            next_end += 1;
        }
        let bound = changes[by_end[next_end]];
        while let Some(&at) = by_start.get(next_start)
            && changes[at].start <= bound.end
        {
            let ending = std::cmp::Reverse((changes[at].end, at));
            waiting[usize::from(!makes(&changes[at]))].push(ending);
            next_start += 1;
        }
        let Some(std::cmp::Reverse((_, at))) = waiting[turn % 2].pop() else {
            let what = if turn % 2 == 0 {
                "taken away while it is not there"
            } else {
                "made while it is there"
            };
            let proof: Vec<Record> = last.into_iter().chain([bound]).collect();
            return Some(fault(what, &proof));
        };
        done[at] = true;
        last = Some(changes[at]);
    }
    None
}

/// Listings: what was there throughout is in them, what was at no moment there is not.
pub fn lists(lists: &[Record], names: &BTreeMap<u8, Name>) -> Vec<Fault> {
    let mut faults = Vec::new();
    for list in lists {
        if list.b != 0 {
            faults.push(fault("a listing with a name twice, or an unknown one", &[*list]));
        }
        for (object, name) in names {
            let listed = list.a & 1 << object != 0;
            if name.known(list) == Some(!listed) {
                let what = format!("name {object} was listed: {listed}, and was there: {}", !listed);
                faults.push(fault(what, &name.around(list)));
            }
        }
    }
    faults
}

/// Times of holding one lock: none overlap, and the counter goes up by one each time.
pub fn holds(holds: &[Record]) -> Vec<Fault> {
    let mut by_start = holds.to_vec();
    by_start.sort_by_key(|hold| hold.start);
    let mut faults = Vec::new();
    for pair in by_start.windows(2) {
        if pair[1].start < pair[0].end {
            faults.push(fault("two holders at once", pair));
        }
        if pair[1].a != pair[0].a + 1 {
            faults.push(fault("a lost update", pair));
        }
    }
    if let Some(first) = by_start.first().filter(|first| first.a != 0) {
        faults.push(fault("a counter that did not begin at 0", &[*first]));
    }
    faults
}

/// Takes and hands of a token by turns, that process 0 has at first: who was handed it takes it at the next
/// try.
pub fn token(records: &[Record]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut hands: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
    let mut tries: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
    for record in records {
        match record.kind {
            Kind::Hand if record.errno == 0 => hands.entry(record.a).or_default().push(*record),
            Kind::Take => tries.entry(u64::from(record.process)).or_default().push(*record),
            _ => {}
        }
    }
    for (process, mut tries) in tries {
        tries.sort_by_key(|each| each.start);
        let mut hands = hands.remove(&process).unwrap_or_default();
        hands.sort_by_key(|each| each.start);
        // How many it has taken of those that it was handed.
        let (mut taken, at_first) = (0, usize::from(process == 0));
        for each in tries {
            let surely = at_first + hands.partition_point(|hand| hand.end < each.start);
            let perhaps = at_first + hands.partition_point(|hand| hand.start <= each.end);
            if each.errno == 0 {
                taken += 1;
                if taken > perhaps {
                    faults.push(fault("a token taken that was not handed", &[each]));
                }
            } else if surely > taken {
                let hand = hands.get(taken - at_first.min(taken)).copied();
                let proof: Vec<Record> = [each].into_iter().chain(hand).collect();
                faults.push(fault("a token missed that was there", &proof));
            }
        }
    }
    faults
}

/// What is in the log in the end: all that was appended, once, in an order that the times allow.
pub fn appends(appends: &[Record], log: &[u64]) -> Vec<Fault> {
    let mut by_value: HashMap<u64, Record> = appends.iter().map(|each| (each.a, *each)).collect();
    let mut faults = Vec::new();
    let mut latest: Option<Record> = None;
    for value in log {
        let Some(each) = by_value.remove(value) else {
            let what = format!("value {value:#x} is in the log twice, or nobody appended it");
            faults.push(fault(what, &[]));
            continue;
        };
        if let Some(latest) = latest.filter(|latest| each.end < latest.start) {
            faults.push(fault("appends in another order than they came", &[latest, each]));
        }
        if latest.is_none_or(|latest| each.start > latest.start) {
            latest = Some(each);
        }
    }
    faults.extend(by_value.values().map(|each| fault("a lost append", &[*each])));
    faults
}

/// Sizes that were seen: no less than what was appended before, no more than what was begun.
pub fn sizes(stats: &[Record], appends: &[Record], each: u64) -> Vec<Fault> {
    let mut starts: Vec<u64> = appends.iter().map(|append| append.start).collect();
    let mut ends: Vec<u64> = appends.iter().map(|append| append.end).collect();
    starts.sort_unstable();
    ends.sort_unstable();
    let mut faults = bounded(stats, &starts, &ends, each, "a size of the log");
    faults.extend(monotonic(stats, |stat| stat.a, 0, "the size of the log"));
    faults
}

/// `a` of each look lies between `each` times what had ended before it and what had begun when it ended.
fn bounded(looks: &[Record], starts: &[u64], ends: &[u64], each: u64, what: &str) -> Vec<Fault> {
    let mut faults = Vec::new();
    for look in looks {
        let least = each * ends.partition_point(|end| *end < look.start) as u64;
        let most = each * starts.partition_point(|start| *start <= look.end) as u64;
        if look.a < least || look.a > most {
            let what = format!("{what} is {}, must be {least} to {most}", look.a);
            faults.push(fault(what, &[*look]));
        }
    }
    faults
}

/// What a look found is no less than what one before it found, but for `slack`.
pub fn monotonic(looks: &[Record], of: impl Fn(&Record) -> u64, slack: u64, what: &str) -> Vec<Fault> {
    let mut by_end = looks.to_vec();
    by_end.sort_by_key(|look| look.end);
    let mut by_start = looks.to_vec();
    by_start.sort_by_key(|look| look.start);
    let (mut at, mut most): (usize, Option<Record>) = (0, None);
    let mut faults = Vec::new();
    for look in by_start {
        while by_end[at].end < look.start {
            if most.is_none_or(|most| of(&by_end[at]) > of(&most)) {
                most = Some(by_end[at]);
            }
            at += 1;
        }
        if let Some(most) = most.filter(|most| of(most) > of(&look) + slack) {
            let what = format!("{what} went back from {} to {}", of(&most), of(&look));
            faults.push(fault(what, &[most, look]));
        }
    }
    faults
}

/// The mapped counter: each addition its own number, none left out, and reads as the times allow. A linked
/// program (`object` 1) sees at least what was synced before.
pub fn map(records: &[Record]) -> Vec<Fault> {
    let of = |kind: Kind, object: u8| -> Vec<Record> {
        let found = records
            .iter()
            .filter(|each| each.kind == kind && each.object == object && each.errno == 0);
        found.copied().collect()
    };
    let adds = of(Kind::MapAdd, 0);
    let mut faults = Vec::new();
    let mut by_value = adds.clone();
    by_value.sort_by_key(|add| add.a);
    for (n, pair) in by_value.windows(2).enumerate() {
        if pair[1].a != pair[0].a + 1 {
            faults.push(fault("a mapped counter that lost an addition", pair));
        }
        if n == 0 && pair[0].a != 0 {
            faults.push(fault("a mapped counter that did not begin at 0", pair));
        }
    }
    faults.extend(monotonic(&adds, |add| add.a, 0, "the mapped counter"));
    let mut starts: Vec<u64> = adds.iter().map(|add| add.start).collect();
    let mut ends: Vec<u64> = adds.iter().map(|add| add.end).collect();
    starts.sort_unstable();
    ends.sort_unstable();
    faults.extend(bounded(
        &of(Kind::MapRead, 0),
        &starts,
        &ends,
        1,
        "the mapped counter",
    ));
    // What a linked program sees: never ahead, and not behind what was synced.
    let linked = of(Kind::MapRead, 1);
    faults.extend(bounded(&linked, &starts, &[], 1, "the mapped counter, linked"));
    let mut both = of(Kind::MapSync, 0);
    both.extend(linked);
    let behind = monotonic(&both, |each| each.a, 0, "the mapped counter after msync");
    faults.extend(
        behind
            .into_iter()
            .filter(|fault| fault.proof.last().is_some_and(|look| look.kind == Kind::MapRead)),
    );
    faults
}

/// Errnos that no operation of its kind may have. A mount's open of a file that is replaced twice meanwhile
/// may be `ESTALE`: the kernel looks the name up again once.
pub fn errnos(records: &[Record]) -> Vec<Fault> {
    let replaced_twice = |record: &Record, by: Kind| {
        let overlaps = |other: &&Record| {
            other.kind == by
                && other.object == record.object
                && other.errno == 0
                && other.start <= record.end
                && other.end >= record.start
        };
        i32::from(record.errno) == libc::ESTALE && records.iter().filter(overlaps).count() > 1
    };
    let allowed = |record: &Record| match record.kind {
        Kind::Create | Kind::Mkdir => i32::from(record.errno) == libc::EEXIST,
        Kind::Unlink | Kind::Rmdir | Kind::Look | Kind::Take => i32::from(record.errno) == libc::ENOENT,
        Kind::Keep => i32::from(record.errno) == libc::ENOENT || replaced_twice(record, Kind::Plant),
        Kind::ReadReplaced => replaced_twice(record, Kind::Replace),
        _ => false,
    };
    records
        .iter()
        .filter(|record| record.errno != 0 && !allowed(record))
        .map(|record| fault(format!("errno {}", record.errno), &[*record]))
        .collect()
}

/// Every part of a history. `log` is what the log holds in the end, `names` how many names there are (the
/// last is the lock file), `dirs` those of them that a listing has.
pub fn all(records: &[Record], log: &[u64], entry: u64, lock_file: u8, mtime_slack: u64) -> Vec<Fault> {
    let mut faults = errnos(records);
    let of = |kinds: &[Kind], only_done: bool| -> Vec<Record> {
        let found = records
            .iter()
            .filter(|each| kinds.contains(&each.kind) && (!only_done || each.errno == 0));
        found.copied().collect()
    };
    let mut parts = |what: &str, found: Vec<Fault>| {
        faults.extend(found.into_iter().map(|fault| Fault {
            what: format!("{what}: {}", fault.what),
            ..fault
        }));
    };
    for kinds in [
        [Kind::RegWrite, Kind::RegRead],
        [Kind::Replace, Kind::ReadReplaced],
    ] {
        let done = of(&kinds, true);
        let objects: BTreeSet<u8> = done.iter().map(|each| each.object).collect();
        for object in objects {
            let part: Vec<Record> = done
                .iter()
                .copied()
                .filter(|each| each.object == object)
                .collect();
            parts(&format!("{:?} {object}", kinds[0]), register(&part));
        }
    }
    let replaced = of(&[Kind::ReadReplaced, Kind::Keep, Kind::Again], true);
    let torn = replaced.iter().filter(|read| read.a != read.b);
    parts(
        "a file that is not written any more",
        torn.map(|read| fault("two values", &[*read])).collect(),
    );
    let named = of(
        &[Kind::Create, Kind::Unlink, Kind::Mkdir, Kind::Rmdir, Kind::Look],
        false,
    );
    let mut listed = BTreeMap::new();
    for object in 0..=lock_file {
        let part: Vec<Record> = named
            .iter()
            .copied()
            .filter(|each| each.object == object)
            .collect();
        parts(&format!("name {object}"), name(&part));
        if object != lock_file {
            let changes: Vec<Record> = part
                .into_iter()
                .filter(|each| each.errno == 0 && each.kind != Kind::Look)
                .collect();
            listed.insert(object, Name::new(&changes));
        }
    }
    parts("listing", lists(&of(&[Kind::List], true), &listed));
    let held = of(&[Kind::Hold], true);
    for object in 0..4 {
        let part: Vec<Record> = held
            .iter()
            .copied()
            .filter(|each| each.object == object)
            .collect();
        parts(&format!("lock {object}"), holds(&part));
    }
    parts("token", token(&of(&[Kind::Take, Kind::Hand], false)));
    let appended = of(&[Kind::Append], true);
    let stats = of(&[Kind::Stat], true);
    parts("log", appends(&appended, log));
    parts("log", sizes(&stats, &appended, entry));
    parts(
        "log",
        monotonic(&stats, |stat| stat.b, mtime_slack, "the time of change"),
    );
    let tails = of(&[Kind::Tail], true);
    let torn = tails.iter().filter(|tail| tail.a != 1);
    parts("log", torn.map(|tail| fault("a torn record", &[*tail])).collect());
    parts(
        "map",
        map(&of(&[Kind::MapAdd, Kind::MapRead, Kind::MapSync], true)),
    );
    faults
}

#[cfg(test)]
mod tests {
    use super::{
        Fault, Name, alternate, appends, errnos, holds, lists, map, monotonic, name, register, sizes, token,
    };
    use crate::record::{Kind, Record};
    use std::collections::BTreeMap;

    fn at(kind: Kind, start: u64, end: u64, a: u64) -> Record {
        Record {
            process: 0,
            kind,
            object: 0,
            errno: 0,
            start,
            end,
            a,
            b: a,
        }
    }

    fn failed(kind: Kind, start: u64, end: u64, errno: i32) -> Record {
        Record {
            errno: errno as u16,
            ..at(kind, start, end, 0)
        }
    }

    fn says(faults: &[Fault], what: &str) {
        assert!(faults.iter().any(|fault| fault.what.contains(what)), "{faults:?}");
    }

    fn sound(faults: &[Fault]) {
        assert!(faults.is_empty(), "{faults:?}");
    }

    #[test]
    fn register_is_sound_when_some_order_explains_it() {
        use Kind::{RegRead as R, RegWrite as W};
        // The second write is under way: either value, the old one first.
        sound(&register(&[
            at(W, 1, 2, 1),
            at(W, 3, 9, 2),
            at(R, 4, 5, 1),
            at(R, 6, 7, 2),
            at(R, 8, 10, 2),
        ]));
        sound(&register(&[at(R, 1, 2, 0), at(W, 1, 4, 5), at(R, 3, 6, 5)]));
        // Writes at once, read in one order by all.
        sound(&register(&[
            at(W, 1, 9, 1),
            at(W, 1, 9, 2),
            at(R, 2, 3, 2),
            at(R, 4, 5, 1),
        ]));
    }

    #[test]
    fn register_is_refused_when_a_read_is_stale() {
        use Kind::{RegRead as R, RegWrite as W};
        says(
            &register(&[at(W, 1, 2, 1), at(W, 3, 4, 2), at(R, 5, 6, 1)]),
            "stale",
        );
        says(&register(&[at(W, 1, 2, 1), at(R, 3, 4, 0)]), "stale");
        // New, then old, while the write is still under way.
        says(
            &register(&[at(W, 1, 9, 1), at(R, 2, 3, 1), at(R, 4, 5, 0)]),
            "stale",
        );
        // There and back again.
        says(
            &register(&[
                at(W, 1, 9, 1),
                at(W, 1, 9, 2),
                at(R, 2, 3, 2),
                at(R, 4, 5, 1),
                at(R, 6, 7, 2),
            ]),
            "stale",
        );
    }

    #[test]
    fn register_is_refused_when_a_value_comes_from_nowhere_or_the_future() {
        use Kind::{RegRead as R, RegWrite as W};
        says(&register(&[at(R, 1, 2, 7)]), "nobody wrote");
        says(&register(&[at(R, 1, 2, 7), at(W, 3, 4, 7)]), "future");
    }

    #[test]
    fn block_with_two_values_is_refused_only_when_one_was_over() {
        use Kind::{RegRead as R, RegWrite as W};
        let torn = |start, end, a, b| Record {
            b,
            ..at(R, start, end, a)
        };
        sound(&register(&[at(W, 1, 2, 1), at(W, 3, 9, 2), torn(4, 5, 2, 1)]));
        let over = [at(W, 1, 2, 1), at(W, 3, 4, 2), at(W, 5, 9, 3), torn(6, 7, 3, 1)];
        says(&register(&over), "stale read amid");
        says(&register(&[at(W, 1, 2, 1), torn(6, 7, 1, 9)]), "nobody wrote");
    }

    #[test]
    fn name_is_refused_when_it_is_made_twice_or_seen_wrongly() {
        let (make, take) = (Kind::Create, Kind::Unlink);
        sound(&name(&[at(make, 1, 2, 0), at(take, 3, 4, 0), at(make, 5, 6, 0)]));
        // At once: the one that takes away can have been between them.
        sound(&name(&[at(make, 1, 9, 0), at(make, 1, 9, 0), at(take, 1, 9, 0)]));
        // The longer one must be taken first here, and the shorter later.
        sound(&name(&[
            at(make, 0, 10, 0),
            at(make, 5, 9, 0),
            at(take, 1, 2, 0),
            at(take, 9, 11, 0),
        ]));
        says(&name(&[at(make, 1, 2, 0), at(make, 3, 4, 0)]), "made while");
        says(&name(&[at(take, 1, 2, 0)]), "taken away");
        let seen = |look: Record| name(&[at(make, 3, 4, 0), at(take, 7, 8, 0), look]);
        says(&seen(failed(Kind::Look, 5, 6, libc::ENOENT)), "missed");
        says(&seen(failed(take, 5, 6, libc::ENOENT)), "missed");
        says(&seen(at(Kind::Look, 9, 10, 0)), "not there");
        says(&seen(failed(make, 1, 2, libc::EEXIST)), "not there");
        sound(&seen(failed(Kind::Look, 4, 6, libc::ENOENT)));
        sound(&seen(at(Kind::Look, 8, 9, 0)));
    }

    #[test]
    fn turns_are_refused_exactly_when_no_order_of_few_changes_is_right() {
        fn possible(left: &[Record], there: bool) -> bool {
            left.is_empty()
                || (0..left.len()).any(|n| {
                    let one = left[n];
                    let rest: Vec<Record> =
                        (0..left.len()).filter(|at| *at != n).map(|at| left[at]).collect();
                    super::makes(&one) != there
                        && rest.iter().all(|other| other.end >= one.start)
                        && possible(&rest, !there)
                })
        }
        let mut rng = varve_testkit::workload::Rng::new(1);
        let mut refused = 0;
        for _ in 0..20_000 {
            let mut history = Vec::new();
            for n in 0..1 + rng.below(6) {
                let start = rng.below(12);
                let kind = if n % 2 == 0 { Kind::Create } else { Kind::Unlink };
                history.push(at(kind, start, start + 1 + rng.below(6), 0));
            }
            let fault = alternate(&history);
            assert_eq!(
                fault.is_none(),
                possible(&history, false),
                "{history:?}: {fault:?}"
            );
            refused += u32::from(fault.is_some());
        }
        assert!((1000..19_000).contains(&refused), "{refused}");
    }

    #[test]
    fn listing_is_refused_when_it_misses_or_makes_up_a_name() {
        let names = BTreeMap::from([(
            0,
            Name::new(&[at(Kind::Create, 3, 4, 0), at(Kind::Unlink, 9, 10, 0)]),
        )]);
        let list = |start, end, seen| Record {
            b: 0,
            ..at(Kind::List, start, end, seen)
        };
        sound(&lists(
            &[list(5, 6, 1), list(1, 2, 0), list(3, 6, 0), list(8, 9, 1)],
            &names,
        ));
        says(&lists(&[list(5, 6, 0)], &names), "listed: false");
        says(&lists(&[list(1, 2, 1)], &names), "listed: true");
        says(
            &lists(
                &[Record {
                    b: 1,
                    ..list(5, 6, 1)
                }],
                &names,
            ),
            "twice",
        );
    }

    #[test]
    fn lock_is_refused_when_two_hold_it_or_an_update_is_lost() {
        let hold = |start, end, a| at(Kind::Hold, start, end, a);
        sound(&holds(&[hold(3, 4, 1), hold(1, 2, 0), hold(5, 6, 2)]));
        says(&holds(&[hold(1, 4, 0), hold(3, 5, 1)]), "two holders");
        says(&holds(&[hold(1, 2, 0), hold(3, 4, 0)]), "lost update");
        says(&holds(&[hold(1, 2, 3)]), "begin at 0");
    }

    #[test]
    fn token_is_refused_when_it_is_missed_or_taken_twice() {
        let of = |process, record: Record| Record { process, ..record };
        let missed = |start| of(1, failed(Kind::Take, start, start + 1, libc::ENOENT));
        let (take, hand) = (at(Kind::Take, 1, 2, 0), at(Kind::Hand, 3, 4, 1));
        sound(&token(&[
            take,
            hand,
            missed(0),
            missed(3),
            of(1, at(Kind::Take, 6, 7, 0)),
        ]));
        says(&token(&[take, hand, missed(5)]), "missed");
        says(&token(&[failed(Kind::Take, 1, 2, libc::ENOENT)]), "missed");
        says(&token(&[take, at(Kind::Take, 3, 4, 0)]), "not handed");
    }

    #[test]
    fn log_is_refused_when_an_append_is_lost_doubled_or_out_of_order() {
        let (one, two, three) = (
            at(Kind::Append, 1, 2, 1),
            at(Kind::Append, 3, 6, 2),
            at(Kind::Append, 4, 5, 3),
        );
        let each = [one, two, three];
        sound(&appends(&each, &[1, 2, 3]));
        sound(&appends(&each, &[1, 3, 2]));
        says(&appends(&each, &[2, 1, 3]), "another order");
        says(&appends(&each, &[1, 3]), "lost append");
        says(&appends(&each, &[1, 3, 2, 3]), "twice");
        let stat = |start, end, size| at(Kind::Stat, start, end, size);
        sound(&sizes(&[stat(0, 1, 0), stat(2, 4, 1), stat(7, 8, 3)], &each, 1));
        says(&sizes(&[stat(7, 8, 2)], &each, 1), "must be 3 to 3");
        says(&sizes(&[stat(1, 2, 2)], &each, 1), "must be 0 to 1");
        says(
            &sizes(&[stat(3, 4, 2), stat(5, 6, 1)], &each, 1),
            "went back from 2",
        );
        sound(&monotonic(&[stat(3, 4, 9), stat(5, 6, 7)], |s| s.a, 2, "time"));
    }

    #[test]
    fn mapped_counter_is_refused_when_an_addition_is_lost_or_a_read_is_behind() {
        let add = |start, end, a| at(Kind::MapAdd, start, end, a);
        let adds = [add(1, 2, 0), add(3, 6, 2), add(4, 5, 1)];
        let with = |more: &[Record]| map(&[&adds, more].concat());
        sound(&with(&[at(Kind::MapRead, 2, 3, 1), at(Kind::MapRead, 7, 8, 3)]));
        says(&with(&[at(Kind::MapRead, 7, 8, 2)]), "must be 3");
        says(&map(&[add(1, 2, 0), add(3, 4, 0)]), "lost an addition");
        says(&map(&[add(1, 2, 1), add(3, 4, 0)]), "went back");
        let linked = |start, a| Record {
            object: 1,
            ..at(Kind::MapRead, start, start + 1, a)
        };
        let sync = at(Kind::MapSync, 6, 7, 3);
        sound(&with(&[sync, linked(8, 3), linked(2, 0), linked(4, 1)]));
        says(&with(&[sync, linked(8, 2)]), "after msync went back");
        says(&with(&[linked(1, 2)]), "linked is 2");
    }

    #[test]
    fn errno_is_refused_but_for_those_that_an_operation_may_have() {
        let (enoent, estale) = (libc::ENOENT, libc::ESTALE);
        let read = |errno| failed(Kind::ReadReplaced, 5, 8, errno);
        sound(&errnos(&[
            failed(Kind::Look, 1, 2, enoent),
            failed(Kind::Keep, 1, 2, enoent),
        ]));
        says(&errnos(&[read(enoent)]), "errno 2");
        let (one, two) = (at(Kind::Replace, 4, 6, 1), at(Kind::Replace, 7, 9, 2));
        sound(&errnos(&[read(estale), one, two]));
        says(&errnos(&[read(estale), one]), "errno 116");
        says(&errnos(&[failed(Kind::RegRead, 1, 2, libc::EIO)]), "errno 5");
    }
}
