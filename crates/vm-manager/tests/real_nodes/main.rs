//! Real pages on real nodes: run by `tests/vm/ci` inside of the test machine. Elsewhere it skips loudly what
//! needs several nodes, root or settings of the whole machine.
//!
//! Nothing here depends on speed: every check waits for a state, and fails only when the manager had both
//! time and turns enough to bring it about. A machine that is too slow even for that is given up by
//! `tests/vm/ci`, which is no failure.

mod child;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use varve_vm_manager::actuator::{KernelActuator, Tier};
use varve_vm_manager::config::PolicyFile;
use varve_vm_manager::engine::Engine;
use varve_vm_manager::interfaces::{Action, Actuator, Outcome, Touch, Tracker};
use varve_vm_manager::multiclock::ListKind;
use varve_vm_manager::processes::SharedProcesses;
use varve_vm_manager::sim::trace::Rng;
use varve_vm_manager::sys;
use varve_vm_manager::tracker::{Damon, DamonConfig, IdleBitmap};
use varve_vm_manager::types::{HugeIndex, NodeId, PAGE_BYTES, PageKey, Pid, TierId, VirtPage};
use varve_vm_manager::{machine, probe::Probe};

/// How long a state may take to come about, at least.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many turns the manager (or whoever brings it about) has for it, at least.
const TURNS: u32 = 1_200;

/// Counts turns and time; says when both are used up.
struct Patience {
    end: Instant,
    turns: u32,
}

impl Patience {
    fn new() -> Self {
        Self {
            end: Instant::now() + PATIENCE,
            turns: 0,
        }
    }

    fn turn(&mut self, what: impl FnOnce() -> String) -> Result<(), String> {
        self.turns += 1;
        ensure(self.turns < TURNS || Instant::now() < self.end, what)
    }
}

type Check = Result<Option<String>, String>;

/// A program under test: told what to do over a pipe, ended when dropped.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// First page of its memory.
    base: VirtPage,
}

impl Program {
    fn start(kind: &str, mib: u64) -> Result<Self, String> {
        let socket = socket();
        let me = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new(me);
        command
            .args(["--child", kind, &mib.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if socket.exists() {
            command.env(varve_vm_manager::coop::SOCKET_VARIABLE, socket);
        }
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".to_owned());
        };
        let mut program = Self {
            child,
            input,
            output: BufReader::new(output),
            base: VirtPage(0),
        };
        let line = program.line()?;
        let address = line
            .strip_prefix("ready ")
            .and_then(|a| u64::from_str_radix(a, 16).ok());
        program.base = VirtPage::of_address(address.ok_or_else(|| format!("the program said {line:?}"))?);
        Ok(program)
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id() as i32)
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| e.to_string())?;
        Ok(line.trim().to_owned())
    }

    /// Gives an order and waits for its acknowledgement.
    fn order(&mut self, order: &str) -> Result<String, String> {
        writeln!(self.input, "{order}").map_err(|e| e.to_string())?;
        self.line()
    }

    /// Puts all of the first `mib` MiB on a node; a page that is busy just now is tried again.
    fn place(&self, mib: u64, node: NodeId) -> Result<(), String> {
        let (pages, mut patience) = (self.pages(0, mib), Patience::new());
        loop {
            let status = sys::move_pages(self.pid(), &pages, node).map_err(|e| e.to_string())?;
            let left: Vec<_> = status.iter().filter(|s| **s != Ok(node)).collect();
            if left.is_empty() {
                return Ok(());
            }
            patience.turn(|| format!("{} pages do not move to {node:?}: {:?}", left.len(), left[0]))?;
        }
    }

    fn pages(&self, from_mib: u64, to_mib: u64) -> Vec<VirtPage> {
        let page = |mib: u64| self.base.0 + (mib << 20) / PAGE_BYTES;
        (page(from_mib)..page(to_mib)).map(VirtPage).collect()
    }

    /// Share of the pages of a stretch that are on one of `nodes`, asked from the kernel.
    fn share_on(&self, from_mib: u64, to_mib: u64, nodes: &[NodeId]) -> Result<f64, String> {
        let pages = self.pages(from_mib, to_mib);
        let status = sys::page_nodes(self.pid(), &pages).map_err(|e| e.to_string())?;
        let on = status
            .iter()
            .filter(|s| s.as_ref().is_ok_and(|n| nodes.contains(n)))
            .count();
        Ok(on as f64 / pages.len() as f64)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ensure(condition: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(what()) }
}

