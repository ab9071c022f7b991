//! The real binary as a child process, with a directory, a database and an administrator's key of
//! its own. Tests speak to it over HTTP, kill it and start it again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use reqwest::{Method, StatusCode};
use rustix::process::Pid;
pub use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

use crate::postgres_cluster;

/// Which database the service runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Db {
    Sqlite,
    Postgres,
}

/// The administrator of every test service.
pub const ADMIN_KEY: &str = "tl_testadmin_0123456789abcdefghjkmnpqrstvwxyz0123456789abcdefghjk";

/// The files, settings and environment of a service.
#[derive(Debug, Default)]
pub struct Setup {
    agents: BTreeMap<String, String>,
    scenarios: BTreeMap<String, String>,
    skills: BTreeMap<String, String>,
    tools: BTreeMap<String, String>,
    scripts: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
    config: String,
    variables: Vec<(String, String)>,
    clock_ahead_by: i64,
    binary: Option<PathBuf>,
}

impl Setup {
    pub fn new() -> Self {
        Self::default()
    }

    /// `agents/<name>.yaml`; the name is put in front.
    pub fn agent(mut self, name: &str, yaml: &str) -> Self {
        self.agents.insert(name.into(), format!("name: {name}\n{yaml}"));
        self
    }

    /// `scenarios/<name>.yaml`
    pub fn scenario(mut self, name: &str, yaml: &str) -> Self {
        self.scenarios.insert(name.into(), yaml.into());
        self
    }

    /// `skills/<name>/SKILL.md`: lines of its front matter behind name and description, and its
    /// instructions.
    pub fn skill(mut self, name: &str, front: &str, instructions: &str) -> Self {
        let text = format!(
            "---\nname: {name}\ndescription: When to use {name}.\n{front}---\n{instructions}\n"
        );
        self.skills.insert(name.into(), text);
        self
    }

    /// `tools/<set>.yaml`
    pub fn tools(mut self, set: &str, yaml: &str) -> Self {
        self.tools.insert(set.into(), yaml.into());
        self
    }

    /// `tools/<name>`, beside the sets.
    pub fn script(mut self, name: &str, content: &str) -> Self {
        self.scripts.insert(name.into(), content.into());
        self
    }

    /// A file in the workspace of the tenant `default`.
    pub fn file(mut self, path: &str, content: &str) -> Self {
        self.files.insert(path.into(), content.into());
        self
    }

    /// Lines of `toolloop.toml`. Without a `[governance]` section there is no rate
    /// limit.
    pub fn config(mut self, toml: &str) -> Self {
        self.config.push_str(toml);
        self.config.push('\n');
        self
    }

    /// A variable of its environment, whenever it is started.
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Sets the machine's clock ahead by so many seconds.
    pub fn clock_ahead_by(mut self, seconds: i64) -> Self {
        self.clock_ahead_by = seconds;
        self
    }

    /// Uses another build of the binary.
    pub fn binary(mut self, path: &Path) -> Self {
        self.binary = Some(path.to_owned());
        self
    }

    pub async fn start(self, db: Db) -> Service {
        let dir = self.write_directory();
        self.start_in(dir, db).await
    }

    /// Starts in an existing directory, without writing files to it.
    pub async fn start_in(self, dir: TempDir, db: Db) -> Service {
        let database_url = match db {
            Db::Sqlite => format!("sqlite://{}", dir.path().join("toolloop.db").display()),
            Db::Postgres => postgres_cluster::fresh_database().await,
        };
        self.launch(dir, database_url).await
    }

