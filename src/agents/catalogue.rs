//! The loaded agents, and what is wrong with the files that did not load.
//!
//! One file an agent, `<name>.yaml`. Files are read again when they change; a broken file keeps its
//! last good version and is reported. Runs are not touched by any of this: each holds the version
//! it started with. A missing directory is an empty catalogue, so that it can be filled later.
//! Agents may name one another. Whether the named ones exist is checked when all files have been read,
//! and again at every refresh.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use super::checks::is_agent_name;
use super::{Agent, Definition, DefinitionError, Skill, Skills, mistakes};
use crate::bounds::memory;
use crate::bounds::nearest::meant;
use crate::run::Delegation;

/// Bytes of a definition at most.
const MAX_FILE: u64 = 1024 * 1024;
/// All definitions together may have this fraction (1/`PARTS`) of a part of the memory limit: each is in memory
/// as its text, as the snapshot of runs and as its compiled templates.
const PARTS: u64 = 2;
/// A younger file is read again: file systems with coarse clocks may stamp two versions alike.
const MIN_AGE: Duration = Duration::from_secs(2);

/// Asks the rest of the service whether it can serve a definition: its provider, its tools.
pub type OutsideCheck = Box<dyn Fn(&Definition) -> Result<(), DefinitionError> + Send + Sync>;

/// A file that is not (or no longer) what runs use.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct DefinitionProblem {
    /// The file's name beneath the agents directory; `skills/<name>/SKILL.md` for a skill,
    /// `tools/<set>.yaml` for declared tools.
    pub file: String,
    /// Line, column, key and reason.
    pub error: String,
}

/// A change that a refresh found.
#[derive(Debug, Clone)]
pub enum Change {
    /// A new agent, or a new version of one, with the version before.
    Loaded(Arc<Agent>, Option<Arc<Agent>>),
    /// The agent's file is gone, and so is the agent.
    Removed(String),
    /// A new skill, or a new version of one, with the version before.
    SkillLoaded(Arc<Skill>, Option<Arc<Skill>>),
    /// The skill's file is gone, and so is the skill.
    SkillRemoved(String),
    /// A file is broken in a way that was not known before.
    Broken(DefinitionProblem),
}

/// All agents of a directory.
pub struct Catalogue {
    dir: PathBuf,
    skills: Arc<Skills>,
    check: OutsideCheck,
    /// Bytes of all definitions together.
    most: u64,
    /// Broken files that it did not read.
    others: Vec<DefinitionProblem>,
    /// Files that others read at the start, and that have changed since.
    outdated: RwLock<Vec<DefinitionProblem>>,
    state: RwLock<Arc<State>>,
}

#[derive(Default)]
struct State {
    /// By file name.
    files: BTreeMap<String, KnownFile>,
    /// By the agent's name, which is the file's stem.
    agents: BTreeMap<String, Arc<Agent>>,
    /// The directory itself cannot be read.
    unreadable: Option<DefinitionProblem>,
}

#[derive(Clone)]
struct KnownFile {
    stamp: Stamp,
    problem: Option<DefinitionProblem>,
}

/// By these a changed file is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    modified: SystemTime,
    len: u64,
    pub(super) settled: bool,
}

impl Stamp {
    pub(super) fn of(meta: &Metadata, now: SystemTime) -> io::Result<Self> {
        let modified = meta.modified()?;
        let settled = now.duration_since(modified).is_ok_and(|age| age > MIN_AGE);
        Ok(Self { modified, len: meta.len(), settled })
    }
}

/// A file of the directory, as a refresh found it.
struct Found {
    file: String,
    stem: String,
    stamp: Stamp,
    agent: Option<Arc<Agent>>,
    problem: Option<String>,
}

