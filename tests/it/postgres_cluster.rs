//! A real PostgreSQL for tests, made from the installed binaries.
//!
//! One server serves all test processes that run at the same time: the first to come starts it,
//! each holds a lock while it lives, and a small watchdog stops it some seconds after the last lock
//! is gone. Each test gets a database of its own, copied from one with the schema.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::sync::OnceCell;
use toolloop::store;
use uuid::Uuid;

use crate::installing;

static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();
/// How databases are called that services reach through a pooler, where one is wanted.
const POOLED: &str = "toolloop_test";

struct Cluster {
    port: u16,
    /// The name of the database that others are copied from.
    template: String,
    /// Between the services and this, if that is wanted.
    pooler: Option<Pooler>,
    /// Held for the life of this process; the watchdog waits for it.
    _in_use: File,
}

/// The URL of a new database that has the schema, and no rows.
pub(crate) async fn fresh_database() -> String {
    let cluster = CLUSTER.get_or_init(Cluster::join).await;
    cluster.database(&cluster.template).await
}

/// The URL of a new database without anything.
pub(crate) async fn empty_database() -> String {
    CLUSTER.get_or_init(Cluster::join).await.database("template0").await
}

/// A server of one test's own, which may go away and come back.
pub(crate) struct OwnServer {
    server: Server,
    port: u16,
}

impl OwnServer {
    pub(crate) fn start() -> Self {
        let home =
            std::env::temp_dir().join(format!("toolloop-postgres-{}", Uuid::now_v7().simple()));
        let server = Server::at(home);
        let port = server.start();
        Self { server, port }
    }

    /// A server that follows this one.
    pub(crate) fn standby(&self) -> Self {
        let home = self.server.home.with_extension("standby");
        let server = Server::at(home);
        let mut copy = server.command("pg_basebackup");
        copy.args(["-d", &self.url(), "-R", "-X", "stream", "-c", "fast", "--no-sync", "-D"]);
        assert!(copy.arg(server.data()).status().unwrap().success(), "pg_basebackup failed");
        let port = free_port();
        assert!(server.start_on(port), "see {}", server.home.join("log").display());
        Self { server, port }
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Makes a directory that belongs to the server.
    pub(crate) fn directory(&self, path: &Path) {
        fs::create_dir(path).unwrap();
        if let Some((uid, gid)) = self.server.user {
            std::os::unix::fs::chown(path, Some(uid), Some(gid)).unwrap();
        }
    }

    /// Ends all connections and shuts down.
    pub(crate) fn stop(&self) {
        self.server.stop("fast");
    }

    /// As when its processes die: nothing is written any more, and the start recovers.
    pub(crate) fn kill(&self) {
        self.server.stop("immediate");
    }

    pub(crate) fn start_again(&self) {
        assert!(self.server.start_on(self.port), "see {}", self.server.home.join("log").display());
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        self.server.stop("immediate");
        let _ = fs::remove_dir_all(&self.server.home);
    }
}

impl Cluster {
    /// Joins the running server, or starts it.
    async fn join() -> Self {
        let server = Server::shared();
        let in_use = open(&server.home.join("in-use"));
        in_use.lock_shared().unwrap();
        let starting = open(&server.home.join("starting"));
        starting.lock().unwrap();
        let running = server.running();
        let port = running.unwrap_or_else(|| server.start());
        if running.is_none() {
            server.watch();
        }
        let schema = include_str!("../../migrations/postgres/0001_schema.sql");
        let mut hasher = DefaultHasher::new();
        schema.hash(&mut hasher);
        let template = format!("toolloop_schema_{:x}", hasher.finish());
        let pooler = match Pooler::wanted() {
            Some(program) => Some(Pooler::start(&program, &server, port).await),
            None => None,
        };
        let cluster = Self { port, template, pooler, _in_use: in_use };
        cluster.make_template().await;
        cluster
    }

