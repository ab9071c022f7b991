//! Figures of this process, as every Prometheus client names them, from `/proc`.
//!
//! Figures that cannot be read, e.g. where there is no `/proc`, are left out.

use std::fs;

use super::exposition::Exposition;

#[expect(clippy::cast_precision_loss, reason = "the figures of a process are far below 2^53")]
pub(super) fn write(exposition: &mut Exposition) {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).ok();
    let stat = read("stat").and_then(|text| Stat::of(&text));
    let ticks = |ticks: u64| ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    let page = rustix::param::page_size() as u64;
    let boot = fs::read_to_string("/proc/stat").ok().and_then(|text| boot_time(&text));
    let started = stat.as_ref().zip(boot).map(|(stat, boot)| boot as f64 + ticks(stat.started));
    let open = fs::read_dir("/proc/self/fd").ok().map(Iterator::count);
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let mut single = |name, kind, help, value: Option<f64>| {
        exposition.single((name, kind, help), value);
    };
    single(
        "process_cpu_seconds_total",
        "counter",
        "Processor time of the process in seconds.",
        stat.as_ref().map(|stat| ticks(stat.used)),
    );
    single(
        "process_resident_memory_bytes",
        "gauge",
        "Memory of the process that is in RAM.",
        stat.as_ref().map(|stat| (stat.resident_pages * page) as f64),
    );
    single(
        "process_virtual_memory_bytes",
        "gauge",
        "Address space of the process.",
        stat.as_ref().map(|stat| stat.virtual_bytes as f64),
    );
    single(
        "process_threads",
        "gauge",
        "Threads of the process.",
        stat.as_ref().map(|stat| stat.threads as f64),
    );
    single("process_open_fds", "gauge", "Open file descriptors.", open.map(|open| open as f64));
    single("process_max_fds", "gauge", "Most open file descriptors.", most.map(|most| most as f64));
    single(
        "process_start_time_seconds",
        "gauge",
        "When the process started, in seconds since 1970.",
        started,
    );
}

/// Fields of `/proc/self/stat`, see proc(5).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    /// Clock ticks in user and kernel mode.
    used: u64,
    threads: u64,
    /// Clock ticks after boot.
    started: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    fn of(text: &str) -> Option<Self> {
        // The name of the program, in parentheses, may have blanks and parentheses itself.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            used: field(14)? + field(15)?,
            threads: field(20)?,
            started: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

fn boot_time(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name() {
        let text = "7 (a ) b) S 1 7 7 0 -1 4194560 9 0 0 0 21 4 0 0 20 0 5 0 111 2000000 300 1844";
        let expected = Stat {
            used: 25,
            threads: 5,
            started: 111,
            virtual_bytes: 2_000_000,
            resident_pages: 300,
        };
        assert_eq!(Stat::of(text), Some(expected));
        assert_eq!(Stat::of("7 (a) S"), None);
        assert_eq!(boot_time("cpu 1\nbtime 1700000000\n"), Some(1_700_000_000));
    }
}
