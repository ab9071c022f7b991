//! Command lines written to get out, and ordinary ones: what the tool, the gate and the sandbox make
//! of them together.
//!
//! Every hostile line is tried twice: under rules as an operator would write them, and under rules
//! that allow every program there is with any argument and any option, so that nothing but the
//! sandbox is left. In both cases nothing outside of what the rules give may be read, changed or
//! reached. ⏎ and ␍ in the corpora are line ends.
//!
//! With other features: the tool is tried here without a run; runs, parking, cancels, crashes, replicas and
//! budgets are in `shell_stories.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use toolloop::governance::{
    Call, CommandRule, Commands, Decision, Gate, Objection, Policy, Verdict,
};
use toolloop::outbound::Client;
use toolloop::run::{Autonomy, Caller, Effect, Labels};
use toolloop::tools::credentials::Credentials;
use toolloop::tools::lease::{Lease, Standing};
use toolloop::tools::proxy::Proxy;
use toolloop::tools::requests::Requests;
use toolloop::tools::sandbox::Sandbox;
use toolloop::tools::shell::Shell;
use toolloop::tools::{
    ChangeRecorder, LabelRecorder, Listener, Tool, ToolContext, ToolError, Workspace,
};
use uuid::Uuid;

use crate::sandbox::settings;

const HOSTILE: &str = include_str!("../corpora/command_lines_hostile.txt");
const BENIGN: &str = include_str!("../corpora/command_lines_benign.txt");
/// Content of every file that no line may read.
const CANARY: &str = "canary-7d1f";
/// Programs of the usual rules.
const USUAL: &[&str] = &[
    "[",
    "base64",
    "basename",
    "cat",
    "chmod",
    "chown",
    "cmp",
    "column",
    "comm",
    "cp",
    "csplit",
    "curl",
    "cut",
    "date",
    "dd",
    "df",
    "diff",
    "dirname",
    "du",
    "echo",
    "expand",
    "false",
    "file",
    "fmt",
    "fold",
    "grep",
    "gunzip",
    "gzip",
    "head",
    "hexdump",
    "hostname",
    "install",
    "join",
    "jq",
    "kill",
    "ln",
    "ls",
    "md5sum",
    "mkdir",
    "mkfifo",
    "mknod",
    "mktemp",
    "mv",
    "nl",
    "od",
    "openssl",
    "paste",
    "pr",
    "printf",
    "pwd",
    "readlink",
    "realpath",
    "rev",
    "rg",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "sha256sum",
    "shuf",
    "sleep",
    "sort",
    "split",
    "stat",
    "strings",
    "tac",
    "tail",
    "tee",
    "test",
    "touch",
    "tr",
    "true",
    "truncate",
    "uniq",
    "wc",
    "wget",
    "xxd",
    "zcat",
];
/// Those of them that need arguments, and others, with the arguments.
const WITH_ARGUMENTS: &[(&str, &str)] = &[
    ("find", "^"),
    ("tar", "^"),
    (
        "git",
        "^(add|apply|archive|bisect|blame|branch|check-ignore|clone|commit|config|describe|diff|fetch|grep|hash-object|init|log|ls-files|ls-remote|rebase|remote|rev-parse|shortlog|show|status|tag|worktree)\\b",
    ),
];
/// What the ordinary lines need beside.
const BUILDING: &[(&str, &str)] = &[
    ("make", "^(-C \\S+ )?(test|all)$"),
    ("npm", "^(test|run build)$"),
    ("cargo", "^(test|check)\\b"),
    ("python3", "^(script\\.py|-m pytest)\\b"),
    ("pytest", "^[\\w./' -]+$"),
    ("node", "^index\\.js$"),
    ("awk", "^[^|]*$"),
    ("xargs", "^-n1 basename$"),
    ("find", "-delete$"),
];

fn rule(command: &str, args: Option<&str>) -> CommandRule {
    CommandRule {
        command: command.into(),
        args: args.map(str::to_owned),
        effect: Effect::Once,
        destructive: false,
        observes: false,
    }
}