    /// Another process may have made it.
    async fn make_template(&self) {
        let mut admin = self.admin().await;
        let is_there: bool =
            sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
                .bind(&self.template)
                .fetch_one(&mut admin)
                .await
                .unwrap();
        if is_there {
            return;
        }
        let making = format!("{}_making", self.template);
        for sql in [
            format!("DROP DATABASE IF EXISTS {making}"),
            format!("CREATE DATABASE {making} TEMPLATE template0"),
        ] {
            admin.execute(AssertSqlSafe(sql)).await.unwrap();
        }
        let store = store::open(&self.url(&making), 1, false).await.unwrap();
        store.migrate().await.unwrap();
        store.close().await;
        let rename = format!("ALTER DATABASE {making} RENAME TO {}", self.template);
        admin.execute(AssertSqlSafe(rename)).await.unwrap();
    }

    async fn database(&self, template: &str) -> String {
        let kind = if template == self.template { POOLED } else { "toolloop_empty" };
        let name = format!("{kind}_{}", Uuid::now_v7().simple());
        let create = format!("CREATE DATABASE {name} TEMPLATE {template}");
        let mut admin = self.admin().await;
        admin.execute(AssertSqlSafe(create)).await.unwrap();
        if self.pooler.is_some() {
            // What a service would have set for its connections.
            for setting in [
                "statement_timeout = '5s'",
                "lock_timeout = '2s'",
                "idle_in_transaction_session_timeout = '10s'",
                "jit = off",
                "enable_seqscan = off",
            ] {
                let set = format!("ALTER DATABASE {name} SET {setting}");
                admin.execute(AssertSqlSafe(set)).await.unwrap();
            }
        }
        self.url(&name)
    }

    fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    async fn admin(&self) -> PgConnection {
        PgConnection::connect(&self.url("postgres")).await.unwrap()
    }
}

/// The address by which a service has this database, where it is not the database's own: with
/// `TOOLLOOP_TEST_PGBOUNCER`, a path, that of a PgBouncer in transaction mode.
pub(crate) fn pooled(url: &str) -> Option<String> {
    let cluster = CLUSTER.get()?;
    let port = cluster.pooler.as_ref()?.port;
    let direct = format!(":{}/{POOLED}_", cluster.port);
    url.contains(&direct).then(|| url.replace(&direct, &format!(":{port}/{POOLED}_")))
}

/// A PgBouncer in transaction mode, for as long as this process lives.
struct Pooler {
    port: u16,
    /// Its input ends with this process, and it with that.
    _watched: Child,
}

impl Pooler {
    fn wanted() -> Option<PathBuf> {
        std::env::var_os("TOOLLOOP_TEST_PGBOUNCER").map(PathBuf::from)
    }

    async fn start(program: &Path, server: &Server, database: u16) -> Self {
        let port = free_port();
        let settings = server.home.join(format!("pooler-{port}.ini"));
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={database} user=postgres\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = transaction\nmax_prepared_statements = 500\n\
             ignore_startup_parameters = extra_float_digits\nmax_client_conn = 2000\n\
             default_pool_size = 10\nserver_idle_timeout = 3\nlogfile = {}\n",
            server.home.join("pooler.log").display()
        );
        fs::write(&settings, text).unwrap();
        let mut watched = server.command("/bin/sh");
        watched.args(["-c", r#""$1" "$2" & read _; kill $!"#, "sh"]).arg(program).arg(settings);
        let watched = watched.stdin(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_mins(1), "PgBouncer does not start");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Self { port, _watched: watched }
    }
}

/// Where the binaries and the data are, and who runs them.
struct Server {
    bin: PathBuf,
    home: PathBuf,
    /// User and group, where this process is root: PostgreSQL refuses to run as root.
    user: Option<(u32, u32)>,
}

impl Server {
    /// The one that tests share: under `target/`, or where another user can reach it.
    fn shared() -> Self {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let open_to_others =
            |dir: &Path| fs::metadata(dir).is_ok_and(|dir| dir.permissions().mode() & 0o001 != 0);
        if !is_root() || target.ancestors().all(open_to_others) {
            return Self::at(target.join("postgres"));
        }
        let name = target.to_string_lossy().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        Self::at(std::env::temp_dir().join(format!("toolloop-postgres{name}")))
    }

