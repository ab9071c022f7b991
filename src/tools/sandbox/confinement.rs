//! What confines a process and all its descendants for good: no new privileges, no capabilities,
//! resource limits, and Landlock for files, TCP, signals and abstract sockets.
//!
//! It is applied to the runner, before it starts the first program. What cannot be applied is reported;
//! the plan says which level of confinement is required.

use std::io;
use std::os::fd::OwnedFd;

use super::plan::{Access, Grant, GrantKind, Limits};
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus,
    NetPort, PathBeneath, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope,
};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

/// The newest version of Landlock's interface that is asked for.
const NEWEST: ABI = ABI::V6;
/// A path that may be reached, held open.
pub(super) struct ReachablePath {
    pub(super) handle: OwnedFd,
    pub(super) access: Access,
    pub(super) kind: GrantKind,
}

/// Opens the paths that a plan grants. Paths that do not exist are skipped.
pub(super) fn open(grants: &[Grant]) -> io::Result<Vec<ReachablePath>> {
    let mut reached = Vec::with_capacity(grants.len());
    for Grant { path, access, kind } in grants {
        match open_path(path) {
            Ok(handle) => reached.push(ReachablePath { handle, access: *access, kind: *kind }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => {}
            Err(e) => return Err(io::Error::new(e.kind(), format!("{path}: {e}"))),
        }
    }
    Ok(reached)
}

/// A path of a plan: beneath the workspace without following any link, or the operator's own.
pub(super) fn open_path(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(if path.starts_with('/') {
        rustix::fs::open(path, flags, Mode::empty())?
    } else {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let flags = flags | OFlags::NOFOLLOW;
        rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), beneath)?
    })
}

/// Sets the limits of every program, and those that the kernel counts for all programs together.
pub(super) fn limit(limits: &Limits, counts_processes: bool) -> io::Result<()> {
    let both = |value| Rlimit { current: Some(value), maximum: Some(value) };
    // At the soft limit a program gets a signal, and at the hard limit it is killed.
    let killed = Some(limits.cpu_seconds.saturating_add(1));
    setrlimit(Resource::Cpu, Rlimit { current: Some(limits.cpu_seconds), maximum: killed })?;
    setrlimit(Resource::Fsize, both(limits.file_size))?;
    setrlimit(Resource::Core, both(0))?;
    if counts_processes {
        // The two additional tasks are the supervisor and the runner.
        setrlimit(Resource::Nproc, both(limits.processes.saturating_add(2)))?;
    }
    Ok(())
}

/// Sets the limits under which the runner itself could not work, immediately before a program starts.
pub(super) fn limit_program(limits: &Limits) -> io::Result<()> {
    let both = |value| Rlimit { current: Some(value), maximum: Some(value) };
    setrlimit(Resource::Data, both(limits.memory))?;
    setrlimit(Resource::Nofile, both(limits.open_files))?;
    Ok(())
}

/// Gives up every capability, and every means to regain one.
pub(super) fn drop_capabilities() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED;
    // Without the capability to set them there is none to give up.
    let _ = rustix::thread::set_capabilities_secure_bits(bits);
    let _ = rustix::thread::clear_ambient_capability_set();
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    )?;
    Ok(())
}

/// Restricts files to what is reached, TCP to this port or to nothing, and signals and abstract
/// sockets to the programs themselves. Returns the version of the interface that does so; 0 for
/// none.
pub(super) fn landlock(reached: &[ReachablePath], port: Option<u16>) -> Result<u32, RulesetError> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let ruleset = reached.iter().try_fold(ruleset, allow)?;
    let ruleset = port.into_iter().try_fold(ruleset, |ruleset, port| {
        ruleset.add_rule(NetPort::new(port, AccessNet::ConnectTcp))
    })?;
    let status = ruleset.restrict_self()?;
    Ok(match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, _) => 0,
        (_, LandlockStatus::Available { effective_abi, kernel_abi }) => {
            kernel_abi.unwrap_or(effective_abi as i32).unsigned_abs()
        }
        _ => 0,
    })
}

/// Removes from this process, and from the program that it becomes, every right to change files except
/// temporary ones and `/dev/null`. Open files stay open.
pub(super) fn read_only(temporary: &str) -> Result<(), RulesetError> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_write(NEWEST))?
        .create()?;
    let stays = [(temporary, GrantKind::Tree), ("/dev/null", GrantKind::File)];
    let ruleset = stays.into_iter().try_fold(ruleset, |ruleset, (path, kind)| {
        let Ok(handle) = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        else {
            return Ok(ruleset);
        };
        let rights = AccessFs::from_write(NEWEST);
        let of_file = AccessFs::from_file(NEWEST);
        let rights = if kind == GrantKind::File { rights & of_file } else { rights };
        ruleset.add_rule(PathBeneath::new(&handle, rights))
    })?;
    ruleset.restrict_self().map(|_status| ())
}

fn allow(ruleset: RulesetCreated, reached: &ReachablePath) -> Result<RulesetCreated, RulesetError> {
    let Access { read, write, execute } = reached.access;
    let mut rights = BitFlags::<AccessFs>::empty();
    if reached.kind == GrantKind::Names {
        rights |= AccessFs::ReadDir;
    } else {
        if read {
            rights |= AccessFs::ReadFile | AccessFs::ReadDir;
        }
        if write {
            rights |= AccessFs::from_write(NEWEST) | AccessFs::IoctlDev;
        }
        if execute {
            rights |= AccessFs::Execute;
        }
    }
    if reached.kind == GrantKind::File {
        rights &= AccessFs::from_file(NEWEST);
    }
    // No program may make devices or listening sockets.
    rights &= !(AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeSock);
    if rights.is_empty() {
        return Ok(ruleset);
    }
    ruleset.add_rule(PathBeneath::new(&reached.handle, rights))
}