/// A policy with tiers of one node each; the fast ones are limited to so many MiB.
fn policy(limits: &[(u32, Option<u64>)]) -> Result<PolicyFile, String> {
    let mut text = String::from(
        "huge_pages = false\nscan_cpu_share = 0.5\nwork_cpu_share = 1.0\nsurvey_period_ms = 200\n",
    );
    let idle = std::path::Path::new("/sys/kernel/mm/page_idle/bitmap").exists();
    text += if idle {
        "tracker = \"idle\"\n"
    } else {
        "tracker = \"written\"\nunwritten_is_idle = true\n"
    };
    text += "[multi_clock]\nmax_backoff = 1\nwatermark_scale = 4.0\n";
    for (node, limit) in limits {
        text += &format!("[[tier]]\nnodes = [{node}]\n");
        if let Some(mib) = limit {
            text += &format!("limit_mib = {mib}\n");
        }
    }
    PolicyFile::parse(&text).map_err(|e| e.to_string())
}

/// Where the manager under test listens.
fn socket() -> std::path::PathBuf {
    std::env::temp_dir().join(format!("varve-nodes-{}.sock", std::process::id()))
}

/// A manager that listens. Access bits come from idle page tracking where the kernel has it, else from write
/// tracking.
fn engine(limits: &[(u32, Option<u64>)]) -> Result<Engine, String> {
    let mut engine = Engine::new(policy(limits)?);
    engine.listen(&socket()).map_err(|e| e.to_string())?;
    Ok(engine)
}

/// Lets the engine work until `done` or the end of patience; gives what `done` measured last.
fn until(
    engine: &mut Engine,
    mut done: impl FnMut(&Engine) -> Result<(bool, String), String>,
) -> Result<String, String> {
    let (mut patience, mut last) = (Patience::new(), Instant::now());
    let mut what = "nothing".to_owned();
    loop {
        let rest = engine.tick().min(Duration::from_millis(100));
        std::thread::sleep(rest);
        patience.turn(|| format!("not reached: {what}; {}", lists(engine)))?;
        if last.elapsed() < Duration::from_millis(500) {
            continue;
        }
        last = Instant::now();
        let (good, now) = done(engine)?;
        if good {
            return Ok(now);
        }
        what = now;
    }
}

fn pages_move_between_real_nodes() -> Check {
    let program = Program::start("sleep", 8)?;
    for node in [NodeId(2), NodeId(1), NodeId(0)] {
        program.place(8, node)?;
        ensure(program.share_on(0, 8, &[node])? == 1.0, || {
            format!("not all on {node:?}")
        })?;
        let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", program.pid()))
            .map_err(|e| e.to_string())?;
        ensure(maps.contains(&format!(" N{}=", node.0)), || {
            format!("numa_maps does not name node {}", node.0)
        })?;
    }
    Ok(Some("8 MiB through nodes 2, 1, 0".to_owned()))
}

fn hot_pages_end_on_the_fast_node_through_a_phase_change() -> Check {
    let mut engine = engine(&[(0, Some(14)), (2, None)])?;
    let mut program = Program::start("hot", 48)?;
    // All on the slow node at first: whatever is fast afterwards was promoted.
    program.place(48, NodeId(2))?;
    engine.attach(program.pid()).map_err(|e| e.to_string())?;
    let (fast, slow) = ([NodeId(0)], [NodeId(2)]);
    let mut said = Vec::new();
    for (order, hot, cold) in [("hot 0 12", (0, 12), (16, 48)), ("hot 32 44", (32, 44), (0, 12))] {
        let answer = program.order(order)?;
        ensure(answer == "ok", || answer)?;
        let state = until(&mut engine, |_| {
            let up = program.share_on(hot.0, hot.1, &fast)?;
            let down = program.share_on(cold.0, cold.1, &slow)?;
            Ok((
                up >= 0.9 && down >= 0.7,
                format!(
                    "{order}: {:.0} % of hot fast, {:.0} % of cold slow",
                    up * 100.0,
                    down * 100.0
                ),
            ))
        })?;
        said.push(state);
    }
    let answer = program.order("check")?;
    ensure(answer == "ok", || format!("contents: {answer}"))?;
    let (home, _) = engine.leave();
    let share = program.share_on(0, 48, &slow)?;
    ensure(share > 0.9, || {
        format!("leaving moved {home} pages home, {:.0} % are", share * 100.0)
    })?;
    Ok(Some(format!("{}; leaving moved them home", said.join("; "))))
}

