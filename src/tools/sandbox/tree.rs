//! The descendants of a process: how many there are, what memory they hold, and their end.
//!
//! `/proc` is read, since processes that have left their group and their session are found there
//! nevertheless. Its contents may be outdated at once, so killing is repeated until nothing is left.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

use rustix::event::{Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

/// The most rounds until all processes have ended; each kills what the previous one found.
const MOST_ROUNDS: usize = 10_000;
/// The most rounds until all processes are stopped.
const MOST_STOPPING_ROUNDS: usize = 500;
/// Consecutive rounds that find nothing before the tree counts as empty.
const EMPTY_ROUNDS: usize = 3;
/// The pause between two rounds.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Descendants at most; counting stops there.
const MOST_COUNTED: usize = 100_000;

/// What processes use together.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    /// Processes and threads.
    pub(super) tasks: u64,
    /// Bytes of their memory.
    pub(super) memory: u64,
}

/// The usage of a process and of its descendants, of which at most `most` are inspected: a fork bomb is
/// recognised by the first of them.
pub(super) fn usage_of(root: Pid, most: u64) -> Usage {
    let most = usize::try_from(most).unwrap_or(MOST_COUNTED).min(MOST_COUNTED);
    let page = rustix::param::page_size() as u64;
    let mut usage = Usage::default();
    for process in with_descendants(root.as_raw_pid(), most) {
        usage.tasks += threads(process);
        usage.memory += own_pages(process) * page;
    }
    usage
}

/// Processes and threads of this user, as far as they can be seen.
pub(super) fn tasks_of_user() -> u64 {
    let own = rustix::process::geteuid().as_raw();
    let is_own = |process: &i32| {
        fs::metadata(format!("/proc/{process}")).is_ok_and(|process| process.uid() == own)
    };
    numbers_in("/proc").into_iter().filter(is_own).map(threads).sum()
}

/// Kills all descendants of this process and collects them. This process must be their subreaper,
/// so that orphans among them become its children.
pub(super) fn end_descendants() {
    let own = rustix::process::getpid().as_raw_pid();
    stop_descendants(own);
    let mut empty = 0;
    for _ in 0..MOST_ROUNDS {
        if empty > EMPTY_ROUNDS {
            return;
        }
        let descendants: Vec<i32> = with_descendants(own, MOST_COUNTED)
            .into_iter()
            .filter(|process| *process != own)
            .collect();
        // Stopped first, so that none is started while others are killed.
        for signal in [Signal::STOP, Signal::KILL] {
            for process in descendants.iter().filter_map(|process| Pid::from_raw(*process)) {
                let _ = kill_process(process, signal);
            }
        }
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(None) => break,
                Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
                // No child, hence no descendant; checked again, because a process may just be reparented.
                Err(_) => {
                    empty += 1;
                    break;
                }
            }
        }
        let _ = poll(&mut [], Some(&PAUSE));
    }
}

/// Stops all descendants. None is killed before: stopped ones still count as processes, so that
/// processes that only start others reach the limit.
fn stop_descendants(own: i32) {
    let mut stopped = BTreeSet::from([own]);
    let mut empty = 0;
    for _ in 0..MOST_STOPPING_ROUNDS {
        if empty > EMPTY_ROUNDS {
            return;
        }
        let mut found = with_descendants(own, MOST_COUNTED);
        found.retain(|process| stopped.insert(*process));
        empty = if found.is_empty() { empty + 1 } else { 0 };
        for process in found.into_iter().filter_map(Pid::from_raw) {
            let _ = kill_process(process, Signal::STOP);
        }
    }
}

/// A process and its descendants, by the kernel's lists of children or, where it keeps none, by the
/// parents of all processes.
fn with_descendants(root: i32, most: usize) -> Vec<i32> {
    let mut found = vec![root];
    let mut next = 0;
    let keeps_lists = fs::exists(format!("/proc/{root}/task/{root}/children")).unwrap_or(false);
    let by_parent = if keeps_lists { BTreeMap::new() } else { by_parent() };
    while let Some(process) = found.get(next).copied().filter(|_| found.len() < most) {
        next += 1;
        if keeps_lists {
            for thread in numbers_in(&format!("/proc/{process}/task")) {
                let children = read(&format!("/proc/{process}/task/{thread}/children"));
                found.extend(children.split_whitespace().filter_map(|c| c.parse::<i32>().ok()));
            }
        } else {
            found.extend(by_parent.get(&process).into_iter().flatten());
        }
    }
    found
}

fn by_parent() -> BTreeMap<i32, Vec<i32>> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for process in numbers_in("/proc") {
        let stat = read(&format!("/proc/{process}/stat"));
        // The name may hold anything; behind its last bracket are the state and the parent.
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        if let Some(parent) = parent.and_then(|parent| parent.parse().ok()) {
            children.entry(parent).or_default().push(process);
        }
    }
    children
}

fn threads(process: i32) -> u64 {
    (numbers_in(&format!("/proc/{process}/task")).len() as u64).max(1)
}

/// Resident pages without those of files.
fn own_pages(process: i32) -> u64 {
    let status = read(&format!("/proc/{process}/statm"));
    let mut fields = status.split_whitespace().map(|field| field.parse::<u64>().unwrap_or(0));
    let (resident, shared) = (fields.nth(1).unwrap_or(0), fields.next().unwrap_or(0));
    resident.saturating_sub(shared) + shared_memory_pages(process)
}

/// Pages of memory that processes share and that belong to no file.
fn shared_memory_pages(process: i32) -> u64 {
    let status = read(&format!("/proc/{process}/status"));
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:"));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024 / rustix::param::page_size() as u64
}

fn numbers_in(directory: &str) -> Vec<i32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .take(MOST_COUNTED)
        .collect()
}

/// A small file of the kernel; empty if it does not exist.
fn read(path: &str) -> String {
    let mut text = String::new();
    let opened = fs::File::open(path).map(|file| file.take(1024 * 1024));
    match opened.and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => text,
        Err(_) => String::new(),
    }
}
