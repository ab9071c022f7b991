//! The table of programs that run other programs, and of options that make a program write or run something.
//!
//! The table is a convenience for authors of rules: the sandbox also confines programs that are not in it. A rule
//! that names such an option in its argument pattern permits it.

/// Programs whose work is to run what their arguments or files say. Digits, dots and dashes at the
/// end of a name do not count.
const RUNNERS: &[&str] = &[
    "R",
    "Rscript",
    "ant",
    "apt",
    "apt-get",
    "aptitude",
    "ash",
    "at",
    "awk",
    "bash",
    "batch",
    "bazel",
    "bun",
    "bundle",
    "busybox",
    "c++",
    "cargo",
    "catchsegv",
    "cc",
    "choom",
    "chroot",
    "chrt",
    "clang",
    "clang++",
    "cmake",
    "composer",
    "cpp",
    "crontab",
    "csh",
    "dash",
    "dbus-run-session",
    "dc",
    "debconf",
    "deno",
    "doas",
    "docker",
    "dotnet",
    "dpkg",
    "ed",
    "elixir",
    "emacs",
    "entr",
    "env",
    "erl",
    "ex",
    "expect",
    "fakeroot",
    "faketime",
    "firejail",
    "fish",
    "flock",
    "g++",
    "gawk",
    "gcc",
    "gdb",
    "gem",
    "ghci",
    "gmake",
    "go",
    "gradle",
    "groff",
    "guile",
    "gview",
    "gvim",
    "i386",
    "instmodsh",
    "ionice",
    "java",
    "jest",
    "jshell",
    "julia",
    "kotlin",
    "ksh",
    "kubectl",
    "ld-linux-x86-64.so",
    "less",
    "linux32",
    "linux64",
    "ltrace",
    "lua",
    "luajit",
    "lynx",
    "m4",
    "make",
    "man",
    "mawk",
    "meson",
    "mix",
    "mocha",
    "more",
    "most",
    "mvn",
    "mysql",
    "nano",
    "nawk",
    "nc",
    "ncat",
    "nice",
    "ninja",
    "node",
    "nodejs",
    "nohup",
    "nox",
    "npm",
    "npx",
    "nsenter",
    "numactl",
    "nvim",
    "original-awk",
    "osascript",
    "parallel",
    "perf",
    "perl",
    "perlbug",
    "perldoc",
    "pg",
    "php",
    "pico",
    "pip",
    "pipx",
    "pkexec",
    "pnpm",
    "podman",
    "poetry",
    "prlimit",
    "prove",
    "psql",
    "pydoc",
    "pypy",
    "pytest",
    "python",
    "rake",
    "rgview",
    "rgvim",
    "rlwrap",
    "rpm",
    "rsync",
    "ruby",
    "run-parts",
    "runuser",
    "rustc",
    "rview",
    "rvim",
    "sbcl",
    "scala",
    "scp",
    "screen",
    "script",
    "setarch",
    "setpriv",
    "setsid",
    "sftp",
    "sh",
    "snap",
    "socat",
    "sqlite",
    "ssh",
    "ssh-agent",
    "start-stop-daemon",
    "stdbuf",
    "strace",
    "su",
    "sudo",
    "swift",
    "systemd-run",
    "taskset",
    "tcc",
    "tclsh",
    "tcsh",
    "telnet",
    "time",
    "timeout",
    "tmux",
    "tox",
    "toybox",
    "ts-node",
    "tsx",
    "uclampset",
    "unshare",
    "uv",
    "uvx",
    "valgrind",
    "vi",
    "view",
    "vim",
    "vimdiff",
    "vimtutor",
    "w3m",
    "watch",
    "wish",
    "x86_64",
    "xargs",
    "xterm",
    "xvfb-run",
    "yarn",
    "yum",
    "zsh",
];

/// Programs for other purposes that run a program if an option names it.
const RUNNERS_BY_OPTION: &[&str] = &["find", "tar"];

