//! Files that are read only at startup. If one has changed since, a restart is due, or the file is broken; the log and
//! `/readyz` report that.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::tools;
use crate::agents::{Catalogue, DefinitionProblem};
use crate::bounds::yaml;
use crate::config::{Config, Flags};

/// The beginning of a message about such a file.
pub(super) const SINCE_START: &str = "has changed since the start";

/// How names of files of tools begin.
const TOOLS: &str = "tools/";

const DUE: &str = "has changed since the start: restart the service, so that it takes effect";

/// The mistakes of files of tools, by the names of the files in problems.
type Mistakes = BTreeMap<String, String>;

/// The message about a changed file: a restart is due, unless the file is broken.
fn due(name: &str, flags: &Flags, tools: &Mistakes) -> String {
    if let Some(mistake) = tools.get(name) {
        return format!(
            "has changed since the start and is broken; the service goes on with the tools that it \
             read from it then, and after a restart there would be none of them: {mistake}"
        );
    }
    let settings = flags.config.as_ref().filter(|file| file.exists());
    let is_settings = settings.and_then(|file| file.file_name()).is_some_and(|file| file == name);
    let mistake = if is_settings { Config::read(flags).err() } else { None };
    match mistake {
        None => DUE.to_owned(),
        Some(mistake) => format!(
            "has changed since the start and is broken; the service goes on with the old settings, \
             and would not start with these: {mistake}"
        ),
    }
}

/// Maximum size of a compared file, in bytes; of larger files, only the size is compared.
const MAX_READ: u64 = 4 << 20;
/// After this time, the messages about files that stay as they are are made again: whether a file is broken depends on
/// other files, too.
const RENEWAL: Duration = Duration::from_secs(30);

/// Hashes of the contents of files, by what the files are called in problems.
type Hashes = BTreeMap<String, u64>;

/// The files that are read at the start, with hashes of their contents.
pub(super) struct StartupFiles {
    config: Config,
    /// The command line flags of this process, with the path of the configuration file.
    flags: Flags,
    hashes: Hashes,
}

impl StartupFiles {
    pub(super) fn of(config: &Config, flags: Flags) -> Self {
        let hashes = hashes_of(config.file.as_deref(), &config.tools_dir);
        let flags = Flags { config: config.file.clone(), ..flags };
        Self { config: config.clone(), flags, hashes }
    }

    /// The current hashes; and if they are not the `last` ones or the messages `are_due`, the files that are
    /// changed since the start.
    fn look(&self, last: &Hashes, are_due: bool) -> (Hashes, Option<BTreeMap<String, String>>) {
        let now = hashes_of(self.config.file.as_deref(), &self.config.tools_dir);
        let changed = (are_due || now != *last).then(|| self.changed(&now));
        (now, changed)
    }

    /// The files that are changed, new or gone, each with its message.
    fn changed(&self, now: &Hashes) -> BTreeMap<String, String> {
        let names =
            self.hashes.keys().chain(now.keys().filter(|name| !self.hashes.contains_key(*name)));
        let changed: Vec<&String> =
            names.filter(|name| self.hashes.get(*name) != now.get(*name)).collect();
        let is_of_tools = |name: &&String| name.starts_with(TOOLS) && now.contains_key(*name);
        let mistakes = if changed.iter().copied().any(|name| is_of_tools(&name)) {
            tools::mistakes(&self.config)
        } else {
            Mistakes::new()
        };
        changed.into_iter().map(|name| (name.clone(), due(name, &self.flags, &mistakes))).collect()
    }

