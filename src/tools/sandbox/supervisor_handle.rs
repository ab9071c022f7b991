//! The service's end of a supervisor, and of the fork server that supervisors come from, which is
//! kept for a minute after its last use.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::Shutdown;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::unix::pipe;
use tokio::net::{TcpListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::fork_server::{self, Streams};
use super::output::{self, MaxOutput, Output};
use super::plan::{MAX_PLAN, Plan, Report};
use super::{FORK_SERVER, SandboxError, WayOut, handles, network};

/// How long a fork server is kept without use.
const KEPT: Duration = Duration::from_mins(1);
/// Bytes of a report.
const MAX_REPORT: u64 = 64 * 1024;

/// Starts supervisors.
pub(super) struct Supervisors {
    binary: PathBuf,
    server: Arc<Mutex<Option<Arc<ForkServer>>>>,
}

impl Supervisors {
    pub(super) fn new(binary: &Path) -> Self {
        Self { binary: binary.to_owned(), server: Arc::default() }
    }

    /// A supervisor that works on this plan.
    pub(super) async fn start(
        &self,
        workspace: &OwnedFd,
        plan: &Plan,
        input: Option<&OwnedFd>,
    ) -> Result<SupervisorHandle, SandboxError> {
        let text = serde_json::to_vec(plan).map_err(io::Error::other)?;
        let length = u32::try_from(text.len()).ok().filter(|n| *n as usize <= MAX_PLAN);
        let length = length.ok_or(SandboxError::TooLarge)?;
        let server = self.server()?;
        let mut started = match server.fork().await {
            Ok(started) => started,
            Err(_gone) => {
                self.server.lock().take_if(|known| Arc::ptr_eq(known, &server));
                self.server()?.fork().await?
            }
        };
        started.give(workspace, length, &text, input).await?;
        Ok(started)
    }

    /// The error of a supervisor that did not answer in time. Its fork server may have been stopped,
    /// where the sandbox does not keep programs from that: the next call starts another one.
    pub(super) fn late(&self) -> io::Error {
        self.let_go();
        io::ErrorKind::TimedOut.into()
    }

    /// Ends the fork server; its supervisors continue.
    pub(super) fn let_go(&self) {
        self.server.lock().take();
    }

    fn server(&self) -> io::Result<Arc<ForkServer>> {
        let mut place = self.server.lock();
        if let Some(server) = &*place {
            *server.used.lock() = Instant::now();
            return Ok(Arc::clone(server));
        }
        let server = Arc::new(ForkServer::start(&self.binary)?);
        *place = Some(Arc::clone(&server));
        tokio::spawn(end_unused(Arc::downgrade(&self.server), Arc::downgrade(&server)));
        Ok(server)
    }
}

/// Drops a server that was not used for a while, unless it has ended already.
async fn end_unused(place: Weak<Mutex<Option<Arc<ForkServer>>>>, server: Weak<ForkServer>) {
    loop {
        let Some(used) = server.upgrade().map(|server| *server.used.lock()) else { return };
        tokio::time::sleep_until(used + KEPT).await;
        let (Some(place), Some(server)) = (place.upgrade(), server.upgrade()) else { return };
        let mut known = place.lock();
        if *server.used.lock() == used {
            known.take_if(|known| Arc::ptr_eq(known, &server));
            return;
        }
    }
}

/// A process that ends when this is dropped.
struct ForkServer {
    socket: UnixStream,
    used: Mutex<Instant>,
    /// Collected by the runtime when it has ended.
    _process: Child,
}

impl ForkServer {
    fn start(binary: &Path) -> io::Result<Self> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let process = Command::new(binary)
            .arg(FORK_SERVER)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .kill_on_drop(true) // a process that was stopped does not see the end of its socket
            .spawn()?;
        let socket = UnixStream::from_std(ours)?;
        Ok(Self { socket, used: Mutex::new(Instant::now()), _process: process })
    }

    async fn fork(&self) -> io::Result<SupervisorHandle> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let (stdout, writes) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, writes_errors) = pipe_with(PipeFlags::CLOEXEC)?;
        let streams = Streams {
            socket: theirs.as_fd(),
            stdout: writes.as_fd(),
            stderr: writes_errors.as_fd(),
        };
        let request = || fork_server::request(self.socket.as_fd(), &streams);
        self.socket.async_io(Interest::WRITABLE, request).await?;
        let streams =
            (pipe::Receiver::from_owned_fd(stdout)?, pipe::Receiver::from_owned_fd(stderr)?);
        Ok(SupervisorHandle {
            socket: UnixStream::from_std(ours)?,
            streams: Some(streams),
            held: None,
        })
    }
}