/// How an option is written.
enum OptionForm {
    /// As a whole word.
    Word(&'static str),
    /// With two dashes; programs also take its beginnings, and a value after `=`.
    Long(&'static str),
    /// One letter, alone or among others behind one dash.
    Letter(char),
}
use OptionForm::{Letter, Long, Word};

const OPTIONS: &[(&str, &[OptionForm])] = &[
    ("date", &[Letter('s'), Long("--set")]),
    ("fd", &[Letter('x'), Letter('X'), Long("--exec"), Long("--exec-batch")]),
    ("fdfind", &[Letter('x'), Letter('X'), Long("--exec"), Long("--exec-batch")]),
    ("file", &[Letter('C'), Long("--compile")]),
    (
        "find",
        &[
            Word("-delete"),
            Word("-exec"),
            Word("-execdir"),
            Word("-fls"),
            Word("-fprint"),
            Word("-fprint0"),
            Word("-fprintf"),
            Word("-ok"),
            Word("-okdir"),
        ],
    ),
    (
        "git",
        &[
            Long("--config-env"),
            Long("--exec"),
            Long("--exec-path"),
            Long("--ext-diff"),
            Long("--open-files-in-pager"),
            Long("--output"),
            Long("--output-directory"),
            Long("--paginate"),
            Long("--receive-pack"),
            Long("--template"),
            Long("--textconv"),
            Long("--upload-pack"),
            Word("bisect"),
            Word("config"),
            Word("credential"),
            Word("daemon"),
            Word("difftool"),
            Word("filter-branch"),
            Word("help"),
            Word("hook"),
            Word("instaweb"),
            Word("mergetool"),
            Word("send-email"),
            Word("shell"),
            Word("submodule"),
            Word("web--browse"),
        ],
    ),
    ("iconv", &[Letter('o'), Long("--output")]),
    ("install", &[Long("--strip-program")]),
    ("openssl", &[Word("-engine"), Word("-provider"), Word("-provider-path"), Word("-config")]),
    (
        "pandoc",
        &[
            Letter('o'),
            Letter('F'),
            Letter('L'),
            Long("--output"),
            Long("--filter"),
            Long("--lua-filter"),
            Long("--pdf-engine"),
            Long("--extract-media"),
        ],
    ),
    ("patch", &[Letter('o'), Letter('e'), Long("--output"), Long("--ed")]),
    ("rg", &[Long("--pre"), Long("--hostname-bin"), Letter('z'), Long("--search-zip")]),
    ("sdiff", &[Letter('o'), Long("--output"), Long("--diff-program")]),
    ("sed", &[Letter('i'), Long("--in-place")]),
    ("shuf", &[Letter('o'), Long("--output")]),
    ("sort", &[Letter('o'), Long("--output"), Long("--compress-program")]),
    ("split", &[Long("--filter")]),
    (
        "tar",
        &[
            Letter('I'),
            Letter('F'),
            Long("--checkpoint-action"),
            Long("--info-script"),
            Long("--new-volume-script"),
            Long("--rmt-command"),
            Long("--rsh-command"),
            Long("--to-command"),
            Long("--use-compress-program"),
        ],
    ),
    ("tree", &[Letter('o')]),
    ("yq", &[Letter('i'), Long("--inplace")]),
    ("zip", &[Letter('T'), Long("--test"), Long("--unzip-command")]),
];

/// Whether a program runs others.
pub(super) fn runs_others(name: &str) -> bool {
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    let whole = RUNNERS.binary_search(&name).is_ok();
    whole || RUNNERS.binary_search(&plain).is_ok() || name.starts_with("ld-")
}

/// Whether a rule for a program must say with which arguments it may run.
pub(super) fn needs_pattern(name: &str) -> bool {
    runs_others(name) || RUNNERS_BY_OPTION.contains(&name)
}

/// The first argument that makes a program write or run something.
pub(super) fn unsafe_option<'a>(name: &str, arguments: &'a [String]) -> Option<&'a str> {
    if name == "git"
        && let Some(found) = git_option(arguments)
    {
        return Some(found);
    }
    let (_, options) = OPTIONS.iter().find(|(program, _)| *program == name)?;
    let ends = arguments.iter().position(|a| a == "--").unwrap_or(arguments.len());
    let before_operands = arguments.get(..ends).unwrap_or_default();
    let bundled = |index: usize, argument: &str| {
        // tar takes its first letters without a dash, too.
        if name == "tar" && index == 0 { argument.starts_with(|c| c != '-') } else { false }
    };
    before_operands.iter().enumerate().find_map(|(index, argument)| {
        let is_told = options.iter().any(|option| match option {
            Word(word) => argument == word,
            Long(long) => {
                let given = argument.split('=').next().unwrap_or_default();
                given.len() > 2 && long.starts_with(given)
            }
            Letter(letter) => {
                let letters = argument.strip_prefix('-').filter(|rest| !rest.starts_with('-'));
                let letters = letters.or_else(|| bundled(index, argument).then_some(argument));
                letters.is_some_and(|letters| letters.contains(*letter))
            }
        });
        is_told.then_some(argument.as_str())
    })
}