fn second_process_gets_fast_memory_after_the_first_took_it_all() -> Check {
    let mut engine = engine(&[(0, Some(24)), (2, None)])?;
    let mut first = Program::start("hot", 24)?;
    first.place(24, NodeId(0))?;
    engine.attach(first.pid()).map_err(|e| e.to_string())?;
    first.order("idle")?;
    let mut second = Program::start("hot", 24)?;
    second.place(24, NodeId(2))?;
    second.order("hot 0 16")?;
    let before = second.share_on(0, 16, &[NodeId(0)])?;
    engine.attach(second.pid()).map_err(|e| e.to_string())?;
    let state = until(&mut engine, |_| {
        let (mine, theirs) = (
            second.share_on(0, 16, &[NodeId(0)])?,
            first.share_on(0, 24, &[NodeId(0)])?,
        );
        Ok((
            mine >= 0.9 && theirs <= 0.5,
            format!(
                "second {:.0} % fast, idle first {:.0} %",
                mine * 100.0,
                theirs * 100.0
            ),
        ))
    })?;
    ensure(before < 0.1, || {
        "the second had fast memory from the start".to_owned()
    })?;
    Ok(Some(state))
}

fn three_tiers_sort_pages_by_heat() -> Check {
    let mut engine = engine(&[(0, Some(12)), (1, Some(12)), (2, None)])?;
    let mut program = Program::start("hot", 32)?;
    program.place(32, NodeId(0))?;
    engine.attach(program.pid()).map_err(|e| e.to_string())?;
    program.order("hot 20 28")?;
    let state = until(&mut engine, |_| {
        let hot = program.share_on(20, 28, &[NodeId(0)])?;
        let shares = [NodeId(0), NodeId(1), NodeId(2)].map(|n| program.share_on(0, 32, &[n]).unwrap_or(0.0));
        let spread = shares[0] <= 0.4 && shares[1] > 0.1 && shares[2] > 0.1;
        Ok((
            hot >= 0.9 && spread,
            format!("hot {:.0} % fast, tiers hold {shares:.2?}", hot * 100.0),
        ))
    })?;
    Ok(Some(state))
}

/// The policy's lists by tier and the edges taken so far, for whoever asks why a state does not come about.
fn lists(engine: &mut Engine) -> String {
    let snapshot = engine.snapshot();
    let Some(m) = engine.multi_clock() else {
        return "no tiers".to_owned();
    };
    let kinds = [ListKind::Inactive, ListKind::Active, ListKind::Promote];
    let tiers: Vec<String> = (0..snapshot.tiers.len() as u8)
        .map(TierId)
        .map(|t| format!("{} {:?}", m.used(t), kinds.map(|k| m.list_len(t, k))))
        .collect();
    let edges: Vec<String> = m.edges().iter().map(|(e, n)| format!("{e:?} {n}")).collect();
    format!(
        "tracker {}; tiers hold {}; {}; {:?}; last note {:?}",
        snapshot.tracker,
        tiers.join(", "),
        edges.join(", "),
        snapshot.totals,
        snapshot.notes.last()
    )
}

fn locked_pages_are_left_alone() -> Check {
    let mut engine = engine(&[(0, Some(64)), (2, None)])?;
    let mut program = Program::start("hot", 8)?;
    program.place(8, NodeId(2))?;
    let answer = program.order("lock 0 4")?;
    ensure(answer == "ok", || answer)?;
    program.order("hot 0 8")?;
    engine.attach(program.pid()).map_err(|e| e.to_string())?;
    let state = until(&mut engine, |e| {
        let locked = e
            .multi_clock()
            .map_or(0, |m| m.list_len(TierId(1), ListKind::Unevictable));
        let (held, free) = (
            program.share_on(0, 4, &[NodeId(2)])?,
            program.share_on(4, 8, &[NodeId(0)])?,
        );
        ensure(held == 1.0, || format!("locked pages moved: {held}"))?;
        Ok((
            locked >= 1024 && free >= 0.9,
            format!(
                "{locked} unevictable stay, {:.0} % of the others moved",
                free * 100.0
            ),
        ))
    })?;
    Ok(Some(state))
}

