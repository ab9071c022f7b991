//! `README.md` and `docs/`, tried as a reader would: their agents, tools and settings are loaded by the
//! real loader, their commands and programs run against a service, their tables are those of the code.
//!
//! A block's info string says what it is: `yaml agents/x.yaml` is that file, `yaml part` a part of an
//! agent, `sh no-run: reason` a command that a test cannot run. With other features: none, the features have
//! tests of their own; here it matters that their pages tell the truth. One store is enough.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;

use crate::service::{Db, Service, Setup, command};

/// What a reader is told to run first; CI does.
const CARGO: [&str; 2] = ["cargo run --release", "cargo test"];

#[derive(Debug)]
struct Block {
    language: String,
    /// The rest of the info string.
    about: String,
    text: String,
    line: usize,
}

impl Block {
    fn is_run(&self) -> bool {
        !self.about.starts_with("no-run")
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The pages, relative to the root.
fn pages() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("docs")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut pages: Vec<String> = names.map(|name| format!("docs/{name}")).collect();
    pages.push("README.md".to_owned());
    pages.sort();
    pages
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for (index, line) in text(page).lines().enumerate() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        match (content.strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                let (language, about) = info.split_once(' ').unwrap_or((info, ""));
                let (language, about) = (language.to_owned(), about.to_owned());
                let block = Block { language, about, text: String::new(), line: index + 1 };
                open = Some((indent, block));
            }
            (Some(_), Some(_)) => blocks.extend(open.take().map(|(_, block)| block)),
            (None, Some((indent, block))) => {
                block.text.push_str(line.get(*indent..).unwrap_or_default());
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{page}: a block is not closed");
    blocks
}

fn of(page: &str, languages: &[&str]) -> Vec<Block> {
    let all = blocks(page).into_iter();
    all.filter(|block| languages.contains(&block.language.as_str())).collect()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// This repository's agents and tools, and the files of a page.
fn directory(page: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for name in ["agents", "scenarios", "skills", "tools", "workspace"] {
        copy(&root().join(name), &dir.path().join(name));
    }
    std::fs::remove_file(dir.path().join("tools/dates.yaml")).unwrap(); // needs Node.js
    std::fs::write(dir.path().join("scenarios/part.yaml"), "steps: [{text: done}]").unwrap();
    let settings = of(page, &["toml"]);
    let named = |block: &&Block| {
        ["[tools.credentials", "[mcp."].iter().any(|section| block.text.contains(section))
    };
    let named: String = settings.iter().filter(named).map(|block| block.text.as_str()).collect();
    std::fs::write(dir.path().join("toolloop.toml"), named).unwrap();
    for (number, block) in of(page, &["yaml"]).iter().enumerate() {
        let (path, yaml) = match block.about.as_str() {
            "part" => {
                let name = format!("part-{number}");
                let head = format!("name: {name}\nmodel: scripted/part\n");
                (format!("agents/{name}.yaml"), head + &block.text)
            }
            path => (path.to_owned(), block.text.clone()),
        };
        let is_file = Path::new(&path).extension().is_some_and(|extension| extension == "yaml");
        assert!(is_file, "{page}:{}: say what this YAML is", block.line);
        std::fs::write(dir.path().join(path), yaml).unwrap();
    }
    dir
}

async fn check(dir: &Path, what: &str) {
    let checked = command(dir)
        .arg("check")
        .env("ISSUES_TOKEN", "secret")
        .env("FORGE_TOKEN", "secret")
        .env("DOCS_TOKEN", "secret")
        .output()
        .await
        .unwrap();
    let said = [checked.stdout, checked.stderr].map(|said| String::from_utf8(said).unwrap());
    assert!(checked.status.success(), "{what}:\n{}", said.join("\n"));
    assert!(!said[0].contains("warning"), "{what}:\n{}", said[0]);
}

#[test]
fn every_block_has_a_known_language() {
    let known = ["yaml", "toml", "json", "sh", "js", "ts", "python"];
    for page in pages() {
        for Block { language, about, text, line } in blocks(&page) {
            let place = format!("{page}:{line}");
            if let Some(reason) = about.strip_prefix("no-run") {
                assert!(reason.strip_prefix(": ").is_some_and(|r| r.len() > 5), "{place}: why?");
            } else if language == "console" {
                assert!(CARGO.contains(&text.trim()), "{place}: sh, where it can be run");
            } else {
                assert!(known.contains(&language.as_str()), "{place}: {language:?}");
            }
        }
    }
    let shown = of("README.md", &["console"]);
    assert_eq!(shown.iter().map(|block| block.text.trim()).collect::<Vec<_>>(), CARGO);
    assert!(text("README.md").lines().count() <= 120);
}

#[tokio::test]
async fn agents_tools_and_scenarios_load() {
    let mut pages = pages();
    pages.retain(|page| !of(page, &["yaml"]).is_empty());
    assert!(pages.len() > 5, "{pages:?}");
    for page in pages {
        check(directory(&page).path(), &page).await;
    }
}

#[tokio::test]
async fn settings_are_read_and_json_is_json() {
    for page in pages() {
        for block in of(&page, &["toml"]) {
            let dir = TempDir::new().unwrap();
            std::fs::write(dir.path().join("toolloop.toml"), &block.text).unwrap();
            check(dir.path(), &format!("{page}:{}", block.line)).await;
        }
        for block in of(&page, &["json"]) {
            let read = serde_json::from_str::<Value>(&block.text);
            assert!(read.is_ok(), "{page}:{}: {read:?}", block.line);
        }
    }
}

/// Runs a program of a page, which must succeed and must not tell of a failed run.
async fn run(service: &Service, place: &str, program: &[&str], script: &str) {
    let mut path = PathBuf::from(env!("CARGO_BIN_EXE_toolloop"));
    path.pop();
    let path = format!("{}:{}", path.display(), std::env::var("PATH").unwrap());
    let mut running = tokio::process::Command::new(program[0]);
    for (variable, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOOLLOOP_")) {
        running.env_remove(variable);
    }
    running
        .args(&program[1..])
        .arg(script)
        .current_dir(service.dir.path())
        .env_remove("DATABASE_URL")
        .env("PATH", path)
        .env("TOOLLOOP_KEY", &service.key)
        .kill_on_drop(true)
        .stdin(Stdio::null());
    if program[0] != "sh" {
        running.env("TOOLLOOP_SERVER", service.url(""));
    }
    let ran = running.output().await.unwrap();
    let said = [ran.stdout, ran.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    let has_failed = said[0].replace(' ', "").contains(r#""status":"failed""#);
    assert!(
        ran.status.success() && !has_failed,
        "{place}:\n{script}\n{}\n{}\n{}",
        said[0],
        said[1],
        service.log()
    );
}

async fn try_page(page: &str) {
    let commands: Vec<Block> = of(page, &["sh"]).into_iter().filter(Block::is_run).collect();
    let programs = of(page, &["js", "ts", "python"]).into_iter().filter(Block::is_run);
    let programs: Vec<Block> = programs.collect();
    if commands.is_empty() && programs.is_empty() {
        return;
    }
    let setup = Setup::new().variable("ISSUES_TOKEN", "secret");
    let service = setup.start_in(directory(page), Db::Sqlite).await;
    let shown = "http://127.0.0.1:8080";
    if !commands.is_empty() {
        // A refused request is a failure, too.
        let mut script = "curl() { command curl -f \"$@\"; }\n".to_owned();
        script.extend(commands.iter().map(|block| block.text.replace(shown, &service.url(""))));
        run(&service, page, &["sh", "-e", "-c"], &script).await;
    }
    for block in programs {
        let place = format!("{page}:{}", block.line);
        let program: &[&str] = match block.language.as_str() {
            "python" => &["python3", "-c"],
            _ => &["node", "--input-type=module", "-e"],
        };
        run(&service, &place, program, &block.text).await;
    }
}

#[tokio::test]
async fn commands_and_programs_run() {
    crate::installing::node();
    for page in pages() {
        try_page(&page).await;
    }
}

/// The cells of the tables beneath a heading, without backticks.
fn rows(page: &str, heading: &str) -> Vec<Vec<String>> {
    let all = text(page);
    let section = all.split(&format!("\n## {heading}\n")).nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with("| `"));
    let cells = |line: &str| {
        let line = line.trim_start_matches("| ").trim_end_matches(" |");
        line.split(" | ").map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    lines.map(cells).collect()
}

fn leaves(table: &toml::Table, path: &str, found: &mut BTreeMap<String, Value>) {
    for (key, value) in table {
        let key = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match value {
            toml::Value::Table(table) => leaves(table, &key, found),
            value => {
                found.insert(key, serde_json::to_value(value).unwrap());
            }
        }
    }
}

#[test]
fn the_table_of_settings_has_every_default() {
    let defaults: toml::Table = toml::from_str(&text("src/config/default.toml")).unwrap();
    let mut expected = BTreeMap::new();
    leaves(&defaults, "", &mut expected);
    let told: BTreeMap<String, Value> = rows("docs/limits.md", "Settings of the service")
        .into_iter()
        .map(|row| (row[0].clone(), serde_json::from_str(&row[1]).unwrap()))
        .collect();
    assert_eq!(told, expected);
}

/// The default of a key in a JSON Schema.
fn default<'a>(root: &'a Value, path: &str) -> &'a Value {
    fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
        let of_any = schema.pointer("/anyOf/0").unwrap_or(schema);
        let name = of_any.get("$ref").and_then(Value::as_str);
        name.map_or(of_any, |name| root.pointer(name.trim_start_matches('#')).unwrap())
    }
    let mut schema = root;
    for part in path.split('.') {
        schema = &resolved(root, schema)["properties"][part];
    }
    schema.get("default").unwrap_or_else(|| &resolved(root, schema)["default"])
}

#[tokio::test]
async fn the_table_of_agent_defaults_is_that_of_the_schema() {
    let dir = TempDir::new().unwrap();
    let printed = command(dir.path()).args(["schema", "agent"]).output().await.unwrap();
    let schema: Value = serde_json::from_slice(&printed.stdout).unwrap();
    let told = rows("docs/limits.md", "Defaults of an agent");
    assert!(told.len() > 20);
    for row in told {
        let value: Value = serde_json::from_str(&row[1]).unwrap();
        assert_eq!(*default(&schema, &row[0]), value, "{}", row[0]);
    }
}

#[test]
fn the_tables_of_errors_have_every_code() {
    let document: Value = serde_json::from_str(&text("openapi/openapi.json")).unwrap();
    let named = |schema: &str| -> BTreeSet<String> {
        let names = document["components"]["schemas"][schema]["enum"].as_array().unwrap();
        names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let column = |heading: &str, column: usize| -> BTreeSet<String> {
        rows("docs/errors.md", heading).into_iter().map(|mut row| row.remove(column)).collect()
    };
    assert_eq!(column("A request that is refused", 0), named("ProblemCode"));
    assert_eq!(column("A run that ended", 0), named("TerminationReason"));
    let told = column("A run that ended", 1);
    let run = text("src/run.rs");
    let codes = run.lines().filter_map(|line| line.trim().strip_prefix("Self::"));
    let codes = codes.filter_map(|line| line.split_once(" => \"")?.1.split('"').next());
    let is_code = |code: &&str| code.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    let codes: Vec<&str> = codes.filter(is_code).collect();
    assert!(codes.contains(&"MAX_ITERATIONS"), "{codes:?}");
    for code in codes {
        assert!(told.contains(code), "{code} is not in docs/errors.md");
    }
}

#[test]
fn links_lead_somewhere() {
    for page in pages() {
        let text = text(&page);
        let here = root().join(&page);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap();
            let is_ours = !path.is_empty() && !path.starts_with("http");
            assert!(!is_ours || here.parent().unwrap().join(path).exists(), "{page}: {link}");
        }
    }
    let index = text("docs/README.md");
    for page in pages().iter().filter_map(|page| page.strip_prefix("docs/")) {
        assert!(page == "README.md" || index.contains(page), "docs/README.md leaves out {page}");
    }
}