fn usual_rules() -> Commands {
    let plain = USUAL.iter().map(|command| rule(command, None));
    let bounded = WITH_ARGUMENTS.iter().map(|(command, args)| rule(command, Some(args)));
    Commands { allow: plain.chain(bounded).collect(), ..Commands::default() }
}

/// Every program of the path, with a pattern that names every option there is.
fn no_rules(path: &[PathBuf]) -> Commands {
    let any = "(?s)^.*$|-c -p -o -x -X -O -u -i -I -F -T -C -e -z -L -s -exec -execdir -ok -okdir -delete -fls -fprint \
               -fprintf -fprint0 -engine -config -provider --to-command --checkpoint-action --use-compress-program \
               --rsh-command --info-script --output --compress-program --filter --in-place --exec --exec-path \
               --upload-pack --ext-diff --textconv --open-files-in-pager --config-env --pre --strip-program config \
               bisect submodule difftool hook help daemon shell credential filter-branch instaweb send-email \
               web--browse mergetool --outp -uo -ni -cIf cIf -O./evil -ccore.pager";
    let files = path.iter().flat_map(|directory| fs::read_dir(directory).into_iter().flatten());
    let mut names: Vec<String> =
        files.flatten().filter_map(|file| file.file_name().into_string().ok()).collect();
    names.sort();
    names.dedup();
    Commands {
        allow: names.iter().map(|name| rule(name, Some(any))).collect(),
        ..Commands::default()
    }
}

struct Place {
    home: TempDir,
    shell: Shell,
    gate: Arc<Gate>,
    workspace: Workspace,
}