    fn at(home: PathBuf) -> Self {
        let bin = binaries().unwrap_or_else(|| {
            installing::apt("postgresql");
            binaries().expect(
                "initdb is not found: install PostgreSQL, or put its bin directory into PATH",
            )
        });
        let user = is_root().then(|| (id("-u"), id("-g")));
        fs::create_dir_all(&home).unwrap();
        if let Some((uid, gid)) = user {
            std::os::unix::fs::chown(&home, Some(uid), Some(gid)).unwrap();
        }
        Self { bin, home, user }
    }

    fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .current_dir(&self.home)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// The port of the server that runs on the data directory.
    fn running(&self) -> Option<u16> {
        let status =
            self.command("pg_ctl").arg("-D").arg(self.data()).arg("status").status().unwrap();
        let pid_file = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        pid_file.lines().nth(3).filter(|_| status.success())?.parse().ok()
    }

    /// Starts it with a new directory: what tests have left is deleted faster than dropped.
    fn start(&self) -> u16 {
        // Another process may take the port before the server does; hence three tries.
        for _ in 0..3 {
            let _ = fs::remove_dir_all(self.data());
            let mut init = self.command("initdb");
            init.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]);
            init.arg("-D").arg(self.data());
            let is_made = init.status().unwrap().success();
            assert!(is_made, "initdb failed in {}", self.home.display());
            let port = free_port();
            if self.start_on(port) {
                return port;
            }
        }
        panic!("PostgreSQL does not start, see {}", self.home.join("log").display());
    }

    fn start_on(&self, port: u16) -> bool {
        // In a thousand databases, the next one to be vacuumed would be due all the time.
        let options = format!(
            "-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off \
             -c full_page_writes=off -c autovacuum=off -c max_connections=400 -c shared_buffers=64MB"
        );
        let mut start = self.command("pg_ctl");
        start
            .arg("-D")
            .arg(self.data())
            .arg("-l")
            .arg(self.home.join("log"))
            .args(["-w", "-o", &options, "start"]);
        start.status().unwrap().success()
    }

    fn stop(&self, mode: &str) {
        let mut stop = self.command("pg_ctl");
        stop.arg("-D").arg(self.data()).args(["-w", "-m", mode, "stop"]);
        let _ = stop.status();
    }

    /// Stops the server when no test process has been there for a while, and deletes its data.
    fn watch(&self) {
        let script = r#"(
            while sleep 15; do
                "$1" -D "$2" status || exit
                flock --nonblock --exclusive "$3" /bin/sh -c '
                    "$1" -D "$2" -m immediate stop && rm -rf "$2"
                ' sh "$1" "$2" && exit
            done
        ) &"#;
        let mut watchdog = self.command("/bin/sh");
        watchdog.args(["-c", script, "sh"]).args([
            self.bin.join("pg_ctl"),
            self.data(),
            self.home.join("in-use"),
        ]);
        assert!(watchdog.process_group(0).status().unwrap().success());
    }
}

/// A port that no listener at port 0 and no connection is given, also while the server at it is down.
pub(crate) fn free_port() -> u16 {
    loop {
        let port = 20_000 + u16::try_from(Uuid::new_v4().as_u128() % 10_000).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// The newest installed version, or what is in `PATH`.
fn binaries() -> Option<PathBuf> {
    let installed = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut installed: Vec<PathBuf> = installed.map(|version| version.path().join("bin")).collect();
    installed
        .sort_by_key(|bin| bin.parent().and_then(|v| v.file_name()?.to_str()?.parse::<u32>().ok()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    installed
        .into_iter()
        .rev()
        .chain(std::env::split_paths(&path))
        .find(|bin| bin.join("initdb").exists())
}

fn id(which: &str) -> u32 {
    let of = |user: &str| {
        let output = Command::new("id")
            .args([which, user])
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    of("postgres").or_else(|| of("nobody")).expect("neither the user postgres nor nobody exists")
}

fn open(path: &Path) -> File {
    let file =
        File::options().create(true).truncate(false).read(true).write(true).open(path).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o644)).unwrap();
    file
}
