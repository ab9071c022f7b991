//! The system calls that are refused to programs in the sandbox.
//!
//! It is a deny list, since programs of any kind must run. Refused is access to other machines and to
//! other processes of this one (sockets of all families, also through `io_uring`, and inspecting
//! processes), to privileges and kernel interfaces, and to memory that no limit counts. The only sockets
//! left are pairs of connected local stream sockets. Programs with a network of their own may also connect
//! by TCP over IPv4, where they can reach only the proxy.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter, sock_filter,
};

/// Calls with this bit are those of the x32 interface, and would not be recognised by number.
const X32_BIT: u32 = 0x4000_0000;

/// The bits of a socket's type that are not flags.
const KINDS: u64 = 0xf;
/// Refused whatever their arguments.
const REFUSED: &[i64] = &[
    // other machines, and other processes through sockets
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // other processes
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    // memory and names that outlive a process and that no limit counts
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_memfd_secret,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // namespaces, mounts and files by handle
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    LISTMOUNT,
    STATMOUNT,
    // what other processes do with files, and what only an administrator needs
    libc::SYS_inotify_add_watch,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    // the kernel itself
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    // One processor is left to the service.
    libc::SYS_sched_setaffinity,
];
/// Numbers that the crate does not name; they are the same on all processors.
const STATMOUNT: i64 = 457;
const LISTMOUNT: i64 = 458;
const SETXATTRAT: i64 = 463;
const REMOVEXATTRAT: i64 = 466;
const FILE_SETATTR: i64 = 469;
/// Refused where there is no network.
const CONNECTING: &[i64] = &[libc::SYS_socket, libc::SYS_connect];
/// Refused on this processor alone.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[i64] = &[
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
    libc::SYS_kexec_file_load,
];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[i64] = &[];
/// Calls that change a file's mode, owner, times or attributes, which Landlock does not check. Refused if
/// no read-only mounts protect these.
const ATTRIBUTES: &[i64] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    SETXATTRAT,
    REMOVEXATTRAT,
    FILE_SETATTR,
];
#[cfg(target_arch = "x86_64")]
const ATTRIBUTES_HERE: &[i64] = &[
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
];
#[cfg(not(target_arch = "x86_64"))]
const ATTRIBUTES_HERE: &[i64] = &[];
/// The same as requests of `ioctl`, for which it is enough that a file is open for reading: flags, extended
/// flags, version, and making it unchangeable (fs-verity).
const ATTRIBUTE_REQUESTS: [u64; 4] = [0x4008_6602, 0x401C_5820, 0x4008_7602, 0x4080_6685];
/// Fail with ENOSYS, so that programs fall back to other calls: their arguments are in memory that a
/// filter cannot read, or they allocate memory that no limit counts.
const UNKNOWN: &[i64] = &[libc::SYS_clone3, libc::SYS_memfd_create];

/// Calls whose first argument is a process, or 0 for the caller.
const OF_A_PROCESS: &[i64] =
    &[libc::SYS_sched_setscheduler, libc::SYS_sched_setparam, libc::SYS_sched_setattr];

/// Installs the filters for this process and its descendants. Without namespaces,
/// only these filters protect other processes and the attributes of files.
pub(super) fn refuse_calls(has_namespaces: bool, network: bool) -> io::Result<()> {
    let compiled = filters(has_namespaces, network).map_err(io::Error::other)?;
    compiled.iter().try_for_each(|filter| apply_filter(filter).map_err(io::Error::other))
}