    /// Writes the directory of a service that the test starts by itself.
    pub fn write_directory(&self) -> TempDir {
        let dir = TempDir::new().unwrap();
        for (kind, files) in
            [("agents", &self.agents), ("scenarios", &self.scenarios), ("tools", &self.tools)]
        {
            std::fs::create_dir(dir.path().join(kind)).unwrap();
            for (name, yaml) in files {
                std::fs::write(dir.path().join(kind).join(format!("{name}.yaml")), yaml).unwrap();
            }
        }
        for (name, text) in &self.scripts {
            std::fs::write(dir.path().join("tools").join(name), text).unwrap();
        }
        for (name, text) in &self.skills {
            let skill = dir.path().join("skills").join(name);
            std::fs::create_dir_all(&skill).unwrap();
            std::fs::write(skill.join("SKILL.md"), text).unwrap();
        }
        for (path, content) in &self.files {
            let path = dir.path().join("workspace/default").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let limits = "[governance]\nrate_limit_per_minute = 1000000\nrate_limit_burst = 1000000\n";
        let limits = if self.config.contains("[governance]") { "" } else { limits };
        std::fs::write(dir.path().join("toolloop.toml"), format!("{}{limits}", self.config))
            .unwrap();
        dir
    }

    /// Starts on a database that the test provides.
    pub async fn start_on(self, database_url: String) -> Service {
        let dir = self.write_directory();
        self.launch(dir, database_url).await
    }

    async fn launch(self, dir: TempDir, database_url: String) -> Service {
        let (variables, binary) = (self.variables, self.binary.unwrap_or_else(|| BINARY.into()));
        let clock = ("CLOCK_WRONG_BY", self.clock_ahead_by.to_string());
        let command = command_of(&binary, dir.path());
        let process = Process::start(command, &database_url, &variables, clock).await;
        Service {
            dir,
            database_url,
            variables,
            binary,
            process,
            key: ADMIN_KEY.into(),
            http: toolloop::tls::http_client().unwrap().build().unwrap(),
            expects_reclaims: false,
        }
    }
}

struct Process {
    child: Child,
    address: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Process {
    async fn start(
        mut command: Command,
        database_url: &str,
        variables: &[(String, String)],
        (variable, value): (&str, String),
    ) -> Self {
        let pooled = postgres_cluster::pooled(database_url);
        if pooled.is_some() {
            command.env("TOOLLOOP_DATABASE__TRANSACTION_POOLER", "true");
        }
        let mut child = command
            .env(variable, value)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--log-format",
                "json",
                "--database-url",
                pooled.as_deref().unwrap_or(database_url),
            ])
            .env("TOOLLOOP_ADMIN_KEY", ADMIN_KEY)
            .spawn()
            .unwrap();
        let log = Arc::<Mutex<Vec<String>>>::default();
        let (tell, address) = oneshot::channel();
        tokio::spawn(collect(child.stderr.take().unwrap(), Arc::clone(&log), Some(tell)));
        tokio::spawn(collect(child.stdout.take().unwrap(), Arc::clone(&log), None));
        let address = tokio::time::timeout(Duration::from_mins(2), address).await;
        let Ok(Ok(address)) = address else {
            panic!("the service did not start:\n{}", log.lock().unwrap().join("\n"));
        };
        Self { child, address, log }
    }
}

pub const BINARY: &str = env!("CARGO_BIN_EXE_toolloop");

/// What a process trusts that is told nothing else: reading the machine's certificates is a tenth of a start.
static TRUSTED: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let written = tempfile::NamedTempFile::new_in(directory).unwrap();
    std::fs::write(written.path(), certified.cert.pem()).unwrap();
    let path = directory.join("trusted.pem");
    written.persist(&path).unwrap();
    path
});

/// The binary, with an environment that inherits no settings of this process.
pub fn command(dir: &Path) -> Command {
    command_of(Path::new(BINARY), dir)
}

fn command_of(binary: &Path, dir: &Path) -> Command {
    let mut command = Command::new(binary);
    command
        .current_dir(dir)
        .kill_on_drop(true)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .env("SSL_CERT_FILE", &*TRUSTED);
    for (key, _) in
        std::env::vars().filter(|(key, _)| key.starts_with("TOOLLOOP_") || key == "DATABASE_URL")
    {
        command.env_remove(key);
    }
    command
}

async fn collect(
    pipe: impl AsyncRead + Unpin,
    log: Arc<Mutex<Vec<String>>>,
    tell: Option<oneshot::Sender<String>>,
) {
    let mut tell = tell;
    let mut lines = BufReader::new(pipe).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let told = if tell.is_some() { serde_json::from_str::<Value>(&line).ok() } else { None };
        let address = told.and_then(|line| Some(line.get("address")?.as_str()?.to_owned()));
        log.lock().unwrap().push(line);
        if let (Some(address), Some(tell)) = (&address, tell.take_if(|_| address.is_some())) {
            let _ = tell.send(address.clone());
        }
    }
}

/// A running service.
pub struct Service {
    pub dir: TempDir,
    pub database_url: String,
    /// The bearer token of the requests that follow.
    pub key: String,
    pub http: reqwest::Client,
    variables: Vec<(String, String)>,
    binary: PathBuf,
    process: Process,
    expects_reclaims: bool,
}

/// Checks that no run was owned without being driven, unless the test expects it.
impl Drop for Service {
    fn drop(&mut self) {
        if self.expects_reclaims || std::thread::panicking() {
            return;
        }
        let log = self.log();
        assert!(!log.contains("run reclaimed"), "a run was lost and found:\n{log}");
    }
}

/// An answer: status, headers, JSON body (null where there is none).
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: reqwest::header::HeaderMap,
    pub body: Value,
}