/// fork, munmap, mremap, mlock and exit while every page is being thrown from node to node.
fn contents_survive_every_change_of_address_space_while_migrating() -> Check {
    let mut engine = engine(&[(0, Some(8)), (1, Some(8)), (2, None)])?;
    let mut program = Program::start("churn", 12)?;
    let processes = SharedProcesses::default();
    let id = processes
        .borrow_mut()
        .add(program.pid())
        .map_err(|e| e.to_string())?;
    let tiers = (0..3)
        .map(|n| Tier {
            nodes: vec![NodeId(n)],
        })
        .collect();
    let mut actuator = KernelActuator::new(processes.clone(), tiers);
    engine.attach(program.pid()).map_err(|e| e.to_string())?;
    let (mut rng, mut done, mut gone) = (Rng::new(3), 0u64, 0u64);
    writeln!(program.input, "go 40").map_err(|e| e.to_string())?;
    // The program ends by itself after its rounds, in the middle of our moves.
    let status = loop {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid())).unwrap_or_default();
        let ranges: Vec<(u64, u64)> = maps
            .lines()
            .filter(|l| l.contains("rw-p"))
            .filter_map(|l| {
                let (s, e) = l.split_ascii_whitespace().next()?.split_once('-')?;
                Some((
                    u64::from_str_radix(s, 16).ok()? / PAGE_BYTES,
                    u64::from_str_radix(e, 16).ok()? / PAGE_BYTES,
                ))
            })
            .collect();
        let mut actions = Vec::new();
        for _ in 0..512 {
            if ranges.is_empty() {
                break;
            }
            let (start, end) = ranges[rng.below(ranges.len() as u64) as usize];
            let page = PageKey::new(id, VirtPage(start + rng.below(end - start)));
            actions.push(Action::Move {
                page,
                to: TierId(rng.below(3) as u8),
            });
        }
        let mut outcomes = Vec::new();
        actuator.apply(&actions, &mut outcomes);
        done += outcomes.iter().filter(|o| **o == Outcome::Done).count() as u64;
        gone += outcomes.iter().filter(|o| **o == Outcome::Gone).count() as u64;
        engine.tick();
        if let Some(status) = program.child.try_wait().map_err(|e| e.to_string())? {
            break status;
        }
    };
    ensure(status.success(), || format!("contents were lost: {status}"))?;
    // The manager notices the end by itself.
    let line = until(&mut engine, |e| {
        Ok((e.idle(), "waiting for the end to be noticed".to_owned()))
    });
    line?;
    ensure(done > 100, || format!("only {done} pages moved"))?;
    Ok(Some(format!(
        "{done} moves, {gone} pages were gone when their turn came"
    )))
}

fn idle_bits_tell_touched_pages_from_untouched_exactly() -> Check {
    let processes = SharedProcesses::default();
    let mut tracker = match IdleBitmap::open(processes.clone()) {
        Ok(tracker) => tracker,
        Err(e) => {
            return Ok(Some(format!(
                "SKIPPED: this kernel has no idle page tracking ({e}); see tests/vm/kernel"
            )));
        }
    };
    let mut program = Program::start("hot", 4)?;
    let id = processes
        .borrow_mut()
        .add(program.pid())
        .map_err(|e| e.to_string())?;
    program.order("idle")?;
    let pages: Vec<PageKey> = program
        .pages(0, 4)
        .into_iter()
        .map(|p| PageKey::new(id, p))
        .collect();
    let mut ask = || {
        let mut touches = Vec::new();
        tracker
            .observe(&pages, &mut touches)
            .map(|()| touches)
            .map_err(|e| e.to_string())
    };
    // New pages may still wait in a per-processor batch, where the kernel cannot mark them: ask until all are
    // armed.
    let mut patience = Patience::new();
    while ask()?.iter().any(|t| *t != Touch::Idle) {
        program.order("fault")?;
        patience.turn(|| "some pages cannot be marked idle".to_owned())?;
    }
    program.order("touch 2")?;
    let touches = ask()?;
    let wrong = |i: usize, t: &Touch| (*t == Touch::Idle) == i.is_multiple_of(2);
    let count = touches.iter().enumerate().filter(|(i, t)| wrong(*i, t)).count();
    ensure(count == 0, || {
        format!("{count} of {} pages judged wrongly", touches.len())
    })?;
    ensure(ask()?.iter().all(|t| *t == Touch::Idle), || {
        "not idle again after the look".to_owned()
    })?;
    Ok(Some(format!(
        "{} pages, every second touched, none judged wrongly",
        touches.len()
    )))
}

