//! Programs that flood: output, errors, processes, memory, files. The service keeps its size, and runs beside
//! them keep going.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::script_tools::{python, with};
use crate::service::{Db, Service, Setup};

const FLOODS: &[(&str, &str)] = &[
    ("output", "import sys\nfor i in range(3000): sys.stdout.write('y' * 99999 + chr(10))"),
    ("line", "import sys\nfor i in range(3000): sys.stdout.write('y' * 100000)"),
    (
        "errors",
        "import sys\nfor i in range(3000): sys.stderr.write('e' * 99999 + chr(10))\nsys.exit(5)",
    ),
    ("progress", "import json\nfor i in range(100000): print(json.dumps({'progress': 'p' * 100}))"),
    ("processes", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"),
    ("memory", "a = []\nwhile True: a.append(bytearray(b'1' * (1 << 22)))"),
    ("inodes", "import os\nfor i in range(200000): open(os.environ['TMPDIR'] + f'/{i}', 'w')"),
    (
        "file",
        "import os\nf = open(os.environ['TMPDIR'] + '/f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    ),
];
/// Growth that is allowed, in MiB.
const MOST_GROWN: u64 = 20;
/// Runs beside the floods.
const BESIDE: usize = 40;

async fn times(service: &Service) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..BESIDE {
        let since = Instant::now();
        let run = service.run("quiet", &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        times.push(since.elapsed());
    }
    times.sort();
    times
}

#[tokio::test]
async fn floods_leave_the_service_as_it_was() {
    let mut set = "tools:\n".to_owned();
    for (name, program) in FLOODS {
        set.push_str(&python(name, program, ", effect: read, timeout_seconds: 4"));
    }
    let names: Vec<String> =
        FLOODS.iter().map(|(name, _)| format!("script:flood/{name}")).collect();
    let calls: Vec<(&str, Value)> = names.iter().map(|name| (name.as_str(), json!({}))).collect();
    let quiet = "model: scripted/quiet\nenable_double_confirmation: false\n";
    let setup = Setup::new()
        .tools("flood", &set)
        .agent("quiet", quiet)
        .scenario("quiet", "steps: [{text: done}]")
        .config("[tools.shell]\nmemory = \"128MiB\"\nfile_size = \"64MiB\"\n");
    let service = with(setup, "['script:flood/*']", "{}", &calls).start(Db::Sqlite).await;
    let flood = async || service.run("worker", &json!({})).await;
    // What is loaded once is there after the first.
    let first = flood().await;
    assert_eq!(first["status"], "completed", "{first:#}");
    let alone = times(&service).await;
    let before = service.peak_memory_mib();
    let beside = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        times(&service).await
    };
    let (a, b, c, beside) = tokio::join!(flood(), flood(), flood(), beside);
    for run in [a, b, c] {
        assert_eq!(run["status"], "completed", "{run:#}");
        assert_eq!(run["tool_calls_made"], FLOODS.len(), "{run:#}");
    }
    let p99 = |times: &[Duration]| times[times.len() * 99 / 100];
    println!("p99 alone {:?}, beside floods {:?}", p99(&alone), p99(&beside));
    let grown = service.peak_memory_mib() - before;
    assert!(grown <= MOST_GROWN, "the service grew by {grown} MiB from {before}");
}