/// Options of git itself whose value is the next argument.
const GIT_OPTIONS_WITH_VALUE: [&str; 6] =
    ["-C", "--attr-source", "--git-dir", "--namespace", "--super-prefix", "--work-tree"];

/// Options of git itself, before its command, that set its configuration; and of its commands, one
/// letter that opens a pager or names a program.
fn git_option(arguments: &[String]) -> Option<&str> {
    let mut command = 0;
    while let Some(option) = arguments.get(command).filter(|a| a.starts_with('-')) {
        command += if GIT_OPTIONS_WITH_VALUE.contains(&option.as_str()) { 2 } else { 1 };
    }
    let (of_git, rest) = arguments.split_at(command.min(arguments.len()));
    let sets = |a: &&String| (a.starts_with("-c") || a.starts_with("-p")) && !a.starts_with("--");
    let runs = |a: &&String| {
        let letters: &[&str] = match rest.first().map(String::as_str) {
            Some("grep") => &["-O"],
            Some("clone") => &["-c", "-u"],
            Some("ls-remote" | "fetch" | "pull") => &["-u"],
            Some("rebase") => &["-x"],
            Some("archive" | "format-patch") => &["-o"],
            _ => &[],
        };
        letters.iter().any(|letter| a.starts_with(letter))
    };
    let found = of_git.iter().find(sets).or_else(|| rest.iter().find(runs));
    found.map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(RUNNERS.is_sorted());
        for name in ["python3.11", "gcc-12", "bash", "ld-linux-x86-64.so.2", "perl5.36.0", "g++"] {
            assert!(runs_others(name), "{name}");
        }
        for name in ["git", "cat", "base64", "ls", "sha256sum", "bzip2", "find"] {
            assert!(!runs_others(name), "{name}");
        }
    }

    #[test]
    fn options_are_found_however_they_are_written() {
        let table = [
            ("sort -o x", Some("-o")),
            ("sort -uo x", Some("-uo")),
            ("sort --outp=x y", Some("--outp=x")),
            ("sort --compress-prog=sh", Some("--compress-prog=sh")),
            ("sort -u -- -o", None),
            ("git -c core.pager=x log", Some("-c")),
            ("git -ccore.pager=x log", Some("-ccore.pager=x")),
            ("git log -c", None),
            ("git -C . -c core.pager=x log", Some("-c")),
            ("git --git-dir x -C y -p log", Some("-p")),
            ("git --git-dir=x -p log", Some("-p")),
            ("git -C . grep -Ovi x", Some("-Ovi")),
            ("git -C . log -c", None),
            ("git -C", None),
            ("git clone -c core.pager=x a", Some("-c")),
            ("git log --output=x", Some("--output=x")),
            ("git grep -Ovi x", Some("-Ovi")),
            ("git log -p", None),
            ("git -p log", Some("-p")),
            ("find . -name x", None),
            ("find . -exec x", Some("-exec")),
            ("tar xIf x", Some("xIf")),
            ("tar -xf x", None),
            ("tar xf FILE", None),
            ("sed -n 1,2p x", None),
            ("sed -ni s/a/b/ x", Some("-ni")),
            ("ls --output", None),
        ];
        for (line, expected) in table {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(unsafe_option(&words[0], &words[1..]), expected, "{line}");
        }
    }
}