/// DAMON's answers against what the program really does, through a change. In huge pages, each of which is
/// one stretch of physical memory: base pages may lie scattered among everybody else's, and then no region is
/// theirs alone.
fn damon_tells_hot_memory_from_cold() -> Check {
    if std::env::var_os("VARVE_VM_GUEST").is_none() && std::env::var_os("VARVE_VM_DAMON").is_none() {
        let why = "SKIPPED: samples, so a busy machine may spoil it; VARVE_VM_DAMON=1 runs it here";
        return Ok(Some(why.to_owned()));
    }
    let config = DamonConfig {
        sample_us: 20_000,
        aggregate_us: 400_000,
        max_regions: 400,
        ..DamonConfig::default()
    };
    let processes = SharedProcesses::default();
    let mut tracker = match Damon::open(config, processes.clone()) {
        Ok(tracker) => tracker,
        Err(e) => return Ok(Some(format!("SKIPPED: no DAMON ({e})"))),
    };
    let mut program = Program::start("hot", 64)?;
    let id = processes
        .borrow_mut()
        .add(program.pid())
        .map_err(|e| e.to_string())?;
    let pages: Vec<PageKey> = program
        .pages(0, 64)
        .into_iter()
        .map(|p| PageKey::new(id, p))
        .collect();
    let first = program.base.region();
    let make: Vec<Action> = (0..32)
        .map(|i| Action::Collapse {
            proc: id,
            region: HugeIndex(first.0 + i),
        })
        .collect();
    let mut outcomes = Vec::new();
    KernelActuator::new(processes.clone(), Vec::new()).apply(&make, &mut outcomes);
    let made = outcomes.iter().filter(|o| **o == Outcome::Done).count();
    if made < 32 {
        return Ok(Some(format!(
            "SKIPPED: the kernel has {made} of 32 huge pages to give"
        )));
    }
    let mut said = Vec::new();
    for (order, hot) in [("hot 0 32", 0..8192usize), ("hot 32 64", 8192..16384)] {
        program.order(order)?;
        let mut patience = Patience::new();
        loop {
            std::thread::sleep(Duration::from_millis(410));
            let mut touches = Vec::new();
            tracker.observe(&pages, &mut touches).map_err(|e| e.to_string())?;
            let count = |touch: Touch, inside: bool| {
                let of = touches
                    .iter()
                    .enumerate()
                    .filter(|(i, t)| hot.contains(i) == inside && **t == touch);
                of.count()
            };
            let (hot_read, hot_idle) = (count(Touch::Read, true), count(Touch::Idle, true));
            let (cold_read, cold_idle) = (count(Touch::Read, false), count(Touch::Idle, false));
            let what = format!(
                "{order}: {hot_read} of {} hot pages seen touched, {cold_idle} of {} cold ones untouched",
                hot_read + hot_idle,
                cold_read + cold_idle
            );
            let known = hot_read + hot_idle > 4096 && cold_read + cold_idle > 4096;
            let right = hot_read >= 9 * hot_idle && cold_idle >= 9 * cold_read;
            if known && right {
                said.push(what);
                break;
            }
            patience.turns += 5;
            patience.turn(|| what)?;
        }
    }
    Ok(Some(said.join("; ")))
}

/// How many pages of a program are merged.
fn merged(program: &Program) -> Result<u64, String> {
    let text = std::fs::read_to_string(format!("/proc/{}/ksm_merging_pages", program.pid()))
        .map_err(|e| e.to_string())?;
    text.trim()
        .parse()
        .map_err(|_| format!("ksm_merging_pages says {text:?}"))
}

/// Same-page merging of the whole machine, on as long as this lives.
struct Merging;

