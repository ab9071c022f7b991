//! One server: it is started or connected to, asked for its tools and watched. If it has ended, hangs or
//! does not answer, it is restarted with back-off.
//!
//! A call never waits for that: without a connection it fails immediately.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use secrecy::SecretString;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use url::Url;

use super::era::Era;
use super::http::Address;
use super::link::{Link, ToolList, Transport};
use super::listing::{self, Described, Effects};
use super::messages::MAX_WAIT;
use super::pipes::{self, Errors, Pipes};
use crate::bounds::secrets::redacted;
use crate::jitter;
use crate::outbound::Client;
use crate::run::SandboxLevel;
use crate::tools::ToolInfo;
use crate::tools::programs;
use crate::tools::proxy::{Hosts, Proxy};
use crate::tools::sandbox::StartablePrograms;
use crate::tools::sandbox::plan::{Access, Grant, GrantKind, Reach};
use crate::tools::sandbox::reach;
use crate::tools::sandbox::{LongRunningProgram, Sandbox};

/// The pause before a server is started again; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// A server that was up for this long is restarted without a pause.
const GOOD: Duration = Duration::from_secs(30);
/// The interval at which the list is polled if the server cannot notify of changes: the minimum, if the
/// server says how long the list may be used, and the maximum.
const POLL_INTERVAL: Duration = Duration::from_secs(30);
const LONGEST_LOOK: Duration = Duration::from_hours(1);
/// Between two looks at a list that changes.
const BETWEEN_CHANGES: Duration = Duration::from_secs(1);

/// The operator's settings of a server.
#[derive(Debug, Clone)]
pub struct Settings {
    pub name: String,
    pub connection: Connection,
    pub effects: BTreeMap<String, listing::Declared>,
}

/// How a server is reached.
#[derive(Debug, Clone)]
pub enum Connection {
    Program {
        /// A name, or an absolute path.
        command: String,
        args: Vec<String>,
        variables: Vec<(String, String)>,
        /// Where it starts, and what it may write.
        directory: PathBuf,
        /// What it may read and execute in addition to the system's files.
        reads: Vec<PathBuf>,
        /// What it may ask of the network.
        network: Arc<Hosts>,
    },
    Address {
        url: Url,
        key: Option<SecretString>,
        /// The variable that should hold the key and is not set.
        missing_key: Option<String>,
    },
}

/// What all servers have in common.
pub(super) struct Dependencies {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) client: Client,
    pub(super) proxy: Proxy,
    /// Counts changes of what is listed.
    pub(super) generation: Arc<AtomicU64>,
}

/// The current state of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Status {
    NotStarted,
    Starting,
    Up,
    /// Why not: a phrase.
    Down(String),
}

/// One server.
pub(super) struct Server {
    settings: Settings,
    dependencies: Dependencies,
    status: watch::Sender<Status>,
    link: RwLock<Option<Link>>,
    tools: RwLock<Arc<Vec<Described>>>,
    is_listed: AtomicBool,
    list_changed: Arc<Notify>,
    suspicious: Arc<Notify>,
    /// Whether a program has received `server/discover`, which it may not know, and has not answered.
    is_probing: AtomicBool,
    errors: Mutex<Errors>,
    /// Problems of the list.
    warnings: RwLock<Vec<String>>,
}

