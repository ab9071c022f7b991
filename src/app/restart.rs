//! Files that are read at the start alone: where one has changed since, a restart is due, or the file
//! is broken, which the log and `/readyz` say.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::tools;
use crate::agents::{Catalogue, DefinitionProblem};
use crate::config::Config;

/// How what is said of such a file begins.
pub(super) const SINCE_START: &str = "has changed since the start";

/// How names of files of tools begin.
const TOOLS: &str = "tools/";

const DUE: &str = "has changed since the start: restart the service, so that it takes effect";

/// The mistakes of files of tools, by what they are called in problems.
type Mistakes = BTreeMap<String, String>;

/// What is due where one has changed: a restart, unless the file is broken.
fn due(name: &str, settings: Option<&Path>, tools: &Mistakes) -> String {
    if let Some(mistake) = tools.get(name) {
        return format!(
            "has changed since the start and is broken; the service goes on with the tools that it \
             read from it then, and after a restart there would be none of them: {mistake}"
        );
    }
    let is_settings = settings.and_then(Path::file_name).is_some_and(|file| file == name);
    let broken = settings.filter(|file| is_settings && file.exists()).map(Config::mistake_in);
    match broken.flatten() {
        None => DUE.to_owned(),
        Some(mistake) => format!(
            "has changed since the start and is broken; the service goes on with the old settings, \
             and would not start with these: {mistake}"
        ),
    }
}

/// Of a larger file only the size is compared, in bytes.
const MAX_READ: u64 = 4 << 20;

/// The files and what was in them.
pub(super) struct ReadAtStart {
    config: Config,
    /// A hash of the content, by what the file is called in problems.
    seen: BTreeMap<String, u64>,
}

impl ReadAtStart {
    pub(super) fn of(config: &Config) -> Self {
        let seen = look(config.file.as_deref(), &config.tools_dir);
        Self { config: config.clone(), seen }
    }

    /// Those that are not as they were, changed, new or gone, and what that means.
    fn changed(&self) -> BTreeMap<String, String> {
        let file = self.config.file.as_deref();
        let now = look(file, &self.config.tools_dir);
        let names =
            self.seen.keys().chain(now.keys().filter(|name| !self.seen.contains_key(*name)));
        let changed: Vec<&String> =
            names.filter(|name| self.seen.get(*name) != now.get(*name)).collect();
        let is_of_tools = |name: &&String| name.starts_with(TOOLS) && now.contains_key(*name);
        let mistakes = if changed.iter().copied().any(|name| is_of_tools(&name)) {
            tools::mistakes(&self.config)
        } else {
            Mistakes::new()
        };
        changed.into_iter().map(|name| (name.clone(), due(name, file, &mistakes))).collect()
    }

    /// Looks every `interval`, off the executor.
    pub(super) async fn watch(self, catalogue: Arc<Catalogue>, interval: Duration) {
        let files = Arc::new(self);
        let mut told = BTreeMap::new();
        loop {
            tokio::time::sleep(interval).await;
            let looking = Arc::clone(&files);
            let Ok(changed) = tokio::task::spawn_blocking(move || looking.changed()).await else {
                return; // a panic, which was logged
            };
            if changed == told {
                continue;
            }
            for (file, due) in changed.iter().filter(|(file, due)| told.get(*file) != Some(*due)) {
                tracing::warn!(file, "{due}");
            }
            let problem = |(file, error): (&String, &String)| DefinitionProblem {
                file: file.clone(),
                error: error.clone(),
            };
            catalogue.set_outdated(changed.iter().map(problem).collect());
            told = changed;
        }
    }
}

fn look(file: Option<&Path>, tools: &Path) -> BTreeMap<String, u64> {
    let mut seen = BTreeMap::new();
    let mut note = |name: String, path: &Path| {
        let Ok(meta) = path.metadata() else { return };
        let mut hasher = DefaultHasher::new();
        meta.len().hash(&mut hasher);
        if meta.is_file() && meta.len() <= MAX_READ {
            std::fs::read(path).unwrap_or_default().hash(&mut hasher);
        }
        seen.insert(name, hasher.finish());
    };
    if let Some(file) = file {
        let name = file.file_name().unwrap_or(file.as_os_str());
        note(name.to_string_lossy().into_owned(), file);
    }
    for entry in tools.read_dir().into_iter().flatten().flatten() {
        let path = entry.path();
        let is_yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if is_yaml {
            note(format!("{TOOLS}{}", entry.file_name().to_string_lossy()), &path);
        }
    }
    seen
}