/// A workspace in which only `out` may be written and `.env` never read, beside a secret.
fn place(sandbox: &Arc<Sandbox>, gate: &Arc<Gate>) -> Place {
    let home = TempDir::new().unwrap();
    let at = |path: &str| home.path().join(path);
    let root = at("spaces/tenant");
    fs::create_dir_all(root.join("deep")).unwrap();
    fs::create_dir_all(root.join("out")).unwrap();
    for secret in ["secret", "spaces/secret", "spaces/tenant/.env", "spaces/tenant/deep/.env"] {
        fs::write(at(secret), format!("{CANARY}\n")).unwrap();
    }
    fs::write(root.join("inside.txt"), "inside\n").unwrap();
    fs::write(root.join("evil"), format!("#!/bin/sh\ntouch {}\n", at("pwned").display())).unwrap();
    fs::set_permissions(root.join("evil"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink(at("secret"), root.join("link-out")).unwrap();
    symlink(home.path(), root.join("link-out-dir")).unwrap();
    let gate = Arc::clone(gate);
    let shell = Shell::new(
        Arc::clone(sandbox),
        Proxy::new(Client::new(), Credentials::new()),
        gate.commands(),
        gate.has_network(),
    );
    let workspace = Workspace::open(&at("spaces"), "tenant", ".").unwrap();
    Place { home, shell, gate, workspace }
}

fn gate(commands: Commands) -> Arc<Gate> {
    let policy = Policy {
        autonomy: Autonomy::Full,
        read: vec!["./**".into()],
        write: vec!["./out/**".into()],
        deny: vec!["**/.env".into()],
        commands,
        ..Policy::default()
    };
    Arc::new(Gate::new(&policy).unwrap())
}

/// How a line ended.
#[derive(Debug)]
enum Ended {
    Refused(String),
    Ran(Value),
}

impl Place {
    fn context(&self) -> ToolContext {
        ToolContext {
            run_id: Uuid::nil(),
            agent: "a".into(),
            caller: Arc::new(Caller {
                subject: "s".into(),
                tenant: "tenant".into(),
                scopes: vec!["admin".into()],
            }),
            call_id: Uuid::nil(),
            effect_key: "k".into(),
            traceparent: None,
            workspace: self.workspace.clone(),
            read_labels: LabelRecorder::default(),
            child_run: toolloop::tools::ChildRun::default(),
            listener: Listener::default(),
            changed: ChangeRecorder::default(),
            has_network: false,
            requests: Requests::default(),
            input: None,
            standing: Standing::new(
                Arc::new(Lease::new(Duration::from_hours(1))),
                CancellationToken::new(),
            ),
        }
    }

    async fn judged(&self, line: &str) -> Result<toolloop::governance::Permit, String> {
        let arguments = json!({"command": line});
        let actions = self.shell.actions(&arguments, &self.context()).await;
        let actions = actions.map_err(|e| e.to_string())?;
        let call = Call {
            tool: "shell",
            effect: Effect::Once,
            is_undeclared: false,
            actions: actions.into(),
            approved_by: None,
            skills: &[],
            labels: Labels::default(),
            directory: ".".into(),
        };
        match self.gate.judge(&["admin".to_owned()], call) {
            Verdict::Pass { permit, .. } => Ok(permit),
            Verdict::Stop(Objection { decision, reason, .. }) => {
                assert_eq!(decision, Decision::Blocked);
                Err(reason)
            }
        }
    }

    async fn run(&self, line: &str) -> Ended {
        let permit = match self.judged(line).await {
            Ok(permit) => permit,
            Err(reason) => return Ended::Refused(reason),
        };
        let arguments = json!({"command": line});
        match self.shell.execute(permit, arguments, &self.context()).await {
            Ok(result) => Ended::Ran(serde_json::from_str(&result).unwrap()),
            Err(ToolError::ForModel(reason)) => Ended::Refused(reason),
            Err(other) => panic!("{line}: {other}"),
        }
    }

    /// Everything of the place but what may be written: kind, mode, time and content of each file.
    fn outside(&self) -> BTreeMap<PathBuf, String> {
        let mut seen = BTreeMap::new();
        let mut open = vec![self.home.path().to_owned()];
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(&directory).unwrap() {
                let path = entry.unwrap().path();
                let found = path.symlink_metadata().unwrap();
                if path == self.home.path().join("spaces/tenant/out") {
                    continue;
                }
                let content = if found.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
                let times = if found.is_file() { found.modified().ok() } else { None };
                let shown = format!(
                    "{:?} {:o} {times:?} {content:?}",
                    found.file_type(),
                    found.permissions().mode()
                );
                seen.insert(path.clone(), shown);
                if found.is_dir() {
                    open.push(path);
                }
            }
        }
        seen
    }
}

/// Is reached by lines that get out by network.
struct Sink {
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Sink {
    fn new() -> Self {
        loop {
            let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
            // Another program may have the port for datagrams.
            let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()) else { continue };
            tcp.set_nonblocking(true).unwrap();
            udp.set_nonblocking(true).unwrap();
            return Self { tcp, udp };
        }
    }

    fn was_reached(&self) -> bool {
        self.tcp.accept().is_ok() || self.udp.recv(&mut [0; 8]).is_ok()
    }
}

fn lines(corpus: &str) -> Vec<String> {
    let lines = corpus.lines().filter(|line| !line.is_empty());
    lines.map(|line| line.replace('⏎', "\n").replace('␍', "\r")).collect()
}

/// Tries every hostile line; how many ran at all.
async fn try_all(sandbox: Arc<Sandbox>, commands: Commands) -> usize {
    let sink = Arc::new(Sink::new());
    let port = sink.tcp.local_addr().unwrap().port().to_string();
    let own = std::process::id().to_string();
    let gate = gate(commands);
    let tries = lines(HOSTILE).into_iter().map(|line| {
        let (sandbox, gate, port, own) =
            (Arc::clone(&sandbox), Arc::clone(&gate), port.clone(), own.clone());
        let sink = Arc::clone(&sink);
        tokio::spawn(async move {
            let place = place(&sandbox, &gate);
            let (home, secret) = (place.home.path(), place.home.path().join("secret"));
            let line = line
                .replace("{SECRET}", secret.to_str().unwrap())
                .replace("{OUT}", home.to_str().unwrap())
                .replace("{PORT}", &port)
                .replace("{PID}", &own);
            let before = place.outside();
            let ended = place.run(&line).await;
            assert_eq!(place.outside(), before, "{line:?} changed something: {ended:?}");
            assert!(!sink.was_reached(), "{line:?} reached the network: {ended:?}");
            match ended {
                Ended::Ran(result) => {
                    let said = result.to_string();
                    // The line itself may repeat the name of what it did not get.
                    assert!(!said.contains(CANARY), "{line:?} read a secret: {said}");
                    let taken = read_all(&home.join("spaces/tenant/out"));
                    assert!(!taken.contains(CANARY), "{line:?} took a secret: {taken}");
                    1
                }
                Ended::Refused(reason) => {
                    assert!(reason.len() > 20, "{line:?}: {reason}");
                    assert!(!reason.contains(CANARY), "{line:?}: {reason}");
                    0
                }
            }
        })
    });
    let results = futures::stream::iter(tries).buffer_unordered(8).collect::<Vec<_>>().await;
    let ordinary = place(&sandbox, &gate).run("cat inside.txt").await;
    let is_run = matches!(&ordinary, Ended::Ran(result) if result["stdout"] == "inside\n");
    assert!(is_run, "nothing runs at all: {ordinary:?}");
    results.into_iter().map(Result::unwrap).sum()
}

fn read_all(directory: &Path) -> String {
    let mut text = String::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let found = entry.path().symlink_metadata();
            match found {
                Ok(found) if found.is_dir() => open.push(entry.path()),
                Ok(found) if found.is_file() => {
                    text.push_str(&String::from_utf8_lossy(
                        &fs::read(entry.path()).unwrap_or_default(),
                    ));
                }
                _ => {}
            }
        }
    }
    text
}