    /// Compares the files every `interval`, off the executor.
    pub(super) async fn watch(self, catalogue: Arc<Catalogue>, interval: Duration) {
        let files = Arc::new(self);
        let mut last = files.hashes.clone();
        let (mut reported, mut made_at) = (BTreeMap::new(), Instant::now());
        loop {
            tokio::time::sleep(interval).await;
            let (files, are_due) = (Arc::clone(&files), made_at.elapsed() >= RENEWAL);
            let look = move || files.look(&last, are_due);
            let Ok((now, changed)) = tokio::task::spawn_blocking(look).await else {
                return; // a panic, which was logged
            };
            last = now;
            let Some(changed) = changed else { continue };
            made_at = Instant::now();
            if changed == reported {
                continue;
            }
            for (file, due) in
                changed.iter().filter(|(file, due)| reported.get(*file) != Some(*due))
            {
                tracing::warn!(file, "{due}");
            }
            let problem = |(file, error): (&String, &String)| DefinitionProblem {
                file: file.clone(),
                error: error.clone(),
            };
            catalogue.set_outdated(changed.iter().map(problem).collect());
            reported = changed;
        }
    }
}

fn hashes_of(file: Option<&Path>, tools: &Path) -> Hashes {
    let mut seen = Hashes::new();
    if let Some(file) = file {
        let name = file.file_name().unwrap_or(file.as_os_str());
        let name = name.to_string_lossy().into_owned();
        seen.extend(hash_of(file).map(|hash| (name, hash)));
    }
    for entry in tools.read_dir().into_iter().flatten().flatten() {
        let path = entry.path();
        let is_yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if is_yaml {
            let name = format!("{TOOLS}{}", entry.file_name().to_string_lossy());
            seen.extend(hash_of(&path).map(|hash| (name, hash)));
        }
    }
    seen
}

/// The hash of a file and of the description of an API that it imports from; `None` if the file does not exist.
fn hash_of(path: &Path) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    let content = hash_file(path, &mut hasher)?;
    if let Some(document) = document_of(path, &content) {
        hash_file(&document, &mut hasher);
    }
    Some(hasher.finish())
}

/// Adds a file to the hash. The content is empty where the file is too large to be read.
fn hash_file(path: &Path, hasher: &mut DefaultHasher) -> Option<Vec<u8>> {
    let meta = path.metadata().ok()?;
    meta.len().hash(hasher);
    let is_read = meta.is_file() && meta.len() <= MAX_READ;
    let content = if is_read { std::fs::read(path).unwrap_or_default() } else { Vec::new() };
    content.hash(hasher);
    Some(content)
}

/// The description of an API that a file of tools imports from.
fn document_of(path: &Path, content: &[u8]) -> Option<PathBuf> {
    let text = str::from_utf8(content).ok().filter(|text| text.contains("openapi"))?;
    let tools: Value = yaml::read(text).ok()?;
    Some(path.parent()?.join(tools.pointer("/openapi/file")?.as_str()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_stays_as_it_is_is_judged_once_and_again_later() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("toolloop.toml");
        let write = |text: &str| std::fs::write(&file, text).unwrap();
        write("");
        let text = Some((file.as_path(), ""));
        let config = Config::load(text, std::iter::empty(), &Flags::default());
        let files = StartupFiles::of(&config.unwrap(), Flags::default());
        let at_start = files.hashes.clone();
        assert_eq!(files.look(&at_start, false), (at_start.clone(), None));
        write("[server]\n");
        let (now, changed) = files.look(&at_start, false);
        assert!(changed.unwrap().contains_key("toolloop.toml"));
        assert_eq!(files.look(&now, false), (now.clone(), None));
        assert!(files.look(&now, true).1.unwrap().contains_key("toolloop.toml"));
        write("");
        assert_eq!(files.look(&now, false), (at_start, Some(BTreeMap::new())));
    }

    #[test]
    fn a_file_of_tools_changes_with_the_document_that_it_names() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("api.yaml", "openapi: {file: api.json, operations: [a]}\n");
        write("other.json", "{}");
        let without = hashes_of(None, dir.path());
        write("api.json", "{}");
        let before = hashes_of(None, dir.path());
        assert_ne!(before, without);
        write("other.json", "[]");
        assert_eq!(hashes_of(None, dir.path()), before);
        write("api.json", "[]");
        assert_ne!(hashes_of(None, dir.path()), before);
    }
}