impl Catalogue {
    /// Reads every `*.yaml` and `*.yml` of the directory. Broken files are problems, not errors.
    pub fn load(dir: &Path, skills: Arc<Skills>, check: OutsideCheck) -> Self {
        let most = memory::share_of_limit().map_or(u64::MAX, |part| part / PARTS);
        Self::load_bounded(dir, skills, check, most)
    }

    fn load_bounded(dir: &Path, skills: Arc<Skills>, check: OutsideCheck, most: u64) -> Self {
        let (dir, others, state) = (dir.to_owned(), Vec::new(), RwLock::default());
        let outdated = RwLock::default();
        let catalogue = Self { dir, skills, check, most, others, outdated, state };
        catalogue.refresh();
        catalogue
    }

    /// The same, with problems of files that others read.
    #[must_use]
    pub fn with_other_problems(self, others: Vec<DefinitionProblem>) -> Self {
        Self { others, ..self }
    }

    /// Files that others read at the start, and that have changed since: reported like broken ones.
    pub fn set_outdated(&self, outdated: Vec<DefinitionProblem>) {
        *self.outdated.write() = outdated;
    }

    /// All that is wrong with a definition's file; the loader stops at the first mistake. Nothing for
    /// other files, and for those that load.
    pub fn mistakes(&self, file: &str) -> Vec<DefinitionError> {
        let path = Path::new(file);
        let is_of_agent = path.components().count() == 1;
        let stem = path.file_stem().and_then(|stem| stem.to_str()).filter(|_| is_of_agent);
        let Some((stem, Ok(text))) = stem.map(|stem| (stem, self.text_of(file))) else {
            return Vec::new();
        };
        let state = self.state();
        let stems = state.files.keys().filter_map(|file| file.rsplit_once('.'));
        let there: BTreeSet<String> = stems.map(|(stem, _)| stem.to_owned()).collect();
        mistakes::all(stem, &text, |agent| {
            self.check_outside(&agent.definition)?;
            missing_agent(&agent.definition, &there).map_or(Ok(()), Err)
        })
    }

    /// Reads what has changed since the last refresh. Blocks on the file system.
    pub fn refresh(&self) -> Vec<Change> {
        let mut changes = self.skills.refresh();
        let same_skills = changes.iter().all(|change| matches!(change, Change::Broken(_)));
        let old = self.state();
        let listing = match list(&self.dir) {
            Ok(listing) => listing,
            Err(error) => {
                let problem = DefinitionProblem { file: ".".into(), error: error.to_string() };
                if old.unreadable.as_ref() != Some(&problem) {
                    changes.push(Change::Broken(problem.clone()));
                    let (files, agents) = (old.files.clone(), old.agents.clone());
                    self.replace(State { files, agents, unreadable: Some(problem) });
                }
                return changes;
            }
        };
        let mut found: Vec<Found> = Vec::with_capacity(listing.len());
        let mut defined = BTreeSet::new();
        let mut bytes = old.agents.values().map(|agent| bytes_of(agent)).sum();
        for (file, stamp) in listing {
            let stem = stem_of(&file).to_owned();
            let read = if defined.contains(&stem) {
                let problem = Some(format!("another file defines {stem:?} already"));
                Found { file, stem, stamp, agent: None, problem }
            } else {
                let known = old.files.get(&file);
                let known = known.filter(|seen| seen.stamp == stamp && same_skills);
                self.read_if_changed(file, stamp, known, old.agents.get(&stem), &mut bytes)
            };
            if read.agent.is_some() {
                defined.insert(read.stem.clone());
            }
            found.push(read);
        }
        self.judge_references(&mut found, &old);
        let mut new = State::default();
        for Found { file, stem, stamp, agent, problem } in found {
            if let Some(agent) = agent {
                let before = old.agents.get(&stem);
                if !before.is_some_and(|before| Arc::ptr_eq(before, &agent)) {
                    changes.push(Change::Loaded(Arc::clone(&agent), before.map(Arc::clone)));
                }
                new.agents.insert(stem, agent);
            }
            let known = old.files.get(&file);
            let problem = problem.map(|error| DefinitionProblem { file: file.clone(), error });
            if let Some(problem) =
                problem.as_ref().filter(|p| known.and_then(|k| k.problem.as_ref()) != Some(*p))
            {
                changes.push(Change::Broken(problem.clone()));
            }
            new.files.insert(file, KnownFile { stamp, problem });
        }
        let gone = old.agents.keys().filter(|name| !new.agents.contains_key(*name));
        changes.extend(gone.map(|name| Change::Removed(name.clone())));
        self.replace(new);
        changes
    }

