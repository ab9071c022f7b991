//! Which files a program cannot be started without: its own, those of its parts, what runs it
//! where it is a script, and the loaders of dynamically linked programs.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parking_lot::Mutex;

/// Bytes of a script's first line.
const MAX_FIRST_LINE: u64 = 256;

/// The directories of the loaders of dynamically linked programs.
const LOADERS: &[&str] = &["/lib64", "/lib", "/lib32", "/usr/lib"];
/// Programs that consist of several, and the directories of their parts.
const PARTS: &[(&str, &[&str])] = &[
    (
        "git",
        &[
            "/usr/lib/git-core",
            "/usr/libexec/git-core",
            "/usr/local/lib/git-core",
            "/usr/local/libexec/git-core",
        ],
    ),
    ("gcc", &["/usr/lib/gcc", "/usr/libexec/gcc"]),
];

/// Which programs may be started.
#[derive(Debug, Clone, Copy)]
pub enum StartablePrograms<'a> {
    /// These, with the files that they need.
    Only(&'a [String]),
    /// Any of the system's.
    System,
    /// Any of the system's and of the workspace's.
    All,
}

/// The files of these programs, links resolved.
pub(super) fn files_of(programs: &[String]) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    for program in programs {
        add_program(Path::new(program), &mut files, 0);
    }
    files.extend(loaders());
    files
}

/// A program, its parts, and what runs it where it is a script.
fn add_program(program: &Path, files: &mut BTreeSet<PathBuf>, depth: usize) {
    let Ok(real) = fs::canonicalize(program) else { return };
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    for (_, parts) in PARTS.iter().filter(|(whole, _)| *whole == name) {
        files.extend(parts.iter().map(PathBuf::from));
    }
    let interpreter = first_line(&real);
    if !files.insert(real) || depth > 2 {
        return;
    }
    let Some(line) = interpreter.as_deref().and_then(|line| line.strip_prefix("#!")) else {
        return;
    };
    let mut words = line.split_whitespace();
    let Some(first) = words.next() else { return };
    add_program(Path::new(first), files, depth + 1);
    if first.ends_with("/env")
        && let Some(named) = words.find(|word| !word.starts_with('-'))
    {
        for directory in ["/usr/local/bin", "/usr/bin", "/bin"] {
            add_program(&Path::new(directory).join(named), files, depth + 1);
        }
    }
}

fn first_line(file: &Path) -> Option<String> {
    let mut start = Vec::new();
    fs::File::open(file).ok()?.take(MAX_FIRST_LINE).read_to_end(&mut start).ok()?;
    let line = start.split(|byte| *byte == b'\n').next()?;
    String::from_utf8(line.to_vec()).ok()
}

/// The loaders that were found when their directories had been modified last at these times.
struct Loaders {
    as_of: Vec<Option<SystemTime>>,
    found: Vec<PathBuf>,
}

/// The loaders. They are cached until one of their directories changes, because these contain thousands
/// of other files, and every call of a program needs the loaders.
fn loaders() -> Vec<PathBuf> {
    static KNOWN: Mutex<Loaders> = Mutex::new(Loaders { as_of: Vec::new(), found: Vec::new() });
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    let places: Vec<PathBuf> =
        LOADERS.iter().map(PathBuf::from).chain([Path::new("/usr/lib").join(triplet)]).collect();
    let modified = |place: &PathBuf| fs::metadata(place).and_then(|found| found.modified()).ok();
    let as_of: Vec<Option<SystemTime>> = places.iter().map(modified).collect();
    let mut known = KNOWN.lock();
    if known.as_of != as_of {
        let found = places.iter().flat_map(|place| loaders_in(place)).collect();
        *known = Loaders { as_of, found };
    }
    known.found.clone()
}

fn loaders_in(place: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(place).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        let is_loader =
            name.to_str().is_some_and(|name| name.starts_with("ld-") && name.contains(".so"));
        if is_loader { fs::canonicalize(entry.path()).ok() } else { None }
    })
}
