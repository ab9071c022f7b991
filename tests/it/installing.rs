//! What tests need beside Rust, installed where it is missing: Debian packages by apt, npm packages
//! and Python packages of pinned versions into `target/tmp/clients`, once for all runs.
//!
//! A machine that cannot reach the registries and has nothing installed fails with the command that
//! failed; nothing waits for ever.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// How long an installation may take.
const PATIENCE: Duration = Duration::from_mins(15);

/// Where Debian puts the sources of Go packages.
pub(crate) const GO_PACKAGES: &str = "/usr/share/gocode";

/// Installs packages where that needs no password: as root on a system with apt. One process at a time.
pub(crate) fn apt(packages: &str) {
    let lock = File::create(std::env::temp_dir().join("toolloop-apt.lock")).unwrap();
    lock.lock().unwrap();
    let script = format!(
        "export DEBIAN_FRONTEND=noninteractive; timeout 300 apt-get update && timeout 900 apt-get install -y {packages}"
    );
    let _ = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).status();
}

/// Node.js, and npm with it.
pub(crate) fn node() {
    if !works("node", &["--version"]) || !works("npm", &["--version"]) {
        apt("nodejs npm");
    }
    assert!(
        works("npm", &["--version"]),
        "node and npm are not found: install them, or put them into PATH"
    );
}

/// A directory of `tests/clients`, copied to where its packages are installed.
pub(crate) struct Workshop {
    pub(crate) dir: PathBuf,
    /// Others wait until this test is done with the directory.
    _alone: File,
}

impl Workshop {
    /// With the packages of `package-lock.json` in `node_modules`.
    pub(crate) async fn node() -> Self {
        node();
        let workshop = Self::open("typescript");
        if !workshop.is_stocked("package-lock.json") {
            let arguments =
                ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"];
            workshop.run_within(PATIENCE, "npm", &arguments, &[]).await;
            workshop.note_stock("package-lock.json");
        }
        workshop
    }

    /// With the packages of `requirements.txt` in the virtual environment `venv`.
    pub(crate) async fn python() -> Self {
        let check = ["-c", "import sys, venv, ensurepip; assert sys.version_info >= (3, 11)"];
        if !works("python3", &check) {
            apt("python3 python3-venv");
        }
        assert!(
            works("python3", &check),
            "Python 3.11 with venv is not found: install it, or put it into PATH"
        );
        let workshop = Self::open("python");
        workshop.stock_python().await;
        workshop
    }

    /// With moto, a server that speaks S3, in the virtual environment `venv`.
    pub(crate) async fn moto() -> Self {
        let check = ["-c", "import venv, ensurepip"];
        if !works("python3", &check) {
            apt("python3 python3-venv");
        }
        assert!(works("python3", &check), "Python with venv is not found: install it");
        let workshop = Self::open("moto");
        workshop.stock_python().await;
        workshop
    }

    /// With openapi-generator, which Java runs, in the virtual environment `venv`, and Go.
    pub(crate) async fn go() -> Self {
        if !works("go", &["version"]) || !Path::new(GO_PACKAGES).join("src/gopkg.in").exists() {
            apt("golang-go golang-gopkg-validator.v2-dev");
        }
        assert!(works("go", &["version"]), "Go is not found: install it, or put it into PATH");
        Self::openapi_generator("go").await
    }

    /// With openapi-generator and a Java compiler.
    pub(crate) async fn java() -> Self {
        if !works("javac", &["--version"]) || !Path::new("/usr/share/java/jsr305.jar").exists() {
            apt("openjdk-17-jdk-headless libjsr305-java libjakarta-annotation-api-java");
        }
        assert!(works("javac", &["--version"]), "javac is not found: install it");
        Self::openapi_generator("java").await
    }

    /// With openapi-generator; Rust is here already.
    pub(crate) async fn rust() -> Self {
        Self::openapi_generator("rust").await
    }

    async fn openapi_generator(name: &str) -> Self {
        if !works("java", &["-version"]) {
            apt("default-jre-headless python3-venv");
        }
        assert!(works("java", &["-version"]), "Java is not found: install it");
        let workshop = Self::open(name);
        let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/generator.txt");
        fs::copy(list, workshop.dir.join("requirements.txt")).unwrap();
        workshop.stock_python().await;
        workshop
    }

    /// Installs `requirements.txt`.
    async fn stock_python(&self) {
        if self.is_stocked("requirements.txt") {
            return;
        }
        self.run_within(PATIENCE, "python3", &["-m", "venv", "--clear", "venv"], &[]).await;
        let quietly = ["--no-input", "--disable-pip-version-check", "--quiet", "--retries", "1"];
        let arguments =
            [&["-m", "pip", "install", "--no-deps", "-r", "requirements.txt"], &quietly[..]]
                .concat();
        self.run_within(PATIENCE, "venv/bin/python", &arguments, &[]).await;
        self.note_stock("requirements.txt");
    }

    fn open(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join(name);
        fs::create_dir_all(&dir).unwrap();
        let alone = File::create(dir.join("lock")).unwrap();
        alone.lock().unwrap();
        for file in
            fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name))
                .unwrap()
        {
            let file = file.unwrap();
            fs::copy(file.path(), dir.join(file.file_name())).unwrap();
        }
        Self { dir, _alone: alone }
    }

    /// Whether all packages of a list are installed.
    fn is_stocked(&self, list: &str) -> bool {
        let read = |name: &str| fs::read(self.dir.join(name)).ok();
        read("stock").is_some_and(|stock| Some(stock) == read(list))
    }

    fn note_stock(&self, list: &str) {
        fs::copy(self.dir.join(list), self.dir.join("stock")).unwrap();
    }

    /// What a program prints, which must end well and within ten minutes.
    pub(crate) async fn run(
        &self,
        program: &str,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> String {
        self.run_within(Duration::from_mins(10), program, arguments, environment).await
    }

    /// The same with other patience. A program with a slash is one of the directory.
    pub(crate) async fn run_within(
        &self,
        patience: Duration,
        program: &str,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> String {
        let (status, printed) = self.outcome(patience, program, arguments, environment).await;
        assert!(status, "{program} {} failed:\n{printed}", arguments.join(" "));
        printed
    }

    /// Whether a program ended well, and what it printed.
    pub(crate) async fn outcome(
        &self,
        patience: Duration,
        program: &str,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> (bool, String) {
        let path = if program.contains('/') { self.dir.join(program) } else { program.into() };
        let search = std::env::var("PATH").unwrap_or_default();
        let own = format!("{0}/venv/bin:{0}/node_modules/.bin:{search}", self.dir.display());
        let mut command = tokio::process::Command::new(path);
        command.args(arguments).env("PATH", own).envs(environment.iter().copied());
        command.current_dir(&self.dir).stdin(Stdio::null()).kill_on_drop(true);
        let what = format!("{program} {}", arguments.join(" "));
        let Ok(ended) = tokio::time::timeout(patience, command.output()).await else {
            panic!("{what} did not end within {patience:?}");
        };
        let Output { status, stdout, stderr } =
            ended.unwrap_or_else(|error| panic!("{what} cannot be run: {error}"));
        (
            status.success(),
            [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n"),
        )
    }
}

fn works(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