    /// Reads a file unless it is unchanged. `bytes` is the size of all definitions so far, including
    /// the last good version of this one.
    fn read_if_changed(
        &self,
        file: String,
        mut stamp: Stamp,
        known: Option<&KnownFile>,
        last_good: Option<&Arc<Agent>>,
        bytes: &mut u64,
    ) -> Found {
        let stem = stem_of(&file).to_owned();
        let had = last_good.map_or(0, |agent| bytes_of(agent));
        let (last_good, has) = (|| last_good.map(Arc::clone), stamp.len);
        let (agent, problem) = match known.filter(|_| stamp.settled) {
            Some(seen) => (last_good(), seen.problem.as_ref().map(|p| p.error.clone())),
            None if has > had && *bytes - had + has > self.most => {
                stamp.settled = false; // there may be room at the next refresh
                (last_good(), Some(self.too_many()))
            }
            None => match self.read(&stem, &file) {
                Ok(read) => match last_good() {
                    Some(same) if same.hash == read.hash => (Some(same), None),
                    _ => (Some(Arc::new(read)), None),
                },
                Err(error) => (last_good(), Some(error)),
            },
        };
        *bytes = *bytes - had + agent.as_deref().map_or(0, bytes_of);
        Found { file, stem, stamp, agent, problem }
    }

    fn too_many(&self) -> String {
        format!(
            "all definitions together may have {} bytes, a sixteenth of the memory limit: there is no room \
             for this one",
            self.most
        )
    }

    fn read(&self, stem: &str, file: &str) -> Result<Agent, String> {
        if !is_agent_name(stem) {
            return Err(format!(
                "the file's name, {stem:?}, does not match ^[a-z][a-z0-9-]{{1,63}}$"
            ));
        }
        let text = self.text_of(file)?;
        let located = |error: DefinitionError| error.located_in(&text).to_string();
        let agent = Agent::from_yaml(stem, &text).map_err(|e| e.to_string())?;
        self.check_outside(&agent.definition).map_err(located)?;
        Ok(agent)
    }

