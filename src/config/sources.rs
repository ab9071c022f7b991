//! The layers of settings, and the origin of each value.
//!
//! Values are merged into one tree, and the origin of every key is recorded, so that an error can name
//! file and line, variable or flag.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};

use crate::bounds::parse_errors::without_value;
use crate::bounds::yaml::suggesting;

/// Sections that can be written as one value, and the key that it is the value of.
const SHORTHANDS: &[(&str, &str)] = &[("tools.workspace", "dir")];

/// A configuration error; its message names the origin and the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: {message}", file.display())]
    Unreadable { file: PathBuf, message: String },
    /// The file is not valid TOML.
    #[error("{}:{line}: {message}", file.display())]
    Syntax {
        file: PathBuf,
        /// 1-based.
        line: usize,
        message: String,
    },
    /// An invalid value in the file.
    #[error("{}:{line}: {key}: {message}", file.display())]
    File {
        file: PathBuf,
        /// 1-based.
        line: usize,
        /// E.g. `server.listen`.
        key: String,
        message: String,
    },
    /// An invalid environment variable.
    #[error("environment variable {variable}: {key}: {message}")]
    Variable {
        variable: String,
        /// E.g. `server.listen`.
        key: String,
        message: String,
    },
    /// An invalid flag.
    #[error("{flag}: {message}")]
    Flag {
        /// E.g. `--listen`.
        flag: &'static str,
        message: String,
    },
    /// An invalid or missing value without an origin of its own.
    #[error("{key}: {message}")]
    BuiltIn {
        /// E.g. `server.listen`.
        key: String,
        message: String,
    },
}

impl ConfigError {
    /// The key whose value is wrong, where it is one of a file or a variable.
    pub(super) fn removable_key(&self) -> Option<&str> {
        match self {
            Self::File { key, .. } | Self::Variable { key, .. } => Some(key),
            Self::Unreadable { .. }
            | Self::Syntax { .. }
            | Self::Flag { .. }
            | Self::BuiltIn { .. } => None,
        }
    }