impl Server {
    pub(super) fn new(settings: Settings, dependencies: Dependencies) -> Self {
        Self {
            settings,
            dependencies,
            status: watch::Sender::new(Status::NotStarted),
            link: RwLock::default(),
            tools: RwLock::default(),
            is_listed: AtomicBool::default(),
            list_changed: Arc::default(),
            suspicious: Arc::default(),
            is_probing: AtomicBool::default(),
            errors: Mutex::new(Errors::new()),
            warnings: RwLock::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.settings.name
    }

    pub(super) fn effects(&self) -> &Effects {
        &self.settings.effects
    }

    pub(super) fn url(&self) -> Option<&Url> {
        match &self.settings.connection {
            Connection::Address { url, .. } => Some(url),
            Connection::Program { .. } => None,
        }
    }

    /// The operator's declaration, for the approver of a call.
    pub(super) fn does(&self) -> String {
        match &self.settings.connection {
            Connection::Address { url, .. } => url.to_string(),
            Connection::Program { command, args, network, .. } if network.are_none() => {
                format!("{command} {args:?}")
            }
            Connection::Program { command, args, network, .. } => {
                format!("{command} {args:?}, which reaches {network}")
            }
        }
    }

    pub(super) fn sandbox_level(&self) -> Option<SandboxLevel> {
        match &self.settings.connection {
            Connection::Address { .. } => None,
            Connection::Program { .. } => self.dependencies.sandbox.known_level(),
        }
    }

    /// Whether its program may ask anything of the network.
    pub(super) fn leads_out(&self) -> bool {
        match &self.settings.connection {
            Connection::Address { .. } => false,
            Connection::Program { network, .. } => !network.are_none(),
        }
    }

    pub(super) fn is_started(&self) -> bool {
        *self.status.borrow() != Status::NotStarted
    }

    /// Whether it has ever listed its tools.
    pub(super) fn is_listed(&self) -> bool {
        self.is_listed.load(Ordering::Relaxed)
    }

    /// Why it is not available, as a sentence; `None` where it is.
    pub(super) fn fault(&self) -> Option<String> {
        let name = self.name();
        match &*self.status.borrow() {
            Status::Up => None,
            Status::NotStarted => Some(format!("The MCP server {name} is not started.")),
            Status::Starting => Some(format!("The MCP server {name} is starting; try again.")),
            Status::Down(why) => Some(format!("The MCP server {name} is not available: {why}.")),
        }
    }

    /// The last lines that its program has written to standard error since its last start.
    pub(super) fn last_words(&self) -> Vec<String> {
        self.errors.lock().last()
    }

    /// Problems of its list.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.warnings.read().clone()
    }

    /// The connection.
    ///
    /// # Errors
    /// Why it is not available: a sentence.
    pub(super) fn link(&self) -> Result<Link, String> {
        let link = self.link.read().clone();
        link.ok_or_else(|| {
            let name = self.name();
            self.fault().unwrap_or_else(|| format!("The MCP server {name} is not available."))
        })
    }

    /// What it listed last, sorted by name.
    pub(super) fn tools(&self) -> Arc<Vec<Described>> {
        Arc::clone(&self.tools.read())
    }

    /// What is known now of its tool of that name, in our words.
    pub(super) fn listed(&self, name: &str) -> Option<ToolInfo> {
        let tools = self.tools();
        tools.iter().find(|tool| tool.info.name == name).map(|tool| tool.info.clone())
    }

    /// Waits until it is up or down for the first time.
    pub(super) async fn settled(&self) {
        let is_settled = |status: &Status| matches!(status, Status::Up | Status::Down(_));
        let _ = self.status.subscribe().wait_for(is_settled).await; // it lives as long as this
    }