    fn text_of(&self, file: &str) -> Result<String, String> {
        let path = self.dir.join(file);
        let size = path.metadata().map_err(|e| e.to_string())?.len();
        if size > MAX_FILE {
            return Err(format!("{size} bytes are more than a definition may have ({MAX_FILE})"));
        }
        let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
        String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned())
    }

    /// Checks that the provider and the tools that a definition names exist.
    fn check_outside(&self, definition: &Definition) -> Result<(), DefinitionError> {
        let is_unknown = |skill: &String| self.skills.skill(skill).is_none();
        if let Some(i) = definition.skills.iter().position(is_unknown) {
            let message = missing("skill", &definition.skills[i], self.skills.names());
            return Err(DefinitionError::at(format!("skills[{i}]"), message));
        }
        (self.check)(definition)
    }

    /// The file that defines an agent, and the error with its line and column in that file.
    pub fn located(&self, name: &str, error: DefinitionError) -> (String, DefinitionError) {
        let state = self.state();
        let defines = |file: &&String| file.rsplit_once('.').is_some_and(|(stem, _)| stem == name);
        let Some(file) = state.files.keys().find(defines) else { return (name.to_owned(), error) };
        let text = std::fs::read_to_string(self.dir.join(file));
        (file.clone(), text.map_or_else(|_| error.clone(), |text| error.clone().located_in(&text)))
    }

    /// The error text for a file whose agent delegates to a missing one.
    fn names_missing_agent(&self, file: &str, agent: &Agent, there: &BTreeSet<String>) -> String {
        let Some(error) = missing_agent(&agent.definition, there) else { return String::new() };
        match std::fs::read_to_string(self.dir.join(file)) {
            Ok(text) => error.located_in(&text).to_string(),
            Err(_) => error.to_string(),
        }
    }

    /// A definition that names a missing agent is a problem and is not reloaded; a version that
    /// was good once stays. Such a file is read again at the next refresh, when the other one may
    /// exist.
    fn judge_references(&self, found: &mut [Found], old: &State) {
        let delegates = |f: &Found| {
            f.agent.as_ref().is_some_and(|agent| agent.definition.delegates().next().is_some())
        };
        while found.iter().any(delegates) {
            let there: BTreeSet<String> =
                found.iter().filter(|f| f.agent.is_some()).map(|f| f.stem.clone()).collect();
            let mut lost_one = false;
            for f in found.iter_mut() {
                let is_incomplete = |agent: &&Arc<Agent>| {
                    agent.definition.delegates().any(|name| !there.contains(name))
                };
                let Some(incomplete) = f.agent.as_ref().filter(is_incomplete) else { continue };
                let error = || self.names_missing_agent(&f.file, incomplete, &there);
                f.problem.get_or_insert_with(error);
                f.stamp.settled = false;
                let last_good = old.agents.get(&f.stem).map(Arc::clone);
                let is_last_good = f
                    .agent
                    .as_ref()
                    .zip(last_good.as_ref())
                    .is_some_and(|(a, b)| Arc::ptr_eq(a, b));
                if !is_last_good {
                    lost_one |= last_good.is_none();
                    f.agent = last_good;
                }
            }
            if !lost_one {
                return;
            }
        }
    }

    /// One agent.
    pub fn agent(&self, name: &str) -> Option<Arc<Agent>> {
        self.state().agents.get(name).map(Arc::clone)
    }

    /// The skills that agents may use.
    pub fn skills(&self) -> &Arc<Skills> {
        &self.skills
    }

    /// All agents, by name.
    pub fn agents(&self) -> Vec<Arc<Agent>> {
        self.state().agents.values().map(Arc::clone).collect()
    }

    /// Whether an agent's definition names this model, as its own, as one that may take over or as
    /// one that a request may choose.
    pub fn names(&self, model: &str) -> bool {
        let names = |agent: &Arc<Agent>| {
            let definition = &agent.definition;
            let mut others = definition
                .fallback_models
                .iter()
                .chain(&definition.models)
                .chain(&definition.react.final_model);
            definition.model == model || others.any(|it| it == model)
        };
        self.state().agents.values().any(names)
    }

    /// Files that are broken now. Those of tools and skills come first: agents may be broken because
    /// of them.
    pub fn problems(&self) -> Vec<DefinitionProblem> {
        let state = self.state();
        let own = state
            .unreadable
            .iter()
            .chain(state.files.values().filter_map(|seen| seen.problem.as_ref()));
        let others = self.others.iter().chain(&*self.outdated.read()).cloned().collect::<Vec<_>>();
        others.into_iter().chain(self.skills.problems()).chain(own.cloned()).collect()
    }

    fn state(&self) -> Arc<State> {
        Arc::clone(&self.state.read())
    }

    fn replace(&self, state: State) {
        *self.state.write() = Arc::new(state);
    }
}

/// An error about the first missing agent to which a definition delegates.
fn missing_agent(definition: &Definition, there: &BTreeSet<String>) -> Option<DefinitionError> {
    let missing_name = |tool: &String| {
        Delegation::of_tool(tool)
            .map(|it| it.agent().to_owned())
            .filter(|name| !there.contains(name))
    };
    let mut names = definition.tools.iter().map(missing_name).enumerate();
    let (index, name) = names.find_map(|(index, name)| Some((index, name?)))?;
    let others = there.iter().filter(|other| **other != definition.name);
    let message = missing("agent", &name, others.cloned());
    Some(DefinitionError::at(format!("tools[{index}]"), message))
}

