//! The rules of the house, as tests: who imports whom, no cycles, sizes, file headers, routes with
//! a scope. Each failure says what to do. The table is the one in `ARCHITECTURE.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each module and the modules that it may import.
const MODULES: &[(&str, &[&str])] = &[
    ("clock", &[]),
    ("message", &["run", "event"]),
    ("run", &["message", "event", "bounds"]),
    ("event", &["message", "run"]),
    ("jitter", &[]),
    ("model", &[]),
    ("tls", &[]),
    ("bounds", &[]),
    ("fairness", &[]),
    ("objects", &[]),
    ("outbound", &["tls", "bounds"]),
    ("config", &["model", "bounds"]),
    ("providers", &["jitter", "message", "run", "event", "model", "tls", "bounds"]),
    ("agents", &["message", "run", "event", "bounds"]),
    ("governance", &["message", "run", "event", "bounds"]),
    ("store", &["clock", "jitter", "message", "run", "event", "bounds", "fairness"]),
    ("drivers", &["message", "run", "event", "bounds", "providers"]),
    (
        "tools",
        &[
            "clock",
            "jitter",
            "message",
            "run",
            "event",
            "bounds",
            "fairness",
            "governance",
            "outbound",
        ],
    ),
    (
        "engine",
        &[
            "clock",
            "tls",
            "message",
            "run",
            "event",
            "bounds",
            "agents",
            "drivers",
            "providers",
            "tools",
        ],
    ),
    (
        "runtime",
        &[
            "clock",
            "jitter",
            "tls",
            "message",
            "run",
            "event",
            "bounds",
            "fairness",
            "agents",
            "drivers",
            "providers",
            "tools",
            "governance",
            "store",
            "engine",
            "config",
            "objects",
            "outbound",
        ],
    ),
    (
        "http",
        &[
            "clock", "message", "run", "event", "bounds", "fairness", "runtime", "store", "agents",
            "tools",
        ],
    ),
    ("telemetry", &["clock", "message", "run", "event", "bounds"]),
];
/// The only places that may import anything.
const ASSEMBLY: &[&str] = &["app", "cli", "main", "lib"];
/// Where files may import one another in a circle: the shared types, and the gate with its rules.
const MAY_CIRCLE: &[&str] =
    &["message.rs", "message/", "run.rs", "run/", "event.rs", "event/", "governance/"];
const BANNED_NAMES: &[&str] = &["utils", "util", "common", "helpers", "core", "types", "manager"];
const MAX_CODE_LINES: usize = 500;
const MAX_BACKEND_LINES: usize = 700;

struct Source {
    path: String,
    module: String,
    text: String,
    /// The text above the file's tests.
    code: String,
}

fn sources() -> Vec<Source> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&src, &mut files);
    let read = files.into_iter().map(|file| {
        let text = fs::read_to_string(&file).unwrap();
        let path = file.strip_prefix(&src).unwrap().to_string_lossy().into_owned();
        let module = path.split(['/', '.']).next().unwrap().to_owned();
        let code = text.split("\n#[cfg(test)]").next().unwrap().to_owned();
        Source { path, module, text, code }
    });
    read.collect()
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

fn is_test_file(source: &Source) -> bool {
    source.path.ends_with("_tests.rs")
}