impl Merging {
    fn on() -> Result<Option<Self>, String> {
        if std::env::var_os("VARVE_VM_GUEST").is_none()
            || !std::path::Path::new("/sys/kernel/mm/ksm/run").exists()
        {
            return Ok(None);
        }
        let on = Self;
        for (file, value) in [("pages_to_scan", "5000"), ("sleep_millisecs", "20"), ("run", "1")] {
            std::fs::write(format!("/sys/kernel/mm/ksm/{file}"), value).map_err(|e| e.to_string())?;
        }
        Ok(Some(on))
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        for value in ["2", "0"] {
            let _ = std::fs::write("/sys/kernel/mm/ksm/run", value);
        }
    }
}

const NO_MERGING: &str = "SKIPPED: switches same-page merging of the whole machine, only in the test machine";

/// A program that knows of no manager: its merged memory stays merged. What the kernel says to taking it back
/// is told.
fn merged_memory_of_a_stranger_is_left_alone() -> Check {
    let Some(_merging) = Merging::on()? else {
        return Ok(Some(NO_MERGING.to_owned()));
    };
    // Without access bits nothing counts as frequently used: the policy must leave merged regions alone.
    let text = "tiering = false\ntracker = \"none\"\nscan_cpu_share = 0.5\nwork_cpu_share = 1.0\n\
        [ingens]\nperiod_ms = 50\nscan_period_ms = 100\nscan_bytes = 1073741824\nexclude_ms = 0\n";
    let mut engine = Engine::new(PolicyFile::parse(text).map_err(|e| e.to_string())?);
    let mut program = Program::start("stranger", 8)?;
    let shared = until(&mut engine, |_| {
        let now = merged(&program)?;
        Ok((now > 1900, format!("{now} of 2048 pages merged")))
    })?;
    let id = engine.attach(program.pid()).map_err(|e| e.to_string())?;
    for _ in 0..60 {
        std::thread::sleep(engine.tick().min(Duration::from_millis(100)));
    }
    let after = merged(&program)?;
    ensure(after > 1900, || {
        format!("the policy took merged memory back: {after} left")
    })?;
    let first = program.base.region();
    let take: Vec<Action> = (0..4)
        .map(|i| Action::Collapse {
            proc: id,
            region: HugeIndex(first.0 + i),
        })
        .collect();
    let outcomes = engine.carry_out(&take);
    let taken = merged(&program)?;
    let answer = program.order("check")?;
    ensure(answer == "ok", || format!("contents: {answer}"))?;
    Ok(Some(format!(
        "{shared}; after 60 turns of the policy {after}; taking 4 regions back: {outcomes:?}, {taken} \
        merged right after"
    )))
}

/// Compaction ends when a round has moved enough.
fn compaction_is_bounded_by_what_it_moved() -> Check {
    if std::env::var_os("VARVE_VM_GUEST").is_none() {
        return Ok(Some(
            "SKIPPED: moves memory of the whole machine, only in the test machine".to_owned(),
        ));
    }
    let mut engine = Engine::new(PolicyFile::default());
    if !engine.probe().has("compaction") {
        return Ok(Some("SKIPPED: this kernel cannot compact".to_owned()));
    }
    let mut said = Vec::new();
    for bytes in [4 << 20, 1 << 40] {
        let mut program = Program::start("sleep", 160)?;
        program.order("holes")?;
        let fmfi = machine::view(&[]).fmfi.unwrap_or(0.0);
        let before = engine.snapshot();
        let outcomes = engine.carry_out(&[Action::Compact { bytes }]);
        let after = engine.snapshot();
        ensure(outcomes == [Outcome::Done], || {
            format!("compaction gave {outcomes:?}")
        })?;
        said.push(format!(
            "bound {} MiB: {:.1} MiB moved in {:.0} ms, {} free huge pages gained, fragmentation {fmfi:.2} \
            to {:.2}",
            bytes >> 20,
            (after.compaction_bytes - before.compaction_bytes) as f64 / f64::from(1 << 20),
            (after.compaction_s - before.compaction_s) * 1e3,
            after.compaction_gained - before.compaction_gained,
            machine::view(&[]).fmfi.unwrap_or(0.0)
        ));
    }
    Ok(Some(said.join("; ")))
}