/// An error text: something does not exist, and the names of those that do.
pub fn missing(kind: &str, name: &str, there: impl IntoIterator<Item = String>) -> String {
    let there: Vec<String> = there.into_iter().collect();
    if there.is_empty() {
        return format!("there is no {kind} named {name:?}, and no other");
    }
    let meant = meant(name, there.iter().map(String::as_str));
    format!("there is no {kind} named {name:?}{meant}; there are: {}", there.join(", "))
}

/// Bytes of a definition.
fn bytes_of(agent: &Agent) -> u64 {
    agent.json.len() as u64
}

/// The name of the agent that a file defines.
fn stem_of(file: &str) -> &str {
    file.rsplit_once('.').map_or(file, |(stem, _)| stem)
}

/// Definition files and their stamps, in the order of their names. Hidden files are skipped.
fn list(dir: &Path) -> io::Result<BTreeMap<String, Stamp>> {
    let entries = match dir.read_dir() {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let now = SystemTime::now();
    let mut files = BTreeMap::new();
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_yaml = Path::new(&name).extension().is_some_and(|e| e == "yaml" || e == "yml");
        if name.starts_with('.') || !is_yaml {
            continue;
        }
        // A file that went away since the directory was listed is a deleted file.
        let Ok(meta) = entry.path().metadata() else { continue };
        if meta.is_file() {
            files.insert(name, Stamp::of(&meta, now)?);
        }
    }
    Ok(files)
}

/// Refreshes every `interval`, off the executor, and reports each change once.
pub async fn watch(
    catalogue: Arc<Catalogue>,
    interval: Duration,
    stop: CancellationToken,
    report: impl AsyncFn(&Change),
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        let looking = Arc::clone(&catalogue);
        match tokio::task::spawn_blocking(move || looking.refresh()).await {
            Ok(changes) => {
                for change in &changes {
                    catalogue.log(change);
                    report(change).await;
                }
            }
            Err(error) => tracing::error!(%error, "looking at the agents directory failed"),
        }
    }
}

impl Catalogue {
    /// Logs one change.
    fn log(&self, change: &Change) {
        match change {
            Change::Loaded(agent, _) => {
                let Definition { name, version, .. } = &agent.definition;
                tracing::info!(agent = name, version, hash = agent.hash, "agent loaded");
            }
            Change::Removed(agent) => tracing::info!(agent, "agent removed"),
            Change::SkillLoaded(skill, _) => {
                tracing::info!(skill = skill.bounds.skill, "skill loaded");
            }
            Change::SkillRemoved(skill) => tracing::info!(skill, "skill removed"),
            Change::Broken(DefinitionProblem { file, error }) => {
                let (file, has_last_good) = self.broken(file);
                if has_last_good {
                    tracing::error!(
                        file,
                        error,
                        "definition file is broken; its last good version stays"
                    );
                } else {
                    tracing::error!(
                        file,
                        error,
                        "definition file is broken, and there is no good version of it"
                    );
                }
            }
        }
    }

    /// A broken file with its directory, and whether there is a version of it that was good.
    fn broken(&self, file: &str) -> (String, bool) {
        if let Some(skill) = file.strip_prefix("skills/") {
            let name = skill.split('/').next().unwrap_or_default();
            return (file.to_owned(), self.skills.skill(name).is_some());
        }
        let dir = self.dir.file_name().unwrap_or_default().to_string_lossy();
        let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
        (format!("{dir}/{file}"), self.agent(stem).is_some())
    }
}

#[cfg(test)]
#[path = "catalogue_tests.rs"]
mod tests;
