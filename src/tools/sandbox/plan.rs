//! The request to a supervisor ([`Plan`]) and its answer ([`Report`]): plain data, sent as JSON.
//!
//! A [`Plan`] is complete: the supervisor looks nothing up and decides only how to enforce the plan.
//! Relative paths are beneath the workspace, which is the supervisor's own working directory.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use crate::run::SandboxLevel;

/// Where programs find the proxy, in a network of their own in which there is nothing else.
pub const PROXY_PORT: u16 = 3128;
/// Bytes of a plan, input included.
pub const MAX_PLAN: usize = 24 * 1024 * 1024;

/// Programs to run, and the bounds in which they run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Where the programs start: beneath the workspace, or absolute.
    pub directory: String,
    /// The whole environment.
    pub environment: Vec<(String, String)>,
    /// What the first program reads on its standard input.
    pub input: Option<String>,
    /// Whether the first program reads, instead of `input`, a pipe that is sent after the plan and to
    /// which the service keeps writing. The service is told when the programs begin.
    #[serde(default)]
    pub is_spoken_to: bool,
    pub reach: Reach,
    pub limits: Limits,
    /// How long all of it may take.
    pub timeout_ms: u64,
    /// A directory of the operator's user that the programs' own temporary files go to.
    pub temporary: String,
    /// Whether namespaces are created; if not, the confinement works without them.
    pub namespaces: bool,
    /// Whether the programs reach a proxy of the service; in namespaces only.
    pub network: bool,
    /// Run nothing where the sandbox is weaker than this.
    pub at_least: SandboxLevel,
}

/// A pipeline, and when it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub when: When,
    /// Whether success counts as failure, and failure as success.
    pub negated: bool,
    pub commands: Vec<Command>,
}

/// The outcome of the earlier steps after which a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    Always,
    Succeeded,
    Failed,
}

/// One program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Absolute.
    pub program: String,
    /// The first one is the program's name, as it was written.
    pub arguments: Vec<String>,
    /// Beside the plan's.
    pub environment: Vec<(String, String)>,
    pub redirections: Vec<Redirection>,
    /// Whether it may change no file, whatever the others of its plan may.
    pub is_read_only: bool,
}

/// Where one of a program's three streams leads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirection {
    /// 0, 1 or 2.
    pub stream: u8,
    pub to: Target,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    Read(String),
    Write(String),
    Append(String),
    /// Where another of the three streams leads at that moment.
    Stream(u8),
}

/// The files that programs reach.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    pub grants: Vec<Grant>,
    /// Denied entries of granted directories, which mounts mask.
    pub masked: Vec<String>,
}

/// A file, or a directory with all that is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub path: String,
    pub access: Access,
    pub kind: GrantKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GrantKind {
    /// A directory, with all that is in it, made where it is missing and may be written.
    Tree,
    File,
    /// The names in a directory.
    Names,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub execute: bool,
}

impl Access {
    pub const READ: Self = Self { read: true, write: false, execute: false };
    pub const RUN: Self = Self { read: true, write: false, execute: true };
    pub const WRITE: Self = Self { read: false, write: true, execute: false };
}

/// What programs may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory of all of them together.
    pub memory: u64,
    /// Of one process.
    pub cpu_seconds: u64,
    pub processes: u64,
    /// Bytes of one file.
    pub file_size: u64,
    /// Of one process.
    pub open_files: u64,
}

/// The confinement of programs that is actually in force, as the supervisor found it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// The version of Landlock's interface; 0 where there is none.
    pub landlock: u32,
    pub seccomp: bool,
    pub namespaces: bool,
    /// Whether programs were given a network of their own.
    pub network: bool,
}

impl Confinement {
    /// Files are confined from Landlock's third version on (before it, files could be cut short),
    /// and processes outside cannot be signalled in a namespace of their own or from its sixth.
    pub fn level(&self) -> SandboxLevel {
        match (self.landlock, self.seccomp) {
            (3.., true) if self.namespaces || self.landlock >= 6 => SandboxLevel::Enforced,
            (0, false) if !self.namespaces => SandboxLevel::Unavailable,
            _ => SandboxLevel::Partial,
        }
    }
}

/// How a plan ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub confinement: Confinement,
    /// Of the last program that ran; 128 and more where a signal ended it.
    pub exit_code: Option<i32>,
    /// Why it was ended early.
    pub stopped: Option<Stopped>,
    /// Why nothing ran.
    pub failure: Option<String>,
}

/// Why programs were ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Stopped {
    Timeout,
    Memory,
    Processes,
    /// A program used up its time on the processor.
    CpuSeconds,
    /// A file became too large.
    FileSize,
}