/// The modules that a text names after `crate::`, one by one or in braces; comments do not count.
fn imports(code: &str) -> BTreeSet<String> {
    let code: String =
        code.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            let end = list.find('}').unwrap_or(list.len());
            found.extend(list[..end].split(',').map(|item| first_word(item.trim())));
        } else {
            found.insert(first_word(rest));
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

fn first_word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

#[test]
fn modules_import_only_what_the_table_allows() {
    let table: BTreeMap<_, _> = MODULES.iter().copied().collect();
    let mut wrong = Vec::new();
    for source in
        sources().iter().filter(|s| !ASSEMBLY.contains(&s.module.as_str()) && !is_test_file(s))
    {
        let Some(allowed) = table.get(source.module.as_str()) else {
            wrong.push(format!(
                "src/{}: the module {:?} is not in the table of tests/it/house.rs",
                source.path, source.module
            ));
            continue;
        };
        for import in imports(&source.code) {
            if import != source.module && !allowed.contains(&import.as_str()) {
                wrong.push(format!(
                    "src/{} imports crate::{import}, which {} must not",
                    source.path, source.module
                ));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "move the code to the module that may know it, or pass in what it needs:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn the_table_has_no_cycles() {
    let shared_types = ["message", "run", "event"];
    let table: BTreeMap<_, _> = MODULES.iter().copied().collect();
    for (module, _) in MODULES.iter().filter(|(module, _)| !shared_types.contains(module)) {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&str> = table[module].to_vec();
        while let Some(next) = open.pop() {
            assert_ne!(next, *module, "{module} reaches itself");
            if reached.insert(next) && !shared_types.contains(&next) {
                open.extend(table[next]);
            }
        }
    }
}

#[test]
fn sql_stays_in_the_store() {
    for source in sources().iter().filter(|s| s.module != "store") {
        assert!(
            !source.code.contains("sqlx::"),
            "src/{} uses sqlx: all SQL is in src/store/",
            source.path
        );
    }
}

/// What others wrote reaches these libraries through one module, which bounds it first.
#[test]
fn parsers_of_foreign_texts_are_used_in_bounds_alone() {
    let libraries = [
        "cel::",
        "dom_query::",
        "dom_smoothie::",
        "globset::",
        "jsonschema::",
        "minijinja::",
        "regex::",
        "regex_automata::",
        "serde_saphyr::",
    ];
    for source in sources().iter().filter(|s| s.module != "bounds" && !is_test_file(s)) {
        for library in libraries {
            assert!(
                !source.code.contains(library),
                "src/{} uses {library} which src/bounds/ alone may: give it a bounded constructor there",
                source.path
            );
        }
    }
}

/// JSON of models, tools and callers is read with bounds on its nesting and its number of values.
/// Providers read typed answers under caps of their own; the sandbox and the command line read what
/// this program wrote.
#[test]
fn foreign_json_is_read_with_bounds() {
    let is_own = |path: &str| path.starts_with("tools/sandbox/") || path == "tools/declared.rs";
    let modules = ["drivers", "engine", "tools"];
    let files = sources();
    let is_read_here =
        |s: &&Source| modules.contains(&s.module.as_str()) || s.path == "http/edge/extract.rs";
    for source in files.iter().filter(is_read_here).filter(|s| !is_test_file(s)) {
        assert!(
            !source.code.contains("serde_json::from_") || is_own(&source.path),
            "src/{} parses JSON by itself: use bounds::json::read",
            source.path
        );
    }
}

/// Journals are large: those that are in memory at the same time are bounded for all readers together.
#[test]
fn readers_of_journals_hold_permits() {
    let reads =
        [".journals(", ".journal_of(", ".readable_journals(", ".readable_until(", ".events_until("];
    let permits = ["journals::permit", ".journal_permit("];
    let mut readers = 0;
    for source in sources().iter().filter(|s| s.module != "store" && !is_test_file(s)) {
        let read = reads.iter().find(|read| source.code.contains(**read));
        readers += usize::from(read.is_some());
        assert!(
            read.is_none() || permits.iter().any(|permit| source.code.contains(*permit)),
            "src/{}: {read:?} without runtime/journals.rs, which bounds them for all readers",
            source.path
        );
    }
    assert!(readers > 0, "nothing reads journals by these names");
}

#[test]
fn http_is_known_in_http_alone() {
    for source in
        sources().iter().filter(|s| !ASSEMBLY.contains(&s.module.as_str()) && s.module != "http")
    {
        assert!(
            !source.code.contains("axum::"),
            "src/{} uses axum: routes and handlers are in src/http/",
            source.path
        );
    }
}

#[test]
fn files_are_small_and_open_with_a_header() {
    let mut wrong = Vec::new();
    for source in sources() {
        let code = source
            .code
            .lines()
            .filter(|l| !l.trim().is_empty() && !l.trim_start().starts_with("//"))
            .count();
        let limit =
            if source.path.starts_with("store/") { MAX_BACKEND_LINES } else { MAX_CODE_LINES };
        if !is_test_file(&source) && code > limit {
            wrong.push(format!(
                "src/{}: {code} lines of code, at most {limit}: split it by noun",
                source.path
            ));
        }
        let header = source.text.lines().take_while(|l| l.starts_with("//!")).count();
        if !is_test_file(&source) && !(1..=20).contains(&header) {
            wrong.push(format!(
                "src/{}: open with a //! header that says what it decides and what not",
                source.path
            ));
        }
        for name in source.path.trim_end_matches(".rs").split('/') {
            if BANNED_NAMES.contains(&name) {
                wrong.push(format!(
                    "src/{}: {name:?} says nothing, name the module after its noun",
                    source.path
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The compiler never sees a file that no module declares, so its tests would never run.
#[test]
fn every_file_is_declared_as_a_module() {
    let sources = sources();
    let is_declared = |file: &Source| {
        let (directory, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let stem = match name.trim_end_matches(".rs") {
            "mod" => directory.rsplit('/').next().unwrap_or_default(),
            stem => stem,
        };
        let (as_module, by_path) = (format!("mod {stem};"), format!("{name}\"]"));
        let declares =
            |other: &Source| other.text.contains(&as_module) || other.text.contains(&by_path);
        ["main.rs", "lib.rs"].contains(&name) || sources.iter().any(declares)
    };
    let unknown: Vec<&str> =
        sources.iter().filter(|file| !is_declared(file)).map(|file| &*file.path).collect();
    assert!(unknown.is_empty(), "no module declares {unknown:?}");
}

#[test]
fn nothing_is_left_undone() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("unimple", "mented!"),
        concat!("to", "do!"),
    ];
    for source in sources() {
        for mark in marks {
            assert!(
                !source.text.contains(mark),
                "src/{} holds {mark}: finish it, or file an issue",
                source.path
            );
        }
    }
}

/// Every handler names the scope that it needs as an argument type, except those that are public.
#[test]
fn every_handler_names_its_scope() {
    let public = ["healthz", "readyz", "metrics", "openapi_json"];
    let mut handlers = 0;
    for source in sources().iter().filter(|s| s.module == "http") {
        for (at, _) in source.code.match_indices("#[utoipa::path(") {
            let Some(found) = source.code[at..].find("async fn ") else { continue };
            let function = &source.code[at + found + "async fn ".len()..];
            handlers += 1;
            let name = first_word(function);
            let signature = &function[..function.find('{').unwrap_or(function.len())];
            assert!(
                public.contains(&name.as_str())
                    || signature.contains("Scoped<")
                    || signature.contains("AdmittedCaller"),
                "src/{}: handler {name} takes no Scoped<…> and no AdmittedCaller: name the scope that it needs in its signature",
                source.path
            );
        }
    }
    assert!(handlers > 40, "only {handlers} handlers were looked at");
}

/// The file of the longest prefix of a module path, e.g. `store/postgres/commit.rs`.
fn file_of<'a>(files: &'a BTreeSet<String>, path: &[String]) -> Option<&'a str> {
    (1..=path.len()).rev().find_map(|length| {
        let stem = path[..length].join("/");
        [format!("{stem}.rs"), format!("{stem}/mod.rs")]
            .iter()
            .find_map(|name| files.get(name).map(String::as_str))
    })
}

/// The module path of a file: `store/postgres/commit.rs` is `["store", "postgres", "commit"]`.
fn module_of(file: &str) -> Vec<String> {
    let stem = file.trim_end_matches(".rs").trim_end_matches("/mod");
    stem.split('/').map(str::to_owned).collect()
}

/// The module paths that a text names after `crate`, `super` or `self`, braces expanded.
fn named_paths(code: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for root in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(root) {
            let is_start =
                !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            if is_start {
                expand(&code[at..], module, &mut found);
            }
        }
    }
    found
}

/// Follows one path from `base`; at a brace, each of its branches.
fn expand(text: &str, base: &[String], found: &mut Vec<Vec<String>>) {
    let mut path = base.to_vec();
    let mut rest = text;
    loop {
        let word = first_word(rest);
        match word.as_str() {
            "crate" => path.clear(),
            "super" => drop(path.pop()),
            "self" | "" => {}
            word => path.push(word.to_owned()),
        }
        rest = &rest[word.len()..];
        let Some(next) = rest.strip_prefix("::") else { break };
        rest = next;
        if let Some(list) = rest.strip_prefix('{') {
            for branch in branches(list) {
                expand(branch.trim(), &path, found);
            }
            return;
        }
    }
    found.push(path);
}

/// The comma-separated parts of a brace, up to the one that closes it.
fn branches(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            '}' => {
                parts.push(&list[start..at]);
                break;
            }
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// Files that reach one another through their imports. A module and the modules declared in it are
/// one thing here: the way between them counts as no arrow.
fn circles() -> Vec<BTreeSet<String>> {
    let sources: Vec<Source> = sources().into_iter().filter(|s| !is_test_file(s)).collect();
    let files: BTreeSet<String> = sources.iter().map(|s| s.path.clone()).collect();
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in &sources {
        let code: Vec<&str> =
            source.code.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
        let module = module_of(&source.path);
        for path in named_paths(&code.join("\n"), &module) {
            let Some(target) = file_of(&files, &path) else { continue };
            let other = module_of(target);
            if !module.starts_with(&other) && !other.starts_with(&module) && other[0] == module[0] {
                arrows.entry(source.path.clone()).or_default().insert(target.to_owned());
            }
        }
    }
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        files.iter().map(|file| (file, reachable(file, &arrows))).collect();
    let mut circles: Vec<BTreeSet<String>> = Vec::new();
    for file in files.iter().filter(|file| reached[file].contains(file)) {
        let circle: BTreeSet<String> = reached[file]
            .iter()
            .filter(|other| reached[**other].contains(file))
            .map(|other| (*other).clone())
            .collect();
        if !circles.contains(&circle) {
            circles.push(circle);
        }
    }
    circles
}

fn reachable<'a>(
    from: &String,
    arrows: &'a BTreeMap<String, BTreeSet<String>>,
) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&String> = arrows.get(from).into_iter().flatten().collect();
    while let Some(next) = open.pop() {
        if reached.insert(next) {
            open.extend(arrows.get(next).into_iter().flatten());
        }
    }
    reached
}

#[test]
fn files_of_a_module_import_one_another_in_one_direction() {
    let wrong: Vec<_> = circles()
        .into_iter()
        .filter(|c| !c.iter().all(|f| MAY_CIRCLE.iter().any(|module| f.starts_with(module))))
        .collect();
    assert!(
        wrong.is_empty(),
        "move what both need to a file of its own, which both import:\n{wrong:#?}"
    );
}

/// The arms of each `match` in a text, as far as they stand directly in its braces.
fn matches(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (start, _) in code.match_indices("match ") {
        let Some(open) = code[start..].find('{').map(|at| start + at) else { continue };
        if code[start..open].contains(';') {
            continue; // a word in a comment or a text
        }
        let (mut depth, mut arms) = (0_usize, String::new());
        for c in code[open..].chars() {
            match c {
                '{' | '(' | '[' => depth += 1,
                '}' | ')' | ']' => depth = depth.saturating_sub(1),
                _ if depth == 1 => arms.push(c),
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
        found.push(arms.lines().map(|line| line.trim().to_owned()).collect());
    }
    found
}

#[test]
fn events_are_matched_without_a_wildcard() {
    let mut looked_at = 0;
    for source in sources().iter().filter(|source| !is_test_file(source)) {
        for arms in matches(&source.code) {
            let is_event = |arm: &&String| arm.trim_start_matches("| ").starts_with("RunEvent::");
            if arms.iter().filter(is_event).count() < 2 {
                continue;
            }
            looked_at += 1;
            let wildcard = arms.iter().find(|arm| {
                let pattern = arm.split("=>").next().unwrap_or_default().trim();
                let name = pattern.split(" if ").next().unwrap_or_default().trim();
                arm.contains("=>")
                    && !name.is_empty()
                    && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
            });
            assert!(
                wildcard.is_none(),
                "{}: {wildcard:?} stands for events that come later: name them, so that a new \
                 event does not compile until this place has said what it means",
                source.path
            );
        }
    }
    assert!(looked_at >= 7, "only {looked_at} places read events");
}
