//! Tools that the operator declares in files: one `<set>.yaml` a set, in `tools_dir`.
//!
//! This file reads the directory at start and reports broken files. A broken file provides no tools, and
//! does not affect other files. The parts are in `declared/`: `file` is the format, `script` the tools
//! that are programs, `http` those that send requests, `reconcile` the queries about interrupted calls,
//! `outcome` their answers, `mapping` the way from arguments to a request, `form` bodies that are forms,
//! `openapi` the import from the description of an API, and `yaml_output` the output of imported tools as a
//! file.

mod answer;
mod file;
mod form;
mod http;
mod mapping;
pub mod openapi;
mod outcome;
mod reconcile;
mod script;
mod script_output;
pub mod yaml_output;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::Tool;
use super::sandbox::Sandbox;
use crate::bounds::mistakes::{self, Mistake};
use crate::bounds::yaml;
use crate::outbound::Client;
use crate::tools::proxy::Proxy;
use file::{Entry, ToolsFile};
use http::{HttpTool, Service};
use openapi::Server;
use script::ScriptTool;

/// Bytes of a file.
const MAX_FILE: u64 = 1024 * 1024;
/// Bytes of a description of an API.
const MAX_DOCUMENT: u64 = 32 * 1024 * 1024;

/// The value of an environment variable.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The services that the tools of all files use.
#[derive(Clone, Copy)]
pub struct Dependencies<'a> {
    pub environment: Environment<'a>,
    pub client: &'a Client,
    pub proxy: &'a Proxy,
    pub sandbox: &'a Arc<Sandbox>,
}

/// The directory of a file, and the name of its set.
struct Place<'a> {
    dir: &'a Path,
    set: &'a str,
}

/// The tools of one file.
struct Set {
    tools: Vec<Arc<dyn Tool>>,
    /// The parts of imported operations that are left out.
    left_out: Vec<String>,
}

/// A file whose tools cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenFile {
    /// Its name beneath the directory.
    pub file: String,
    /// Line, column, key and reason.
    pub error: String,
    /// Further mistakes in it.
    pub others: Vec<String>,
}

/// What is wrong with a file, and at which key.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wrong {
    key: String,
    message: String,
}

impl Wrong {
    fn at(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { key: key.into(), message: message.into() }
    }

    fn beneath(self, section: &str) -> Self {
        Self { key: format!("{section}.{}", self.key), message: self.message }
    }
}

/// The tools of a directory.
#[derive(Default)]
pub struct Declared {
    pub tools: Vec<Arc<dyn Tool>>,
    pub broken: Vec<BrokenFile>,
    /// The parts of imported operations that are left out, each with the file that names the operation.
    pub left_out: Vec<(String, String)>,
    /// The environment variables that are asked for, each with the first file that names it.
    pub variables: BTreeMap<String, String>,
}

impl Declared {
    /// Reads every `*.yaml` and `*.yml` of the directory; a missing one has no tools.
    pub fn load(dir: &Path, dependencies: Dependencies<'_>) -> Self {
        let mut declared = Self::default();
        let mut sets: BTreeMap<String, String> = BTreeMap::new();
        for file in list(dir) {
            let asked = RefCell::new(Vec::new());
            let environment = |name: &str| {
                asked.borrow_mut().push(name.to_owned());
                (dependencies.environment)(name)
            };
            let dependencies = Dependencies { environment: &environment, ..dependencies };
            let stem = file.rsplit_once('.').map_or(file.as_str(), |(stem, _)| stem).to_owned();
            let read = match sets.get(&stem) {
                Some(other) => Err(vec![format!("{other} defines the set {stem:?} already")]),
                None => Self::read(&file, &Place { dir, set: &stem }, dependencies),
            };
            match read {
                Ok(Set { tools, left_out }) => {
                    declared.tools.extend(tools);
                    let of_file = left_out.into_iter().map(|part| (file.clone(), part));
                    declared.left_out.extend(of_file);
                }
                Err(mistakes) => {
                    let mut mistakes = mistakes.into_iter();
                    let (error, file) = (mistakes.next().unwrap_or_default(), file.clone());
                    declared.broken.push(BrokenFile { file, error, others: mistakes.collect() });
                }
            }
            for name in asked.into_inner() {
                declared.variables.entry(name).or_insert_with(|| file.clone());
            }
            sets.entry(stem).or_insert(file);
        }
        declared
    }

    /// The tools of a file, or all that is wrong with it.
    fn read(
        file: &str,
        place: &Place<'_>,
        dependencies: Dependencies<'_>,
    ) -> Result<Set, Vec<String>> {
        let Place { dir, set } = place;
        if !is_set(set) {
            let why = format!("the file's name, {set:?}, does not match ^[a-z][a-z0-9-]{{1,63}}$");
            return Err(vec![why]);
        }
        let text = read_text(&dir.join(file), MAX_FILE).map_err(|why| vec![why])?;
        let load = |text: &str| Self::of_text(place, text, dependencies);
        load(&text).map_err(|_| {
            let mistakes = mistakes::all(&text, |_| None, |text| load(text).map(drop));
            mistakes.iter().map(ToString::to_string).collect()
        })
    }

    fn of_text(
        place: &Place<'_>,
        text: &str,
        dependencies: Dependencies<'_>,
    ) -> Result<Set, Mistake> {
        let mut left_out = Vec::new();
        let tools = Self::of_file(place, yaml::read(text)?, dependencies, &mut left_out);
        let tools = tools.map_err(|Wrong { key, message }| Mistake::at(key, message))?;
        Ok(Set { tools, left_out })
    }