    /// Whether the error says only that this key is missing, or that another key needs it.
    pub(super) fn misses(&self, missing: &str) -> bool {
        let (Self::File { key, message, .. }
        | Self::Variable { key, message, .. }
        | Self::BuiltIn { key, message }) = self
        else {
            return false;
        };
        let name = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let is_within =
            |section: &str| missing.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
        let provider = missing.strip_prefix("models.");
        let is_of_provider =
            |provider: &str| message.starts_with(&format!("there is no provider {provider:?}"));
        name.is_some_and(|name| missing == format!("{key}.{name}"))
            || (message == "is missing" && missing == key)
            || (message.starts_with("needs ") && is_within(key))
            || message.contains(&format!(" needs [{missing}]"))
            || provider.is_some_and(is_of_provider)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    BuiltIn,
    /// The line in the file.
    File(usize),
    /// The environment variable.
    Variable(String),
    Flag(&'static str),
}

/// All values and their origins.
pub(super) struct Sources {
    root: Value,
    origins: BTreeMap<String, Origin>,
    file: PathBuf,
    /// Keys whose values are ignored.
    left_out: Vec<String>,
}

impl Sources {
    /// Ignores the values of these keys, except for the built-in ones.
    pub(super) fn leave_out(&mut self, keys: &[String]) {
        keys.clone_into(&mut self.left_out);
    }

    /// `text` is the TOML of the built-in values.
    pub(super) fn built_in(text: &str) -> Result<Self, ConfigError> {
        let mut sources = Self {
            root: Value::Object(Map::new()),
            origins: BTreeMap::new(),
            file: PathBuf::new(),
            left_out: Vec::new(),
        };
        sources.add(text, |_| Origin::BuiltIn)?;
        Ok(sources)
    }

    /// Overrides with the values of a file.
    pub(super) fn add_file(&mut self, file: &Path, text: &str) -> Result<(), ConfigError> {
        file.clone_into(&mut self.file);
        self.add(text, |offset| Origin::File(line_of(text, offset)))
    }

    /// `origin` receives the position in the text at which a key begins.
    fn add(&mut self, text: &str, origin: impl Fn(usize) -> Origin) -> Result<(), ConfigError> {
        let table = DeTable::parse(text).map_err(|e| ConfigError::Syntax {
            file: self.file.clone(),
            line: line_of(text, e.span().map_or(0, |span| span.start)),
            message: e.message().to_owned(),
        })?;
        self.add_table(&mut Vec::new(), table.get_ref(), &origin);
        Ok(())
    }

    fn add_table(
        &mut self,
        path: &mut Vec<String>,
        table: &DeTable<'_>,
        origin: &dyn Fn(usize) -> Origin,
    ) {
        for (key, value) in table {
            path.push(key.get_ref().to_string());
            let origin_here = origin(key.span().start);
            match value.get_ref() {
                DeValue::Table(inner) => {
                    self.set(path, Value::Object(Map::new()), origin_here);
                    self.add_table(path, inner, origin);
                }
                other => self.set(path, to_json(other), origin_here),
            }
            path.pop();
        }
    }

    /// Overrides with an environment variable. `TOOLLOOP_A__B` is `a.b`; an existing key that differs
    /// only in case or in `-` for `_` has precedence.
    pub(super) fn add_variable(&mut self, name: &str, segments: &str, text: String) {
        let mut path: Vec<String> = Vec::new();
        let mut here = Some(&self.root);
        for segment in segments.split("__") {
            let object = here.and_then(Value::as_object);
            let known = object
                .and_then(|o| o.keys().find(|k| k.replace('-', "_").eq_ignore_ascii_case(segment)));
            let key = known.cloned().unwrap_or_else(|| segment.to_ascii_lowercase());
            here = object.and_then(|o| o.get(&key));
            path.push(key);
        }
        self.set(&path, Value::String(text), Origin::Variable(name.to_owned()));
    }

    /// Overrides with a flag.
    pub(super) fn add_flag(&mut self, flag: &'static str, path: [&str; 2], text: &str) {
        let path: Vec<String> =
            path.iter().filter(|p| !p.is_empty()).map(|p| (*p).to_owned()).collect();
        self.set(&path, Value::String(text.to_owned()), Origin::Flag(flag));
    }

    /// Sets a value. A table is merged into an existing table; missing parents are created.
    fn set(&mut self, path: &[String], value: Value, origin: Origin) {
        let section = path.join(".");
        let is_within = |key: &String| {
            section
                .strip_prefix(key.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if self.left_out.iter().any(is_within) {
            return;
        }
        if !value.is_object()
            && let Some((_, key)) = SHORTHANDS.iter().find(|(short, _)| *short == section)
        {
            return self.set(&[path, &[(*key).to_owned()]].concat(), value, origin);
        }
        let mut node = &mut self.root;
        for (depth, segment) in path.iter().enumerate() {
            if !node.is_object() {
                *node = Value::Object(Map::new());
                // Errors about the section are now errors of this origin, which replaced its plain value.
                let key = path.get(..depth).unwrap_or_default().join(".");
                self.origins.insert(key, origin.clone());
            }
            let Value::Object(object) = node else { return };
            node = object.entry(segment.clone()).or_insert_with(|| {
                let key = path.get(..=depth).unwrap_or_default().join(".");
                self.origins.insert(key, origin.clone());
                Value::Null
            });
        }
        if !(node.is_object() && value.is_object()) {
            *node = value;
        }
        self.origins.insert(path.join("."), origin);
    }

    /// Deserializes the tree. A variable is a string; where another type is expected, it is parsed as
    /// a TOML value (a number, a list, a table).
    pub(super) fn read<T: DeserializeOwned>(&mut self) -> Result<T, ConfigError> {
        let mut reinterpreted: Vec<String> = Vec::new();
        loop {
            let error = match serde_path_to_error::deserialize::<_, T>(&self.root) {
                Ok(settings) => return Ok(settings),
                Err(error) => error,
            };
            let key = error.path().to_string();
            let path: Vec<String> = key.split('.').map(str::to_owned).collect();
            let node = self.root.pointer_mut(&format!("/{}", path.join("/")));
            match (self.origins.get(&key), node) {
                (Some(Origin::Variable(_)), Some(node)) if !reinterpreted.contains(&key) => {
                    if let Some(value) = node
                        .as_str()
                        .and_then(|text| DeValue::parse(text).ok().map(|v| to_json(v.get_ref())))
                    {
                        *node = value;
                    }
                    reinterpreted.push(key);
                }
                _ => {
                    let message = error.inner().to_string().replace("unknown field", "unknown key");
                    return Err(self.error(&key, self.masked(&key, &suggesting(message))));
                }
            }
        }
    }

    /// A message without the value of this key and what is in it, which may be a secret.
    fn masked(&self, key: &str, message: &str) -> String {
        let mut node = &self.root;
        for segment in key.split(['.', '[']).map(|segment| segment.trim_end_matches(']')) {
            let inner = match node {
                Value::Object(fields) => fields.get(segment),
                Value::Array(items) => segment.parse::<usize>().ok().and_then(|i| items.get(i)),
                _ => None,
            };
            // A name may have dots itself.
            let Some(inner) = inner else { break };
            node = inner;
        }
        let mut masked = message.to_owned();
        let mut open = vec![node];
        while let Some(node) = open.pop() {
            match node {
                Value::String(text) => {
                    masked = masked.replace(&format!("{text:?}"), "\"…\"");
                    masked = masked.replace(&format!("`{text}`"), "`…`");
                }
                Value::Number(number) => masked = masked.replace(&format!("`{number}`"), "`…`"),
                Value::Array(items) => open.extend(items),
                Value::Object(fields) => open.extend(fields.values()),
                Value::Null | Value::Bool(_) => {}
            }
        }
        without_value(&masked)
    }

    /// The origin of this key, or else of its section.
    pub(super) fn origin(&self, key: &str) -> &Origin {
        let mut key = key;
        loop {
            if let Some(origin) = self.origins.get(key) {
                return origin;
            }
            match key.rfind(['.', '[']) {
                Some(end) => key = key.get(..end).unwrap_or_default(),
                None => return &Origin::BuiltIn,
            }
        }
    }

    /// All values.
    pub(super) fn values(&self) -> &Value {
        &self.root
    }

    /// Sorted names of the variables and flags that are set.
    pub(super) fn overrides(&self) -> Vec<String> {
        let names = self.origins.values().filter_map(|origin| match origin {
            Origin::Variable(name) => Some(name.clone()),
            Origin::Flag(flag) => Some((*flag).to_owned()),
            Origin::BuiltIn | Origin::File(_) => None,
        });
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// An error about the value of this key.
    pub(super) fn error(&self, key: &str, message: impl Into<String>) -> ConfigError {
        let (key, message) = (key.to_owned(), message.into());
        match self.origin(&key) {
            Origin::BuiltIn => ConfigError::BuiltIn { key, message },
            Origin::File(line) => {
                ConfigError::File { file: self.file.clone(), line: *line, key, message }
            }
            Origin::Variable(variable) => {
                ConfigError::Variable { variable: variable.clone(), key, message }
            }
            Origin::Flag(flag) => ConfigError::Flag { flag, message },
        }
    }

    /// Resolves the path that is the value of this key: in the file, it is relative to the file's
    /// directory.
    pub(super) fn resolve(&self, key: &str, path: &Path) -> PathBuf {
        match (self.origin(key), self.file.parent()) {
            (Origin::BuiltIn | Origin::File(_), Some(directory)) => directory.join(path),
            _ => path.to_owned(),
        }
    }
}

/// The line in which a byte of a text is, from 1.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|b| *b == b'\n').count() + 1
}

/// TOML as JSON; a date becomes a string.
fn to_json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(i) => i64::from_str_radix(i.as_str(), i.radix())
            .map_or_else(|_| Value::String(i.to_string()), Value::from),
        DeValue::Float(f) => {
            f.as_str().parse::<f64>().map_or_else(|_| Value::String(f.to_string()), Value::from)
        }
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Datetime(d) => Value::String(d.to_string()),
        DeValue::Array(items) => {
            Value::Array(items.iter().map(|item| to_json(item.get_ref())).collect())
        }
        DeValue::Table(table) => Value::Object(
            table.iter().map(|(k, v)| (k.get_ref().to_string(), to_json(v.get_ref()))).collect(),
        ),
    }
}
