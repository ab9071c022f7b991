//! Skills: instructions that an agent reads when it needs them, and what it may do in the meantime.
//!
//! One directory a skill, `<name>/SKILL.md`: YAML front matter, then the instructions. Files are
//! read again when they change; a broken one keeps its last good version and is reported. Which
//! runs use which skill is not known here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::RwLock;
use serde::Deserialize;

use super::catalogue::{Change, DefinitionProblem, Stamp};
use super::checks::is_agent_name;
use super::yaml::{self, DefinitionError};
use crate::bounds::glob::Glob;
use crate::event::SkillActivated;
use crate::run::Autonomy;

/// The file of a skill, in the directory of its name.
const FILE: &str = "SKILL.md";
/// Bytes of a file at most; instructions must fit into a tool's result.
const MAX_FILE: u64 = 48 * 1024;
/// Characters of a description: one line of every system prompt.
const MAX_DESCRIPTION: usize = 1024;
/// The line before and after the front matter.
const FENCE: &str = "---";

/// One skill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skill {
    /// One line: when it is of use.
    pub description: String,
    /// Its name, and what holds while it is active.
    pub bounds: SkillActivated,
    /// What to do, in words.
    pub instructions: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontMatter {
    name: String,
    description: String,
    #[serde(default)]
    allowed_tools: Option<Vec<String>>,
    #[serde(default)]
    disallowed_tools: Vec<String>,
    #[serde(default)]
    autonomy: Option<Autonomy>,
    #[serde(default)]
    approval_required: ApprovalRequired,
}

/// Calls of these tools need approval; `true`: of all.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ApprovalRequired {
    Every(bool),
    Of(Vec<String>),
}

impl Default for ApprovalRequired {
    fn default() -> Self {
        Self::Every(false)
    }
}

impl Skill {
    /// A skill from the text of its file, in the directory `name`.
    ///
    /// # Errors
    /// What is wrong, with line, column and key.
    pub fn from_markdown(name: &str, text: &str) -> Result<Self, DefinitionError> {
        let text = text.trim_start_matches('\u{feff}').replace("\r\n", "\n");
        let (front, body) = split_front_matter(&text)?;
        let checked = yaml::read::<FrontMatter>(front).and_then(|read| read.checked(name, body));
        checked.map_err(|error| {
            let error = error.located_in(front);
            let place = error.place.map(|(line, column)| (line + 1, column)); // the fence is line 1
            DefinitionError { place, ..error }
        })
    }
}

/// Front matter and body.
fn split_front_matter(text: &str) -> Result<(&str, &str), DefinitionError> {
    let wrong =
        |message: &str| DefinitionError { place: Some((1, 1)), ..DefinitionError::at("", message) };
    let rest = text.strip_prefix(FENCE).and_then(|rest| rest.strip_prefix('\n'));
    let rest = rest.ok_or_else(|| wrong("must begin with front matter between two lines `---`"))?;
    let mut at = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == FENCE {
            return Ok((&rest[..at], &rest[at + line.len()..]));
        }
        at += line.len();
    }
    Err(wrong("the front matter has no end: a line `---` is missing"))
}

impl FrontMatter {
    fn checked(self, name: &str, body: &str) -> Result<Skill, DefinitionError> {
        if self.name != name {
            let message = format!("{:?} does not equal the directory's name, {name:?}", self.name);
            return Err(DefinitionError::at("name", message));
        }
        let description = self.description.split_whitespace().collect::<Vec<_>>().join(" ");
        if !(1..=MAX_DESCRIPTION).contains(&description.chars().count()) {
            return Err(DefinitionError::at(
                "description",
                format!("must have 1 to {MAX_DESCRIPTION} characters"),
            ));
        }
        let approval_required = match self.approval_required {
            ApprovalRequired::Every(false) => Vec::new(),
            ApprovalRequired::Every(true) => vec!["*".to_owned()],
            ApprovalRequired::Of(tools) => tools,
        };
        let allowed = self.allowed_tools.as_deref().unwrap_or_default();
        for (key, globs) in [
            ("allowed_tools", allowed),
            ("disallowed_tools", &self.disallowed_tools),
            ("approval_required", &approval_required),
        ] {
            for (i, glob) in globs.iter().enumerate() {
                Glob::of_names(glob)
                    .map_err(|e| DefinitionError::at(format!("{key}[{i}]"), e.to_string()))?;
            }
        }
        let instructions = body.trim().to_owned();
        if instructions.is_empty() || instructions.contains('\0') {
            return Err(DefinitionError::at(
                "",
                "has no instructions behind its front matter, or holds NUL characters",
            ));
        }
        let bounds = SkillActivated {
            skill: self.name,
            allowed_tools: self.allowed_tools,
            disallowed_tools: self.disallowed_tools,
            autonomy: self.autonomy,
            approval_required,
            inherited: false,
        };
        Ok(Skill { description, bounds, instructions })
    }
}

