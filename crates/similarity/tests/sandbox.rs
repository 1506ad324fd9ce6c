//! The worker's process: it answers, and whatever it tries besides ends it. This program is its own worker.
#![allow(clippy::expect_used)]

use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};
use std::time::Duration;
use varve_similarity::image::Form;
use varve_similarity::input::Limits;
use varve_similarity::sandbox::{self, Worker};

/// What a process that has been taken over might try; each must end it.
const ATTEMPTS: [(&str, fn()); 6] = [
    ("open", || drop(File::open("/etc/passwd"))),
    ("socket", || drop(std::net::UdpSocket::bind("127.0.0.1:0"))),
    ("fork", || drop(Command::new("/bin/true").spawn())),
    ("thread", || drop(std::thread::spawn(|| ()).join())),
    ("kill", || {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
    }),
    ("unlink", || drop(std::fs::remove_file("/nowhere"))),
];

fn limits() -> Limits {
    Limits {
        time: Duration::from_secs(30),
        memory_bytes: 512 << 20,
        ..Limits::default()
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("worker") => sandbox::work(&arguments[1..]),
        Some("hang") => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        Some("lie") => {
            print!("VPRF0000 what is no profile");
            ExitCode::SUCCESS
        }
        Some("attempt") => {
            sandbox::confine(&limits()).expect("confined");
            let named = ATTEMPTS.iter().find(|(name, _)| *name == arguments[1]);
            named.expect("it is one of them").1();
            // It was let through.
            ExitCode::SUCCESS
        }
        Some("memory") => {
            sandbox::confine(&limits()).expect("confined");
            let much = vec![1u8; 1 << 30];
            ExitCode::from(much[much.len() / 2] - 1)
        }
        Some("nothing") => {
            sandbox::confine(&limits()).expect("confined");
            ExitCode::SUCCESS
        }
        _ => {
            every_attempt_ends_the_process();
            worker_answers_with_a_profile();
            image_that_cannot_be_parsed_is_compared_by_blocks();
            worker_that_lies_or_hangs_is_told();
            worker_with_too_little_memory_says_what_to_raise();
            ExitCode::SUCCESS
        }
    }
}

fn own(argument: &str) -> Worker {
    Worker {
        program: std::env::current_exe().expect("its path"),
        arguments: vec![argument.into()],
    }
}

fn run(arguments: &[&str]) -> std::process::ExitStatus {
    let program = std::env::current_exe().expect("its path");
    let output = Command::new(program).args(arguments).output().expect("it starts");
    output.status
}

fn every_attempt_ends_the_process() {
    assert!(
        run(&["nothing"]).success(),
        "a process that tries nothing goes on"
    );
    for (name, _) in ATTEMPTS {
        let status = run(&["attempt", name]);
        assert_eq!(status.signal(), Some(31), "{name}: {status} (31 is SIGSYS)");
    }
    let status = run(&["memory"]);
    assert!(!status.success(), "1 GiB of 512 MiB: {status}");
    println!("every_attempt_ends_the_process ... ok");
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(bytes).expect("written");
    file.rewind().expect("at the start");
    file
}

fn worker_answers_with_a_profile() {
    let list = file(b"bash 5.2-3 x86_64 8154789\nzlib 1.3 100\n");
    let profile = own("worker")
        .profile("mine", &list, &limits())
        .expect("a profile");
    assert_eq!((profile.name.as_str(), profile.form), ("mine", Form::Packages));
    assert_eq!(profile.packages.len(), 2);
    let raw = file(&[7; 10_000]);
    let profile = own("worker").profile("raw", &raw, &limits()).expect("a profile");
    assert_eq!((profile.form, profile.bytes), (Form::Blocks, 3 * 4096));
    println!("worker_answers_with_a_profile ... ok");
}

fn image_that_cannot_be_parsed_is_compared_by_blocks() {
    // A name that claims 8 GiB: reading it needs more memory than there is, or ends as damaged.
    let mut archive = vec![0; 512];
    archive[..14].copy_from_slice(b"././@LongLink\0");
    archive[124..135].copy_from_slice(b"77777777777");
    archive[156] = b'L';
    archive[257..265].copy_from_slice(b"ustar  \0");
    let sum: u64 = archive.iter().map(|byte| u64::from(*byte)).sum::<u64>() + 8 * 32;
    archive[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    archive.extend(vec![b'x'; 100_000]);
    let profile = own("worker")
        .profile("bad", &file(&archive), &limits())
        .expect("a profile");
    assert_eq!(profile.form, Form::Blocks);
    assert!(
        profile
            .notes
            .iter()
            .any(|note| note.contains("compared by blocks")),
        "{:?}",
        profile.notes
    );
    println!("image_that_cannot_be_parsed_is_compared_by_blocks ... ok");
}

fn worker_that_lies_or_hangs_is_told() {
    let image = file(b"x");
    let error = own("lie").profile("x", &image, &limits()).expect_err("a lie");
    assert!(error.to_string().contains("no sensible answer"), "{error}");
    let short = Limits {
        time: Duration::ZERO,
        ..limits()
    };
    let error = own("hang").profile("x", &image, &short).expect_err("it hangs");
    assert!(error.to_string().contains("took longer"), "{error}");
    println!("worker_that_lies_or_hangs_is_told ... ok");
}

fn worker_with_too_little_memory_says_what_to_raise() {
    let image: Vec<u8> = (0..1_000_000u32)
        .flat_map(|n| n.wrapping_mul(n).to_le_bytes())
        .collect();
    let image = file(&image);
    for memory_bytes in [1, 4096, 1 << 20] {
        let limits = Limits {
            memory_bytes,
            ..limits()
        };
        let error = own("worker")
            .profile("x", &image, &limits)
            .expect_err("too little memory");
        let told = error.to_string();
        assert!(
            told.contains("raise --image-memory") && !told.contains("signal"),
            "{memory_bytes}: {told}"
        );
    }
    println!("worker_with_too_little_memory_says_what_to_raise ... ok");
}
