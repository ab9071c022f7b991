//! The sandbox with real programs: what they reach, what they use, how they end.
//!
//! Programs are tried through a shell and through Python, with nothing but the sandbox between them
//! and the machine: what a tool would refuse before that is tested elsewhere.

use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use toolloop::run::SandboxLevel;
use toolloop::tools::sandbox::StartablePrograms;
use toolloop::tools::sandbox::plan::{
    Access, Command, Grant, GrantKind, Limits, Reach, Step, Stopped, When,
};
use toolloop::tools::sandbox::reach::system;
use toolloop::tools::sandbox::{Job, JobResult, Sandbox, SandboxError, Settings};

/// For programs that end by themselves, also where the machine has much else to do.
const ENOUGH: Duration = Duration::from_mins(2);
/// For programs that may hang until their time is up.
const BRIEF: Duration = Duration::from_secs(5);

/// A place with a workspace in it, a secret beside that, and a sandbox.
pub struct Bench {
    pub home: TempDir,
    pub sandbox: Arc<Sandbox>,
}

pub fn settings() -> Settings {
    Settings {
        path: ["/usr/local/bin", "/usr/bin", "/bin"].map(PathBuf::from).to_vec(),
        environment: Vec::new(),
        require: true,
        timeout: Duration::from_secs(20),
        max_output: 64 * 1024,
        limits: Limits {
            memory: 256 * 1024 * 1024,
            cpu_seconds: 4,
            processes: 64,
            file_size: 16 * 1024 * 1024,
            open_files: 256,
        },
        namespaces: true,
        supervisor: PathBuf::from(env!("CARGO_BIN_EXE_toolloop")),
    }
}

impl Bench {
    pub fn new() -> Self {
        Self::with(settings())
    }

    pub fn with(settings: Settings) -> Self {
        let home = TempDir::new().unwrap();
        fs::create_dir(home.path().join("workspace")).unwrap();
        fs::write(home.path().join("secret"), "canary").unwrap();
        fs::write(home.path().join("workspace/inside.txt"), "inside\n").unwrap();
        Self { home, sandbox: Arc::new(Sandbox::new(settings)) }
    }

    pub fn workspace(&self) -> PathBuf {
        self.home.path().join("workspace")
    }

    fn handle(&self) -> OwnedFd {
        fs::File::open(self.workspace()).unwrap().into()
    }

    pub async fn run(&self, program: &str, arguments: &[&str]) -> JobResult {
        self.run_with(program, arguments, all()).await
    }