impl Service {
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.process.address)
    }

    /// A request with the key of this service.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, self.url(path)).bearer_auth(&self.key)
    }

    pub async fn get(&self, path: &str) -> Answer {
        answer(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        answer(self.request(Method::POST, path).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        answer(self.request(Method::DELETE, path)).await
    }

    /// Runs the agent's loop, and asserts that a run was started.
    pub async fn run(&self, agent: &str, body: &Value) -> Value {
        let answer = self.post(&format!("/v1/agents/{agent}/invoke-iterative"), body).await;
        assert_eq!(answer.status, 200, "{:#}\n{}", answer.body, self.log());
        answer.body
    }

    /// Queues a run without inputs, and returns its path.
    pub async fn enqueue(&self, agent: &str) -> String {
        let path = format!("/v1/agents/{agent}/invoke-iterative");
        let request = self.request(Method::POST, &path).header("prefer", "respond-async");
        let accepted = answer(request.json(&json!({}))).await;
        assert_eq!(accepted.status, 202, "{:#}", accepted.body);
        format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap())
    }

    /// Polls until the answer meets the condition, for some minutes.
    pub async fn until(&self, path: &str, what: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        for looks in 0..3000 {
            last = self.get(path).await.body;
            if what(&last) {
                return last;
            }
            pause(looks).await;
        }
        panic!("{path} never became what was expected: {last:#}\n{}", self.log());
    }

    /// Waits until the log has a text, for some minutes: a thread of its own writes the
    /// lines.
    pub async fn until_logged(&self, text: &str) {
        for looks in 0..3000 {
            if self.process.log.lock().unwrap().iter().any(|line| line.contains(text)) {
                return;
            }
            pause(looks).await;
        }
        panic!("{text:?} was never logged:\n{}", self.log());
    }

    /// Allows reclaimed runs: the test takes runs away from their tasks.
    pub fn expect_reclaims(&mut self) {
        self.expects_reclaims = true;
    }

    /// SIGKILL, as a crash would.
    pub async fn kill(&mut self) {
        self.process.child.kill().await.unwrap();
    }

    pub async fn kill_if_alive(&mut self) {
        if !self.is_dead() {
            self.kill().await;
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.process.child, signal);
    }

    /// Waits for the end of the process.
    pub async fn exit_code(&mut self) -> Option<i32> {
        self.process.child.wait().await.unwrap().code()
    }

    /// Starts it again on the same directory and database, at a new port.
    pub async fn restart(&mut self) {
        self.restart_to_crash("never").await;
    }

    /// Starts it again, and lets it crash at that point, e.g. `after_commit:7`.
    pub async fn restart_to_crash(&mut self, point: &str) {
        let point = ("CRASH_POINT", point.into());
        let command = command_of(&self.binary, self.dir.path());
        self.process = Process::start(command, &self.database_url, &self.variables, point).await;
    }

    /// Whether the process has ended.
    pub fn is_dead(&mut self) -> bool {
        self.process.child.try_wait().unwrap().is_some()
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.process.child.id().unwrap()).unwrap()
    }

    /// The most memory that the process has had, in MiB.
    pub fn peak_memory_mib(&self) -> u64 {
        self.status_in_mib("VmHWM:")
    }

    /// The memory that the process has, in MiB.
    pub fn memory_mib(&self) -> u64 {
        self.status_in_mib("VmRSS:")
    }

    fn status_in_mib(&self, field: &str) -> u64 {
        let status = self.read_proc("status");
        let value = status.lines().find_map(|line| line.strip_prefix(field));
        value.unwrap().trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    /// The processor time of the process, in hundredths of a second.
    pub fn processor_ticks(&self) -> u64 {
        let stat = self.read_proc("stat");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    fn read_proc(&self, file: &str) -> String {
        let id = self.process.child.id().unwrap();
        std::fs::read_to_string(format!("/proc/{id}/{file}")).unwrap()
    }

    /// Everything that it logged.
    pub fn log(&self) -> String {
        self.process.log.lock().unwrap().join("\n")
    }

    pub fn write(&self, path: &str, content: &str) {
        std::fs::write(self.dir.path().join(path), content).unwrap();
    }
}

/// Waits before the next look at something: the longer, the more there were, since each costs the service.
pub async fn pause(looks: u64) {
    tokio::time::sleep(Duration::from_millis((5 + 5 * looks).min(50))).await;
}

pub async fn answer(request: reqwest::RequestBuilder) -> Answer {
    let response = request.send().await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    let text = response.text().await.unwrap();
    let body = if text.is_empty() {
        Value::Null
    } else {
        serde_json::from_str(&text).unwrap_or(Value::String(text))
    };
    Answer { status, headers, body }
}

/// One test per story and database.
macro_rules! on_both_stores {
    ($($story:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test] async fn $story() { super::$story(crate::service::Db::Sqlite).await; })+
        }
        mod postgres {
            $(#[tokio::test] async fn $story() { super::$story(crate::service::Db::Postgres).await; })+
        }
    };
}
pub(crate) use on_both_stores;

/// The same on SQLite alone: what happens between the service and programs, pages or other servers, whatever the store.
macro_rules! on_one_store {
    ($($story:ident),+ $(,)?) => {
        mod one_store {
            $(#[tokio::test] async fn $story() { super::$story(crate::service::Db::Sqlite).await; })+
        }
    };
}
pub(crate) use on_one_store;

/// Sends a signal to a process that has not been waited for.
pub fn send_signal(child: &tokio::process::Child, signal: Signal) {
    let id = i32::try_from(child.id().unwrap()).unwrap();
    rustix::process::kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
}