    fn of_file(
        place: &Place<'_>,
        file: ToolsFile,
        dependencies: Dependencies<'_>,
        left_out: &mut Vec<String>,
    ) -> Result<Vec<Arc<dyn Tool>>, Wrong> {
        let ToolsFile { mut base_url, headers, tools, openapi } = file;
        let mut entries: Vec<(String, Entry)> = tools
            .into_iter()
            .enumerate()
            .map(|(i, entry)| (format!("tools[{i}]"), entry))
            .collect();
        if let Some(section) = openapi {
            let document = read_document(&place.dir.join(&section.file), Path::new(&section.file))
                .map_err(|message| Wrong::at("openapi.file", message))?;
            let imported = openapi::Document::of(document)
                .map_err(|message| Wrong::at("openapi.file", message))?;
            match imported.server() {
                Server::Address(url) if base_url.is_none() => base_url = Some(url),
                Server::Path(path) if base_url.is_none() => {
                    let message = format!("is missing; the document names its path alone, {path}");
                    return Err(Wrong::at("base_url", message));
                }
                _ => {}
            }
            for (i, id) in section.operations.iter().enumerate() {
                let key = format!("openapi.operations[{i}]");
                let operation =
                    imported.operation(id).map_err(|message| Wrong::at(&key, message))?;
                let mut entry = operation.entry;
                let parts = operation.left_out.into_iter();
                left_out.extend(parts.map(|part| format!("{key}: left out of {id:?}: {part}")));
                if let Some(effect) = section.effects.get(id) {
                    entry.effect = *effect;
                }
                entries.push((key, entry));
            }
            let is_imported = |id: &&String| section.operations.contains(id);
            if let Some(id) = section.effects.keys().find(|id| !is_imported(id)) {
                let message = "is not one of the operations";
                return Err(Wrong::at(format!("openapi.effects.{id}"), message));
            }
        }
        let Dependencies { environment, client, .. } = dependencies;
        let service = Service::new(place.set, base_url.as_deref(), &headers, environment, client);
        let mut names: Vec<String> = Vec::new();
        let mut made = Vec::new();
        for (key, entry) in entries {
            if names.contains(&entry.name) {
                let message = format!("{:?} appears twice", entry.name);
                return Err(Wrong::at(format!("{key}.name"), message));
            }
            names.push(entry.name.clone());
            entry.check().map_err(|wrong| wrong.beneath(&key))?;
            let tool = if entry.command.is_some() {
                ScriptTool::new(place, entry, dependencies)
                    .map(|tool| Arc::new(tool) as Arc<dyn Tool>)
                    .map_err(|wrong| wrong.beneath(&key))?
            } else {
                Self::http(&key, &service, entry, environment)?
            };
            made.push(tool);
        }
        if base_url.is_some() {
            service?; // what it says is looked at where no tool needs it, too
        }
        Ok(made)
    }

    fn http(
        key: &str,
        service: &Result<Service, Wrong>,
        entry: Entry,
        environment: Environment<'_>,
    ) -> Result<Arc<dyn Tool>, Wrong> {
        if entry.method.is_none() {
            let message = "is missing: a tool has a `method` (HTTP) or a `command` (a program)";
            return Err(Wrong::at("method", message).beneath(key));
        }
        let service = service.as_ref().map_err(Clone::clone)?;
        let tool =
            HttpTool::new(service, entry, environment).map_err(|wrong| wrong.beneath(key))?;
        Ok(Arc::new(tool))
    }
}

/// Names of files, in order. Hidden files are skipped; what cannot be listed has none.
fn list(dir: &Path) -> Vec<String> {
    let Ok(entries) = dir.read_dir() else { return Vec::new() };
    let mut files: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| {
            let is_yaml = Path::new(name).extension().is_some_and(|e| e == "yaml" || e == "yml");
            is_yaml && !name.starts_with('.')
        })
        .collect();
    files.sort_unstable();
    files
}

/// Checks that the text of a tools file can be read back.
///
/// # Errors
/// Why not.
pub fn readable(text: &str) -> Result<(), String> {
    if text.len() as u64 > MAX_FILE {
        return Err(format!("{} bytes are more than it may have ({MAX_FILE})", text.len()));
    }
    yaml::read::<ToolsFile>(text).map(drop).map_err(|error| Mistake::from(error).to_string())
}

fn is_set(name: &str) -> bool {
    (2..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

fn read_text(path: &Path, max: u64) -> Result<String, String> {
    let size = path.metadata().map_err(|e| e.to_string())?.len();
    if size > max {
        return Err(format!("{size} bytes are more than it may have ({max})"));
    }
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned())
}

/// A description of an API, in JSON or YAML; `shown` is what mistakes call the file.
///
/// # Errors
/// Why it cannot be read.
pub fn read_document(path: &Path, shown: &Path) -> Result<serde_json::Value, String> {
    let text = read_text(path, MAX_DOCUMENT)
        .map_err(|why| format!("{} cannot be read: {why}", shown.display()))?;
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(&text).map_err(|e| format!("{}: {e}", shown.display()));
    }
    yaml::read(&text).map_err(|error| format!("{}: {}", shown.display(), Mistake::from(error)))
}

#[cfg(test)]
#[path = "declared/declared_tests.rs"]
mod tests;