fn bench(namespaces: bool) -> Arc<Sandbox> {
    let settings = toolloop::tools::sandbox::Settings {
        timeout: Duration::from_secs(8),
        namespaces,
        ..settings()
    };
    Arc::new(Sandbox::new(settings))
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_lines_do_nothing_under_usual_rules() {
    assert!(lines(HOSTILE).len() >= 300);
    let ran = try_all(bench(true), usual_rules()).await;
    println!("{ran} of {} ran", lines(HOSTILE).len());
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_lines_do_nothing_where_only_the_sandbox_is_left() {
    let sandbox = bench(true);
    let commands = no_rules(&sandbox.settings().path);
    let ran = try_all(sandbox, commands).await;
    println!("{ran} of {} ran", lines(HOSTILE).len());
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_lines_do_nothing_without_namespaces() {
    let sandbox = bench(false);
    let commands = no_rules(&sandbox.settings().path);
    let ran = try_all(sandbox, commands).await;
    println!("{ran} of {} ran", lines(HOSTILE).len());
}

#[tokio::test]
async fn ordinary_lines_pass() {
    // Programs that this machine may not have: what is judged is the line.
    let programs = TempDir::new().unwrap();
    let building = BUILDING.iter().chain(WITH_ARGUMENTS);
    let building = building.map(|(command, args)| rule(command, Some(args)));
    let mut commands = usual_rules();
    commands.allow.extend(building);
    commands.allow.push(rule("env-check", None));
    for rule in &commands.allow {
        let file = programs.path().join(&rule.command);
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let settings =
        toolloop::tools::sandbox::Settings { path: vec![programs.path().to_owned()], ..settings() };
    let place = place(&Arc::new(Sandbox::new(settings)), &gate(commands));
    let root = place.home.path().join("spaces/tenant");
    fs::create_dir(root.join("src")).unwrap();
    for file in ["README.md", "names.txt", "data.csv", "dos.txt", "src/main.rs"] {
        fs::write(root.join(file), "text\n").unwrap();
    }
    let all = lines(BENIGN);
    assert!(all.len() >= 200);
    let mut refused = Vec::new();
    for line in &all {
        if let Err(reason) = place.judged(line).await {
            refused.push(format!("{line}: {reason}"));
        }
    }
    println!("{} of {} refused: {refused:#?}", refused.len(), all.len());
    assert!(refused.len() * 50 <= all.len(), "{refused:#?}");
}