    pub async fn run_with(&self, program: &str, arguments: &[&str], reach: Reach) -> JobResult {
        self.tried(program, arguments, reach)
            .await
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    async fn tried(
        &self,
        program: &str,
        arguments: &[&str],
        mut reach: Reach,
    ) -> Result<JobResult, SandboxError> {
        let command = Command {
            program: program.to_owned(),
            arguments: [&[program], arguments].concat().iter().map(|a| (*a).to_owned()).collect(),
            environment: vec![],
            redirections: vec![],
            is_read_only: false,
        };
        let settings = self.sandbox.settings();
        reach.grants.extend(system(&settings.path, StartablePrograms::All));
        let handle = self.handle();
        let job = Job {
            steps: vec![Step { when: When::Always, negated: false, commands: vec![command] }],
            directory: ".".into(),
            workspace: &handle,
            environment: vec![],
            input: None,
            reach,
            timeout: settings.timeout,
            largest_file: None,
            max_stdout: None,
            way_out: None,
            each_line: None,
            held: None,
        };
        self.sandbox.run(job).await
    }

    pub async fn sh(&self, script: &str) -> JobResult {
        self.run("/bin/sh", &["-c", script]).await
    }

    pub async fn python(&self, script: &str) -> JobResult {
        self.run("/usr/bin/python3", &["-I", "-c", script]).await
    }
}

#[tokio::test]
async fn this_kernel_holds_programs() {
    let bench = Bench::new();
    let kernel = bench.sandbox.kernel().await;
    println!("{kernel:?}");
    assert_eq!(kernel.level(), SandboxLevel::Enforced, "{kernel:?}");
}

#[tokio::test]
async fn a_program_runs_and_says_how_it_ended() {
    let bench = Bench::new();
    let ran = bench.sh("cat inside.txt; echo wrong >&2; exit 3").await;
    assert_eq!((ran.exit_code, ran.stdout.text.as_str()), (Some(3), "inside\n"), "{ran:?}");
    assert_eq!(ran.stderr.text, "wrong\n");
    assert_eq!(ran.level, SandboxLevel::Enforced);
    let ran = bench.sh("kill -9 $$").await;
    assert_eq!(ran.exit_code, Some(137), "{ran:?}");
    let ran =
        bench.sh("echo new > made.txt && mkdir d && mv made.txt d/ && chmod 600 d/made.txt").await;
    assert_eq!(ran.exit_code, Some(0), "{ran:?}");
    assert_eq!(fs::read_to_string(bench.workspace().join("d/made.txt")).unwrap(), "new\n");
    let ran =
        bench.sh("env | sort; echo $TMPDIR > $TMPDIR/x && cat $TMPDIR/x; ls /proc/self/fd").await;
    let names: Vec<&str> =
        ran.stdout.text.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    assert_eq!(names, ["HOME", "LANG", "PATH", "PWD", "TMPDIR"], "{ran:?}");
    let open =
        "import os\nfor n in range(3, 300):\n  try: os.fstat(n); print(n)\n  except OSError: pass";
    let ran = bench.python(open).await;
    assert_eq!(ran.stdout.text, "", "no descriptor is inherited: {ran:?}");
}

#[tokio::test]
async fn a_program_that_leaves_its_group_says_how_it_ended() {
    for (bench, how) in benches(ENOUGH) {
        for (leave, code) in [("setpgrp", 3), ("setsid", 4)] {
            let script = format!("import os, sys\nos.{leave}()\nprint('left')\nsys.exit({code})");
            let ran = bench.python(&script).await;
            assert_eq!(ran.exit_code, Some(code), "{how}, {leave}: {ran:?}");
            assert_eq!(ran.stdout.text, "left\n", "{how}, {leave}");
        }
        let ran = bench.run("/usr/bin/timeout", &["1", "sleep", "60"]).await;
        assert_eq!((ran.exit_code, ran.stopped), (Some(124), None), "{how}: {ran:?}");
    }
}

#[tokio::test]
async fn a_program_that_takes_too_much_is_ended() {
    let bench = Bench::with(Settings { timeout: ENOUGH, ..settings() });
    let shares = "import mmap; mmap.mmap(-1, 4096)";
    let together = "import os\nfor i in range(7):\n  if os.fork() == 0: break\nx = bytearray(1 << 27)\nx[::4096] = \
                    b'1' * 32768\nimport time; time.sleep(9)";
    let table = [
        ("x = bytearray(1 << 30)", None),
        (shares, None),
        (together, Some(Stopped::Memory)),
        ("while True: pass", Some(Stopped::CpuSeconds)),
        ("open('big', 'wb').write(b'x' * (1 << 26))", None),
        ("import os\nwhile True: os.fork()", None),
        (
            "import os,time\nfor i in range(80):\n  if os.fork() == 0: time.sleep(9)\ntime.sleep(9)",
            None,
        ),
        ("import os\nl = [os.open('/dev/null', 0) for i in range(300)]", None),
        ("import os\nfor i in range(70000): open(os.environ['TMPDIR'] + f'/{i}', 'w')", None),
        ("import ctypes; assert ctypes.CDLL(None).memfd_create(b'x', 0) >= 0", None),
    ];
    for (script, stopped) in table {
        let since = Instant::now();
        let ran = bench.python(script).await;
        println!("{script:?}: {:?} {:?} {:?}", since.elapsed(), ran.exit_code, ran.stopped);
        assert_ne!(ran.exit_code, Some(0), "{script}: {ran:?}");
        if stopped.is_some() {
            assert_eq!(ran.stopped, stopped, "{script}: {ran:?}");
        }
    }
}

#[tokio::test]
async fn a_flood_of_output_is_kept_at_its_ends() {
    let limits = Limits { cpu_seconds: 60, ..settings().limits };
    let bench = Bench::with(Settings { timeout: ENOUGH, limits, ..settings() });
    let ran =
        bench.sh("echo first; head -c 300000000 /dev/zero | tr '\\0' x; echo; echo last").await;
    assert_eq!(ran.exit_code, Some(0), "{:?}", ran.stopped);
    assert!(ran.stdout.text.starts_with("first\n") && ran.stdout.text.ends_with("last\n"));
    assert!(ran.stdout.omitted > 299_000_000, "{}", ran.stdout.omitted);
    assert!(ran.stdout.text.len() < 66_000);
}

/// Lines of a corpus: a program, and what it is given to run.
fn ways(corpus: &str) -> Vec<(Vec<&str>, &str)> {
    let programs = |name: &str| match name {
        "python" => vec!["/usr/bin/python3", "-I", "-c"],
        "sh" => vec!["/bin/sh", "-c"],
        "bash" => vec!["/bin/bash", "-c"],
        "perl" => vec!["/usr/bin/perl", "-e"],
        _ => vec!["/usr/bin/node", "-e"],
    };
    let lines = corpus.lines().filter_map(|line| line.split_once(": "));
    lines.map(|(name, script)| (programs(name), script)).collect()
}

fn benches(timeout: Duration) -> [(Bench, &'static str); 2] {
    let limits = Limits { memory: 2 << 30, ..settings().limits };
    let settings = Settings { timeout, limits, ..settings() };
    let without = Settings { namespaces: false, ..settings.clone() };
    [(Bench::with(settings), "with namespaces"), (Bench::with(without), "without")]
}

#[tokio::test(flavor = "multi_thread")]
async fn no_way_leads_to_the_network() {
    let ways = ways(include_str!("../corpora/ways_to_the_network.txt"));
    assert!(ways.len() >= 40);
    for (bench, how) in benches(BRIEF) {
        let at = |name: &str| bench.home.path().join(name);
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let tcp6 = TcpListener::bind(("::1", port)).ok();
        let udp = UdpSocket::bind(("127.0.0.1", port)).unwrap();
        let unix = UnixListener::bind(at("stream.sock")).unwrap();
        let datagrams = UnixDatagram::bind(at("datagram.sock")).unwrap();
        let name = format!("toolloop-test-{port}");
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let hidden = UnixListener::bind_addr(&address).unwrap();
        tcp.set_nonblocking(true).unwrap();
        udp.set_nonblocking(true).unwrap();
        for listener in [&unix, &hidden] {
            listener.set_nonblocking(true).unwrap();
        }
        datagrams.set_nonblocking(true).unwrap();
        let mut buffer = [0; 8];
        for (program, script) in &ways {
            let script = script
                .replace("{PORT}", &port.to_string())
                .replace("{PID}", &std::process::id().to_string())
                .replace("{UNIX}", at("stream.sock").to_str().unwrap())
                .replace("{DGRAM}", at("datagram.sock").to_str().unwrap())
                .replace("{ABSTRACT}", &name);
            let arguments = [&program[1..], &[script.as_str()]].concat();
            let ran = bench.run(program[0], &arguments).await;
            assert!(tcp.accept().is_err(), "{how}: {script}: {ran:?}");
            assert!(tcp6.as_ref().is_none_or(|tcp| {
                tcp.set_nonblocking(true).unwrap();
                tcp.accept().is_err()
            }));
            assert!(udp.recv(&mut buffer).is_err(), "{how}: {script}: {ran:?}");
            assert!(unix.accept().is_err(), "{how}: {script}: {ran:?}");
            assert!(hidden.accept().is_err(), "{how}: {script}: {ran:?}");
            assert!(datagrams.recv(&mut buffer).is_err(), "{how}: {script}: {ran:?}");
            assert_ne!(ran.exit_code, Some(0), "{how}: {script}: {ran:?}");
        }
    }
    // What is left of sockets works: processes of one program talk to one another.
    let script =
        "import socket; a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'";
    let ran = Bench::new().python(script).await;
    assert_eq!(ran.exit_code, Some(0), "{ran:?}");
}

/// Processes that have an argument.
fn processes_with(argument: &str) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let has = |process: &fs::DirEntry| {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes())
    };
    let numbers = processes.filter(has).filter_map(|it| it.file_name().to_str()?.parse().ok());
    numbers.collect()
}