    /// Runs the connection until it is dropped.
    pub(super) async fn run(self: Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let since = Instant::now();
            self.status.send_if_modified(|status| {
                let is_first = *status == Status::NotStarted;
                if is_first {
                    *status = Status::Starting;
                }
                is_first
            });
            let why = self.run_once().await;
            *self.link.write() = None;
            if since.elapsed() >= GOOD {
                pause = FIRST_PAUSE;
            }
            self.down(&why);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn down(&self, why: &str) {
        // A server may say it, and repeat what it was sent.
        let why: String = redacted(why).chars().filter(|c| !c.is_control()).collect();
        let before = self.status.send_replace(Status::Down(why.clone()));
        if before != Status::Down(why.clone()) {
            tracing::warn!(server = self.name(), why, "an MCP server is not available");
        }
    }

    /// Runs the server from its start to its end; returns why it ended.
    async fn run_once(self: &Arc<Self>) -> String {
        match &self.settings.connection {
            Connection::Address { missing_key: Some(variable), .. } => {
                format!("it needs the environment variable {variable}, which is not set")
            }
            Connection::Address { url, key, missing_key: None } => {
                let address = Address::new(
                    url.clone(),
                    key.clone(),
                    self.dependencies.client.clone(),
                    Arc::clone(&self.list_changed),
                    Arc::clone(&self.suspicious),
                );
                self.watch(Link::new(Transport::Address(address)), true).await
            }
            Connection::Program { .. } => self.run_program().await,
        }
    }

    async fn run_program(self: &Arc<Self>) -> String {
        let since = Instant::now();
        let why = self.run_program_once(true).await;
        if self.is_probing.swap(false, Ordering::Relaxed) {
            // Some of the old era end, or are silent for good, when something comes before `initialize`.
            if since.elapsed() >= MAX_WAIT {
                self.down(&why); // known before the second try has taken as long
            }
            return self.run_program_once(false).await;
        }
        why
    }

    async fn run_program_once(self: &Arc<Self>, finds_out_era: bool) -> String {
        let program = match self.program().await {
            Ok(program) => program,
            Err(why) => return why,
        };
        let running = match self.dependencies.sandbox.start_long_running(program).await {
            Ok(running) => running,
            Err(error) => return error.to_string(),
        };
        let (given_up, list_changed) =
            (Arc::clone(&self.suspicious), Arc::clone(&self.list_changed));
        let (pipes, ends) = Pipes::new(list_changed, given_up);
        let (this, errors) = (Arc::clone(self), running.errors);
        let logged = async move { pipes::logged(this.name(), errors, &this.errors).await };
        let logging = AbortOnDropHandle::new(tokio::spawn(logged));
        let served = ends.served(running.input, running.output);
        let watched = self.watch(Link::new(Transport::Pipes(pipes.clone())), finds_out_era);
        let ended = tokio::select! {
            why = served => why,
            why = watched => Some(why),
        };
        *self.link.write() = None;
        let why = if let Some(why) = ended {
            why
        } else {
            let ending = running.handle.wait_for_end();
            let why = tokio::time::timeout(pipes::LAST_WORDS, ending).await;
            let _ = tokio::time::timeout(pipes::LAST_WORDS, logging).await; // or a child holds it
            why.unwrap_or_else(|_| "it has ended".to_owned())
        };
        pipes.close(&why);
        why
    }

    /// The program as the sandbox takes it; or why it cannot be started.
    async fn program(&self) -> Result<LongRunningProgram, String> {
        let Connection::Program { command, args, variables, directory, reads, network } =
            self.settings.connection.clone()
        else {
            return Err("it is not a program".to_owned());
        };
        let leads_out = !network.are_none();
        if leads_out && !self.dependencies.sandbox.kernel().await.confinement.network {
            return Err(
                "its settings give it a network, and this machine cannot; see `toolloop doctor`"
                    .into(),
            );
        }
        let way_out =
            leads_out.then(|| self.dependencies.proxy.way_out_of_server(self.name(), network));
        let path = self.dependencies.sandbox.settings().path.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let program = programs::found(&command, Path::new("/"), &path)?;
            let mut grants = reach::system(&path, StartablePrograms::System);
            let file = program.display().to_string();
            grants.push(Grant { path: file.clone(), access: Access::RUN, kind: GrantKind::File });
            grants.extend(reads.iter().filter_map(|path| {
                let kind = if path.is_dir() { GrantKind::Tree } else { GrantKind::File };
                Some(Grant { path: path.to_str()?.to_owned(), access: Access::RUN, kind })
            }));
            grants.extend(reach::certificates().filter(|_| leads_out));
            let all = Access { read: true, write: true, execute: true };
            grants.push(Grant { path: ".".to_owned(), access: all, kind: GrantKind::Tree });
            let arguments = std::iter::once(command).chain(args).collect();
            Ok(LongRunningProgram {
                program: file,
                arguments,
                directory: opened(&directory)?,
                environment: variables,
                reach: Reach { grants, masked: Vec::new() },
                way_out,
            })
        });
        looked.await.unwrap_or_else(|_| Err("the service failed".to_owned()))
    }

    /// Performs the handshake, lists the tools, and keeps the list fresh until the server is not available any
    /// more; why not.
    async fn watch(&self, link: Link, finds_out_era: bool) -> String {
        if let Err(why) = link.introduce(finds_out_era, &self.is_probing).await {
            return why;
        }
        loop {
            let look = match link.list().await {
                Ok(listed) => {
                    let look = look_after(&link, listed.fresh);
                    self.take(listed, link.has_parameter_headers()).await;
                    look
                }
                Err(why) => return why,
            };
            self.link.write().get_or_insert_with(|| link.clone());
            if *self.status.borrow() != Status::Up {
                self.status.send_replace(Status::Up);
                let tools = self.tools().len();
                tracing::info!(server = self.name(), tools, "an MCP server is available");
            }
            tokio::time::sleep(BETWEEN_CHANGES).await;
            if let Some(why) = self.until_changed(&link, look).await {
                return why;
            }
        }
    }

    /// Waits until the list may have changed; answers why the server is not available, where that
    /// comes first.
    async fn until_changed(&self, link: &Link, look: Option<Duration>) -> Option<String> {
        let look = async {
            match look {
                Some(look) => tokio::time::sleep(look).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(look);
        loop {
            tokio::select! {
                () = self.list_changed.notified() => return None,
                () = &mut look => return None,
                () = self.suspicious.notified() => {
                    if let Err(why) = link.answers().await {
                        return Some(format!("it hangs or no longer answers: {why}"));
                    }
                }
            }
        }
    }

    async fn take(&self, ToolList { tools, is_whole, .. }: ToolList, has_parameter_headers: bool) {
        let count = tools.len();
        let (name, effects) = (self.settings.name.clone(), self.settings.effects.clone());
        let reading = move || listing::read(&name, &effects, &tools, has_parameter_headers);
        let reading = tokio::task::spawn_blocking(reading);
        let mut listed = reading.await.unwrap_or_default();
        if !is_whole {
            let warning = format!("it lists more than the {count} tools that are looked at");
            listed.warnings.push(warning);
        }
        let tools = Arc::new(listed.tools);
        let is_first = !self.is_listed.swap(true, Ordering::Relaxed);
        let before = std::mem::replace(&mut *self.tools.write(), Arc::clone(&tools));
        self.warnings.write().clone_from(&listed.warnings);
        if is_first || before != tools {
            self.dependencies.generation.fetch_add(1, Ordering::Release);
            for warning in listed.warnings {
                tracing::warn!(server = self.name(), warning, "the tools of an MCP server");
            }
        }
    }
}

/// When the list is looked at again, where the server need not say that it has changed.
fn look_after(link: &Link, fresh: Duration) -> Option<Duration> {
    match link.era() {
        Era::Old => link.is_address().then_some(POLL_INTERVAL),
        Era::New => {
            // Not at the same time as every other client of the server.
            Some(fresh.clamp(POLL_INTERVAL, LONGEST_LOOK).mul_f64(1.0 + jitter::fraction() / 10.0))
        }
    }
}

/// A directory, made where it is missing.
fn opened(directory: &Path) -> Result<OwnedFd, String> {
    let shown = directory.display();
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| format!("its directory {shown} cannot be made: {error}"))?;
    let flags =
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(directory, flags, rustix::fs::Mode::empty())
        .map_err(|error| format!("its directory {shown} cannot be opened: {error}"))
}