/// A supervisor, which ends when this is dropped.
pub(super) struct SupervisorHandle {
    socket: UnixStream,
    /// The output of the programs, until it is taken to be read elsewhere.
    streams: Option<(pipe::Receiver, pipe::Receiver)>,
    /// Dropped when it has ended.
    held: Option<oneshot::Sender<()>>,
}

/// The supervisor ends its programs when the socket is closed for writing, and then itself
/// as well.
impl Drop for SupervisorHandle {
    fn drop(&mut self) {
        if let Some(held) = self.held.take()
            && let Ok(runtime) = Handle::try_current()
            && let Ok(mut socket) = self.closed_for_writing()
        {
            runtime.spawn(async move {
                let _ = tokio::io::copy(&mut socket, &mut tokio::io::sink()).await; // its end counts
                drop(held);
            });
        }
    }
}

impl SupervisorHandle {
    fn closed_for_writing(&self) -> io::Result<UnixStream> {
        rustix::net::shutdown(&self.socket, Shutdown::Write)?;
        let again = self.socket.as_fd().try_clone_to_owned()?;
        UnixStream::from_std(again.into())
    }

    /// Drops this sender when the supervisor has ended.
    pub(super) fn holding(self, held: Option<oneshot::Sender<()>>) -> Self {
        let mut holding = self;
        holding.held = held;
        holding
    }

    /// Sends the length of a plan, with a handle on its directory, and then the plan.
    async fn give(
        &mut self,
        workspace: &OwnedFd,
        length: u32,
        text: &[u8],
        input: Option<&OwnedFd>,
    ) -> io::Result<()> {
        let (socket, head) = (&self.socket, length.to_be_bytes());
        socket
            .async_io(Interest::WRITABLE, || handles::send(socket, &head, &[workspace.as_fd()]))
            .await?;
        self.socket.write_all(text).await?;
        let (socket, Some(input)) = (&self.socket, input) else { return Ok(()) };
        socket.async_io(Interest::WRITABLE, || handles::send(socket, b"i", &[input.as_fd()])).await
    }

    /// What the programs write, to be read while they run.
    pub(super) fn streams(&mut self) -> io::Result<(pipe::Receiver, pipe::Receiver)> {
        self.streams.take().ok_or_else(|| io::Error::other("the streams are read elsewhere"))
    }

    /// Waits until a program that the service speaks to begins; the proxy's listening socket in its network.
    /// `None` if it has no network, or nothing was started.
    pub(super) async fn listener(&self) -> io::Result<Option<TcpListener>> {
        receive_listener(&self.socket).await
    }

    /// The report on programs whose output is read elsewhere.
    pub(super) async fn report(mut self) -> io::Result<Report> {
        let mut text = Vec::new();
        (&mut self.socket).take(MAX_REPORT).read_to_end(&mut text).await?;
        serde_json::from_slice(&text).map_err(|_| io::Error::other("it ended without a report"))
    }

    /// The report on the programs, and their output.
    pub(super) async fn ended(
        mut self,
        plan: &Plan,
        most: MaxOutput,
        way_out: Option<WayOut>,
        each_line: Option<&mut (dyn FnMut(&str) -> bool + Send)>,
    ) -> Result<(Report, Output, Output), SandboxError> {
        let (stdout, stderr) = self.streams()?;
        let talk = async {
            let listener = if plan.network { receive_listener(&self.socket).await? } else { None };
            let mut text = Vec::new();
            let mut socket = (&mut self.socket).take(MAX_REPORT);
            let reported = socket.read_to_end(&mut text);
            match (listener, way_out) {
                (Some(listener), Some(way_out)) => {
                    let serving = way_out(listener);
                    tokio::select! {
                        read = reported => read?,
                        () = serving => return Err(io::Error::other("its proxy has ended")),
                    }
                }
                _ => reported.await?,
            };
            io::Result::Ok(text)
        };
        let (talked, stdout, stderr) = tokio::join!(
            talk,
            output::captured(stdout, most.stdout, None),
            output::captured(stderr, most.stderr, each_line)
        );
        let (stdout, stderr) = (stdout?, stderr?);
        let report = talked.and_then(|text| {
            serde_json::from_slice(&text).map_err(|_| {
                let said = if plan.steps.is_empty() { "" } else { stderr.text.trim() };
                io::Error::other(format!("it ended without a report {said}"))
            })
        })?;
        Ok((report, stdout, stderr))
    }
}

async fn receive_listener(socket: &UnixStream) -> io::Result<Option<TcpListener>> {
    let Some(listener) = network::receive_listener(socket).await? else { return Ok(None) };
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener).map(Some)
}