fn alive(argument: &str) -> usize {
    processes_with(argument).len()
}

/// The whole workspace, and nothing denied.
fn all() -> Reach {
    let access = Access { read: true, write: true, execute: true };
    let grant = Grant { path: ".".into(), access, kind: GrantKind::Tree };
    Reach { grants: vec![grant], masked: vec![] }
}

async fn until_none(argument: &str, what: &str) {
    let since = Instant::now();
    while alive(argument) > 0 {
        assert!(since.elapsed() < Duration::from_mins(1), "{what} lives on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_its_call() {
    let mut ways = ways(include_str!("../corpora/ways_to_survive.txt"));
    assert!(ways.len() >= 30);
    // One that is there until its time is up.
    ways.push((vec!["/bin/sh", "-c"], "sleep {TOKEN}; :"));
    let mut started = 0;
    // Without a namespace, descendants are found in /proc: as good as that is, and not proven here.
    for (at, (bench, how)) in benches(BRIEF).into_iter().take(1).enumerate() {
        let bench = Arc::new(bench);
        bench.sandbox.kernel().await;
        for (number, (program, script)) in ways.iter().enumerate() {
            // Ended by itself or by its time; and given up in the middle.
            for given_up in [false, true] {
                let kind = usize::from(given_up);
                let token = format!("8{at}{kind}{number:03}.{}", std::process::id());
                let script = script.replace("{TOKEN}", &token);
                let arguments: Vec<String> =
                    program[1..].iter().map(|a| (*a).to_owned()).chain([script.clone()]).collect();
                let (running, program) = (Arc::clone(&bench), program[0].to_owned());
                let task = tokio::spawn(async move {
                    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                    let limit = Duration::from_millis(if given_up { 400 } else { 8000 });
                    let _ = tokio::time::timeout(limit, running.run(&program, &arguments)).await;
                });
                let mut was_alive = false;
                while !task.is_finished() {
                    was_alive |= alive(&token) > 0;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                task.await.unwrap();
                started += usize::from(was_alive);
                until_none(&token, &format!("{how}, given up {given_up}: {script}")).await;
            }
        }
    }
    assert!(started > 0, "no program was ever seen");
}

/// Another process of this user, for as long as it is held.
struct Neighbour(std::process::Child);

impl Neighbour {
    fn new() -> Self {
        Self(std::process::Command::new("sleep").arg("600").spawn().unwrap())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_change_nothing_about_other_processes() {
    const CALL: &str = "import ctypes, os, resource, sys\nlibc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n  if \
                        libc.syscall(*a) == -1: raise OSError(ctypes.get_errno())\nP = int(sys.argv[1])\n";
    let refused = [
        "resource.prlimit(P, resource.RLIMIT_NOFILE, (0, 0))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
        "call(302, P, 7, ctypes.create_string_buffer(16), None)",
        "os.setpriority(os.PRIO_PROCESS, P, 19)",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "call(251, 1, P, 3 << 13)",
        "call(251, 3, 0, 3 << 13)",
        "os.sched_setaffinity(P, {0})",
        "os.sched_setaffinity(0, range(os.cpu_count()))",
        "os.sched_setscheduler(P, os.SCHED_IDLE, os.sched_param(0))",
        "call(65, 0, ctypes.create_string_buffer(6), 1)",
        "call(70, 0, ctypes.create_string_buffer(8), 0, 0, 0)",
        "call(71, 0, 0, None)",
        "call(241, b'/x')",
        "fd = libc.inotify_init(); call(254, fd, b'/', 0xfff)",
        "call(458, None, None, 0, 0)",
        "call(463, -1, b'x', 0, b'user.a', None, 0)",
    ];
    let possible = [
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
        "os.nice(1)",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    ];
    for (bench, how) in benches(ENOUGH) {
        let neighbour = Neighbour::new();
        let process = neighbour.0.id().to_string();
        for (way, expected) in
            refused.iter().map(|way| (way, false)).chain(possible.iter().map(|way| (way, true)))
        {
            let of_user = way.contains("PRIO_USER, 0") || way.contains("251, 3, 0");
            if how == "with namespaces" && of_user {
                continue; // there are no others of the user
            }
            let script = format!("{CALL}{way}");
            let ran = bench.run("/usr/bin/python3", &["-I", "-c", &script, &process]).await;
            assert_eq!(ran.exit_code == Some(0), expected, "{how}: {way}: {ran:?}");
        }
        let limits = fs::read_to_string(format!("/proc/{process}/limits")).unwrap();
        let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        assert!(!files.contains(" 0 "), "{how}: {files}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_mounts_no_request_changes_attributes_of_files() {
    let [_, (bench, how)] = benches(ENOUGH);
    for request in ["0x40086602", "0x401c5820", "0x40087602", "0x40806685"] {
        let script = format!(
            "import fcntl, os\ntry: fcntl.ioctl(os.open('.', os.O_RDONLY), {request}, bytes(128))\n\
             except OSError as e: print(e.errno)"
        );
        let ran = bench.run("/usr/bin/python3", &["-I", "-c", &script]).await;
        assert_eq!(ran.stdout.text.trim(), "1", "{how}: {request}: {ran:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_leave_a_processor_to_the_service() {
    let all = rustix::thread::sched_getaffinity(None).unwrap().count();
    for (bench, how) in benches(ENOUGH) {
        let script = "import os; print(len(os.sched_getaffinity(0)))";
        let ran = bench.run("/usr/bin/python3", &["-I", "-c", script]).await;
        assert_eq!(ran.stdout.text.trim(), (all - 1).max(1).to_string(), "{how}: {ran:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_the_first_to_go_where_memory_runs_out() {
    for (at, (bench, how)) in benches(ENOUGH).into_iter().enumerate() {
        let token = format!("7{at}.{}", std::process::id());
        let arguments = [token.as_str()];
        let waits = bench.run("/bin/sleep", &arguments);
        let looks = async {
            loop {
                if let Some(process) = processes_with(&token).first() {
                    return fs::read_to_string(format!("/proc/{process}/oom_score_adj")).unwrap();
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let score = tokio::select! {
            score = looks => score,
            ran = waits => panic!("{how}: {ran:?}"),
        };
        assert_eq!(score.trim(), "1000", "{how}");
    }
}

fn parent_of(process: i32) -> i32 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    parent.map_or(0, |parent| parent.trim().parse().unwrap())
}

/// The ancestor of a program that the fork server of this process started.
fn supervisor_of(program: i32) -> rustix::process::Pid {
    let parent = parent_of(program);
    if parent_of(parent).cast_unsigned() == std::process::id() {
        return rustix::process::Pid::from_raw(program).unwrap();
    }
    supervisor_of(parent)
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_end_with_their_supervisor() {
    for (at, (bench, how)) in benches(ENOUGH).into_iter().enumerate() {
        bench.sandbox.kernel().await;
        let token = format!("6{at}.{}", std::process::id());
        let (bench, argument) = (Arc::new(bench), token.clone());
        let running = tokio::spawn(async move {
            let _ = bench.tried("/bin/sleep", &[&argument], all()).await;
        });
        while alive(&token) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let supervisor = supervisor_of(processes_with(&token)[0]);
        rustix::process::kill_process(supervisor, rustix::process::Signal::KILL).unwrap();
        until_none(&token, how).await;
        running.await.unwrap();
    }
}

/// A bench whose fork server is known by an argument of its own.
fn named_bench(place: &TempDir, timeout: Duration) -> (Bench, String) {
    let supervisor = place.path().join("supervisor");
    std::os::unix::fs::symlink(settings().supervisor, &supervisor).unwrap();
    let named = supervisor.to_str().unwrap().to_owned();
    (Bench::with(Settings { supervisor, timeout, ..settings() }), named)
}

/// The process that was started with this argument, and not a copy of it.
fn fork_server(named: &str) -> Option<rustix::process::Pid> {
    let ours = |process: &i32| parent_of(*process).cast_unsigned() == std::process::id();
    rustix::process::Pid::from_raw(processes_with(named).into_iter().find(ours)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_server_that_is_stopped_holds_up_one_call() {
    let place = TempDir::new().unwrap();
    let (bench, named) = named_bench(&place, Duration::from_secs(15));
    bench.sandbox.kernel().await;
    until_none(&named, "the fork server of the probe").await;
    assert_eq!(bench.run("/bin/echo", &["zero"]).await.stdout.text, "zero\n");
    let server = fork_server(&named).unwrap();
    rustix::process::kill_process(server, rustix::process::Signal::STOP).unwrap();
    let late = bench.tried("/bin/echo", &["one"], all()).await.unwrap_err();
    assert!(late.to_string().contains("timed out"), "{late}");
    assert_eq!(bench.run("/bin/echo", &["two"]).await.stdout.text, "two\n");
    assert_ne!(fork_server(&named), Some(server));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fork_server_is_kept_and_may_be_lost() {
    let place = TempDir::new().unwrap();
    let (bench, named) = named_bench(&place, settings().timeout);
    let bench = Arc::new(bench);
    let mut known = None;
    for n in 0..4 {
        let say = format!("touch on{n}; while ! [ -e go{n} ]; do sleep 0.01; done; echo {n}");
        let running = Arc::clone(&bench);
        let call = tokio::spawn(async move { running.sh(&say).await.stdout.text });
        while !bench.workspace().join(format!("on{n}")).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Calls go on without it, and the next one starts another.
        let server = fork_server(&named);
        let is_lost = n % 2 == 1;
        assert_eq!(is_lost, known == server, "call {n}");
        known = server;
        if is_lost {
            let signal = rustix::process::Signal::KILL;
            rustix::process::kill_process(server.unwrap(), signal).unwrap();
        }
        fs::write(bench.workspace().join(format!("go{n}")), "").unwrap();
        assert_eq!(call.await.unwrap(), format!("{n}\n"));
    }
    drop(bench);
    until_none(&named, "the fork server").await;
}

#[tokio::test]
async fn denied_files_do_not_move_along_with_their_directory() {
    let bench = Bench::new();
    let deep = bench.workspace().join("conf/more/secrets");
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("s.txt"), "canary").unwrap();
    let reach = || Reach { masked: vec!["conf/more/secrets".into()], ..all() };
    for script in [
        "mv conf conf2; cat conf2/more/secrets/s.txt",
        "mv conf/more conf/other; cat conf/other/secrets/s.txt",
        "mv conf/more/secrets x; cat x/s.txt",
        "rm -rf conf",
    ] {
        let ran = bench.run_with("/bin/sh", &["-c", script], reach()).await;
        assert_ne!(ran.exit_code, Some(0), "{script}: {ran:?}");
        assert!(!ran.stdout.text.contains("canary"), "{script}: {ran:?}");
        assert_eq!(fs::read_to_string(deep.join("s.txt")).unwrap(), "canary", "{script}");
    }
    let beside = "echo a > conf/a && mv conf/a conf/more/a && cat conf/more/a && rm conf/more/a";
    let ran = bench.run_with("/bin/sh", &["-c", beside], reach()).await;
    assert_eq!(ran.stdout.text, "a\n", "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_calls_at_once_all_run() {
    let bench = Arc::new(Bench::with(Settings { timeout: ENOUGH, ..settings() }));
    bench.sandbox.kernel().await;
    let calls = (0..64).map(|n| {
        let bench = Arc::clone(&bench);
        tokio::spawn(async move { bench.sh(&format!("echo {n} | cat")).await.stdout.text })
    });
    for (n, call) in calls.collect::<Vec<_>>().into_iter().enumerate() {
        assert_eq!(call.await.unwrap(), format!("{n}\n"));
    }
}

/// What a call costs beyond starting the program plainly: `cargo nextest run --release --test it
/// sandbox::costs --run-ignored all --no-capture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn costs() {
    let bench = Bench::new();
    bench.sandbox.kernel().await;
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    let (mut plain, mut held) = (Vec::new(), Vec::new());
    for _ in 0..300 {
        let since = Instant::now();
        tokio::process::Command::new("/bin/true").output().await.unwrap();
        plain.push(since.elapsed());
        let since = Instant::now();
        assert_eq!(bench.run("/bin/true", &[]).await.exit_code, Some(0));
        held.push(since.elapsed());
    }
    println!("plain {:?}, in the sandbox {:?}", median(plain), median(held));
}