/// All skills of a directory.
#[derive(Debug, Default)]
pub struct Skills {
    /// None: there are no skills.
    dir: Option<PathBuf>,
    state: RwLock<Arc<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// By name.
    skills: BTreeMap<String, Arc<Skill>>,
    /// By the name of the directory.
    files: BTreeMap<String, (Stamp, Option<DefinitionProblem>)>,
    unreadable: Option<DefinitionProblem>,
}

impl Skills {
    /// Reads all skills beneath a directory, which may be missing. Broken files are problems, not
    /// errors.
    pub fn load(dir: &Path) -> Self {
        let skills = Self { dir: Some(dir.to_owned()), state: RwLock::default() };
        skills.refresh();
        skills
    }

    /// Reads what has changed since the last refresh. Blocks on the file system.
    pub fn refresh(&self) -> Vec<Change> {
        let Some(dir) = &self.dir else { return Vec::new() };
        let old = self.state();
        let (mut new, mut changes) = (State::default(), Vec::new());
        let listing = match list(dir) {
            Ok(listing) => listing,
            Err(error) => {
                let problem = DefinitionProblem { file: "skills".into(), error: error.to_string() };
                if old.unreadable.as_ref() != Some(&problem) {
                    changes.push(Change::Broken(problem.clone()));
                    let (skills, files) = (old.skills.clone(), old.files.clone());
                    self.replace(State { skills, files, unreadable: Some(problem) });
                }
                return changes;
            }
        };
        for (name, stamp) in listing {
            let known = old.files.get(&name);
            let last_good = old.skills.get(&name);
            let (skill, problem) = match known {
                Some((seen, problem)) if *seen == stamp && stamp.settled => {
                    (last_good.cloned(), problem.clone())
                }
                _ => match read(dir, &name) {
                    Ok(read) => (
                        last_good.filter(|same| ***same == read).cloned().or(Some(Arc::new(read))),
                        None,
                    ),
                    Err(error) => {
                        let problem =
                            DefinitionProblem { file: format!("skills/{name}/{FILE}"), error };
                        (last_good.cloned(), Some(problem))
                    }
                },
            };
            if let Some(skill) = skill {
                if !last_good.is_some_and(|before| Arc::ptr_eq(before, &skill)) {
                    changes.push(Change::SkillLoaded(Arc::clone(&skill), last_good.cloned()));
                }
                new.skills.insert(name.clone(), skill);
            }
            if let Some(problem) =
                problem.as_ref().filter(|p| known.and_then(|(_, k)| k.as_ref()) != Some(*p))
            {
                changes.push(Change::Broken(problem.clone()));
            }
            new.files.insert(name, (stamp, problem));
        }
        let gone = old.skills.keys().filter(|name| !new.skills.contains_key(*name));
        changes.extend(gone.map(|name| Change::SkillRemoved(name.clone())));
        self.replace(new);
        changes
    }

    /// The names of all skills, in order.
    pub fn names(&self) -> Vec<String> {
        self.state().skills.keys().cloned().collect()
    }

    /// One skill.
    pub fn skill(&self, name: &str) -> Option<Arc<Skill>> {
        self.state().skills.get(name).map(Arc::clone)
    }

    /// Files that are broken now.
    pub fn problems(&self) -> Vec<DefinitionProblem> {
        let state = self.state();
        state
            .unreadable
            .iter()
            .chain(state.files.values().filter_map(|(_, problem)| problem.as_ref()))
            .cloned()
            .collect()
    }

    fn state(&self) -> Arc<State> {
        Arc::clone(&self.state.read())
    }

    fn replace(&self, state: State) {
        *self.state.write() = Arc::new(state);
    }
}

/// Directories with a skill's file, and its stamp. Hidden directories are skipped.
fn list(dir: &Path) -> std::io::Result<BTreeMap<String, Stamp>> {
    let entries = match dir.read_dir() {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let now = SystemTime::now();
    let mut files = BTreeMap::new();
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let Ok(meta) = entry.path().join(FILE).metadata() else { continue };
        if !name.starts_with('.') && meta.is_file() {
            files.insert(name, Stamp::of(&meta, now)?);
        }
    }
    Ok(files)
}

fn read(dir: &Path, name: &str) -> Result<Skill, String> {
    if !is_agent_name(name) {
        return Err(format!(
            "the directory's name, {name:?}, does not match ^[a-z][a-z0-9-]{{1,63}}$"
        ));
    }
    let path = dir.join(name).join(FILE);
    let size = path.metadata().map_err(|e| e.to_string())?.len();
    if size > MAX_FILE {
        return Err(format!("{size} bytes are more than a skill may have ({MAX_FILE})"));
    }
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    let text = String::from_utf8(bytes).map_err(|_| "is not UTF-8")?;
    Skill::from_markdown(name, &text).map_err(|e| e.to_string())
}

#[cfg(test)]
#[path = "skills_tests.rs"]
mod tests;