fn merging_stops_where_it_is_denied() -> Check {
    let Some(_merging) = Merging::on()? else {
        return Ok(Some(NO_MERGING.to_owned()));
    };
    let mut engine = engine(&[(0, None), (2, None)])?;
    let mut program = Program::start("same", 8)?;
    let id = engine.attach(program.pid()).map_err(|e| e.to_string())?;
    let mut connected = false;
    until(&mut engine, |e| {
        connected |= e.cooperates(id);
        Ok((connected, "waiting for the program to cooperate".to_owned()))
    })?;
    let first = program.base.region();
    let sharing = |allow| {
        (0..4).map(move |i| Action::Sharing {
            proc: id,
            region: HugeIndex(first.0 + i),
            allow,
        })
    };
    let apply = |engine: &mut Engine, allow| -> Result<(), String> {
        let outcomes = engine.carry_out(&sharing(allow).collect::<Vec<_>>());
        ensure(outcomes.iter().all(|o| *o == Outcome::Done), || {
            format!("{outcomes:?}")
        })
    };
    apply(&mut engine, true)?;
    let shared = until(&mut engine, |_| {
        let now = merged(&program)?;
        Ok((now > 1000, format!("{now} pages merged")))
    })?;
    apply(&mut engine, false)?;
    let private = until(&mut engine, |_| {
        let now = merged(&program)?;
        Ok((now == 0, format!("{now} merged after denial")))
    })?;
    let answer = program.order("check")?;
    ensure(answer == "ok", || format!("contents: {answer}"))?;
    Ok(Some(format!("{shared}, {private}")))
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "--child") {
        child::run(&args[2], args[3].parse().unwrap_or(1));
        return;
    }
    if args.iter().any(|a| a == "--list") {
        return;
    }
    let nodes = machine::nodes().len();
    let guest = std::env::var_os("VARVE_VM_GUEST").is_some();
    print!("{}", Probe::run());
    type Entry = (&'static str, fn() -> Check, bool);
    let checks: &[Entry] = &[
        (
            "pages_move_between_real_nodes",
            pages_move_between_real_nodes,
            true,
        ),
        (
            "hot_pages_end_on_the_fast_node_through_a_phase_change",
            hot_pages_end_on_the_fast_node_through_a_phase_change,
            true,
        ),
        (
            "second_process_gets_fast_memory_after_the_first_took_it_all",
            second_process_gets_fast_memory_after_the_first_took_it_all,
            true,
        ),
        (
            "three_tiers_sort_pages_by_heat",
            three_tiers_sort_pages_by_heat,
            true,
        ),
        ("locked_pages_are_left_alone", locked_pages_are_left_alone, true),
        (
            "contents_survive_every_change_of_address_space_while_migrating",
            contents_survive_every_change_of_address_space_while_migrating,
            true,
        ),
        (
            "idle_bits_tell_touched_pages_from_untouched_exactly",
            idle_bits_tell_touched_pages_from_untouched_exactly,
            false,
        ),
        (
            "damon_tells_hot_memory_from_cold",
            damon_tells_hot_memory_from_cold,
            false,
        ),
        (
            "merging_stops_where_it_is_denied",
            merging_stops_where_it_is_denied,
            false,
        ),
        (
            "merged_memory_of_a_stranger_is_left_alone",
            merged_memory_of_a_stranger_is_left_alone,
            false,
        ),
        (
            "compaction_is_bounded_by_what_it_moved",
            compaction_is_bounded_by_what_it_moved,
            false,
        ),
    ];
    let filter = args.get(1).filter(|a| !a.starts_with('-'));
    let (mut failed, mut ran) = (0, 0);
    for (name, check, needs_nodes) in checks {
        if filter.is_some_and(|f| !name.contains(f.as_str())) {
            continue;
        }
        if *needs_nodes && (nodes < 3 || !guest) {
            println!("test {name} ... SKIPPED: needs the three NUMA nodes of the test machine (tests/vm/ci)");
            continue;
        }
        // The last check's manager is gone; what it left must not look like a manager to the next one's
        // programs.
        let _ = std::fs::remove_file(socket());
        let began = Instant::now();
        let result = check();
        ran += 1;
        let took = began.elapsed().as_secs_f64();
        match result {
            Ok(what) => println!("test {name} ... ok ({took:.1} s) {}", what.unwrap_or_default()),
            Err(what) => {
                failed += 1;
                println!("test {name} ... FAILED ({took:.1} s): {what}");
            }
        }
        let _ = std::io::stdout().flush();
    }
    println!(
        "test result: {}. {ran} ran, {failed} failed",
        if failed == 0 { "ok" } else { "FAILED" }
    );
    std::process::exit(i32::from(failed > 0));
}