fn filters(
    has_namespaces: bool,
    network: bool,
) -> Result<[BpfProgram; 2], seccompiler::BackendError> {
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().chain(REFUSED_HERE).map(|call| (*call, vec![])).collect();
    if !has_namespaces {
        refused.extend(ATTRIBUTES.iter().chain(ATTRIBUTES_HERE).map(|call| (*call, vec![])));
        refused.extend(settings_of_others()?);
    }
    // A program may lower its own limits, and no others'.
    refused.insert(libc::SYS_prlimit64, vec![only(argument(0, Op::Ne, 0)?)?]);
    // Pages of shared memory that a process gives back remain, and count for no process.
    let shared = u64::from((libc::MAP_SHARED | libc::MAP_ANONYMOUS).unsigned_abs());
    refused.insert(libc::SYS_mmap, vec![only(argument(3, Op::MaskedEq(shared), shared)?)?]);
    if network {
        refused.insert(libc::SYS_socket, other_than_tcp()?);
    } else {
        refused.extend(CONNECTING.iter().map(|call| (*call, vec![])));
    }
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    let datagrams = u64::from(libc::SOCK_DGRAM.unsigned_abs());
    let raw = u64::from(libc::SOCK_RAW.unsigned_abs());
    refused.insert(
        libc::SYS_socketpair,
        vec![
            only(argument(0, Op::Ne, unix)?)?,
            // A pair for datagrams could still send to the socket of another process by name.
            only(argument(1, Op::MaskedEq(KINDS), datagrams)?)?,
            only(argument(1, Op::MaskedEq(KINDS), raw)?)?,
        ],
    );
    // Sending is allowed on connected pairs only, never to an address.
    let addressed = SeccompCondition::new(4, Len::Qword, Op::Ne, 0)?;
    refused.insert(libc::SYS_sendto, vec![only(addressed)?]);
    let terminal = [libc::TIOCSTI, libc::TIOCLINUX];
    let attributes = ATTRIBUTE_REQUESTS.iter().filter(|_| !has_namespaces);
    let requests = terminal.iter().chain(attributes);
    let requests = requests.map(|request| only(argument(1, Op::Eq, *request)?));
    refused.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    let spaces = [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWCGROUP,
    ];
    let makes_space = spaces.iter().map(|space| {
        let bit = u64::from(space.unsigned_abs());
        only(argument(0, Op::MaskedEq(bit), bit)?)
    });
    refused.insert(libc::SYS_clone, makes_space.collect::<Result<_, _>>()?);
    let unknown = UNKNOWN.iter().map(|call| (*call, vec![])).collect();
    Ok([compiled(refused, libc::EPERM)?, compiled(unknown, libc::ENOSYS)?])
}

fn argument(index: u8, op: Op, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(index, Len::Dword, op, value)
}

fn only(condition: SeccompCondition) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![condition])
}

/// Priorities and processors of other processes of this user.
fn settings_of_others() -> Result<Vec<(i64, Vec<SeccompRule>)>, seccompiler::BackendError> {
    let mut refused = Vec::new();
    for call in OF_A_PROCESS {
        refused.push((*call, vec![only(argument(0, Op::Ne, 0)?)?]));
    }
    let users = [(libc::SYS_setpriority, u64::from(libc::PRIO_USER)), (libc::SYS_ioprio_set, 3)];
    for (call, of_a_user) in users {
        let rules = [argument(0, Op::Eq, of_a_user)?, argument(1, Op::Ne, 0)?];
        refused.push((call, rules.into_iter().map(only).collect::<Result<_, _>>()?));
    }
    Ok(refused)
}

/// Every socket but one of TCP over IPv4.
fn other_than_tcp() -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let [family, stream, tcp] =
        [libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP].map(|n| u64::from(n.unsigned_abs()));
    let mut refused = vec![only(argument(0, Op::Ne, family)?)?];
    for kind in (0..=KINDS).filter(|kind| *kind != stream) {
        refused.push(only(argument(1, Op::MaskedEq(KINDS), kind)?)?);
    }
    refused.push(SeccompRule::new(vec![argument(2, Op::Ne, 0)?, argument(2, Op::Ne, tcp)?])?);
    Ok(refused)
}

fn compiled(
    refused: BTreeMap<i64, Vec<SeccompRule>>,
    error: i32,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let refuse = SeccompAction::Errno(error.unsigned_abs());
    let filter = SeccompFilter::new(refused, SeccompAction::Allow, refuse, architecture)?;
    let mut program = foreign_numbers_refused();
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

/// Instructions that go before a filter: calls whose numbers are of the other interface of this
/// processor are refused, since the filter knows only the usual ones.
fn foreign_numbers_refused() -> BpfProgram {
    let [load, jump, answer] = [0x20, 0x35, 0x06]; // BPF_LD|W|ABS, BPF_JMP|JGE|K, BPF_RET|K
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
    vec![
        sock_filter { code: load, jt: 0, jf: 0, k: 0 },
        sock_filter { code: jump, jt: 0, jf: 1, k: X32_BIT },
        sock_filter { code: answer, jt: 0, jf: 0, k: refuse },
    ]
}
