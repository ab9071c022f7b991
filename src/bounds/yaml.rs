//! YAML of files to typed values, with errors that name line, column and key.
//!
//! Booleans are `true` and `false` only, and a bomb of aliases is refused early.

use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{MessageFormatter as _, Options, UserMessageFormatter};

pub use serde_saphyr::Spanned;

use super::nearest::nearest;
use super::parse_errors::without_value;

/// Why a document is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct YamlError {
    /// Line and column, 1-based, where they are known.
    pub place: Option<(u64, u64)>,
    /// The path of keys, e.g. `limits.max_attempts`; empty for the file as a whole.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// The same in the parser's words, with the place.
    pub placed: String,
}

/// Reads one YAML document.
///
/// # Errors
/// [`YamlError`].
pub fn read<T: DeserializeOwned>(yaml: &str) -> Result<T, YamlError> {
    let mut track = serde_path_to_error::Track::new();
    let result =
        serde_saphyr::with_deserializer_from_str_with_options(yaml, options(), |deserializer| {
            T::deserialize(serde_path_to_error::Deserializer::new(deserializer, &mut track))
        });
    result.map_err(|error| {
        let placed = without_value(&error.to_string());
        let error = error.without_snippet();
        let message =
            UserMessageFormatter.format_message(error).replace("unknown field", "unknown key");
        let message = without_value(&suggesting(message));
        let place = error.location().map(|l| (l.line(), l.column()));
        // `value` is where `Spanned` keeps what it wraps.
        let key = track.path().to_string().replace("].value", "]");
        let key = if key == "." { String::new() } else { key };
        let (key, message) = plain(key, message);
        YamlError { place, key, message, placed }
    })
}

/// Plainer wording for the most frequent errors of the parser.
fn plain(key: String, message: String) -> (String, String) {
    let twice =
        message.strip_prefix("duplicate mapping key `").and_then(|rest| rest.split_once('`'));
    if let (Some((name, _)), Some(section)) = (twice, key.strip_suffix('?')) {
        return (format!("{section}{name}"), "is given twice".to_owned());
    }
    let wanted = match message.as_str() {
        "expected sequence start" => "must be a list",
        "expected mapping start" => "must be a section of keys",
        "expected string scalar" => "must be a text",
        "externally tagged enum expected scalar or mapping" => {
            "must be a name, or a section with one key"
        }
        message if message.ends_with(", expected a text") => "must be a text",
        message if message.contains("limits breached: Documents") => {
            "begins another YAML document; a file has one"
        }
        _ => match message.strip_prefix("invalid ") {
            Some("u8" | "u16" | "u32" | "u64" | "usize") => {
                "must be a whole number, not less than 0"
            }
            Some("i8" | "i16" | "i32" | "i64" | "isize") => "must be a whole number",
            Some("f32" | "f64") => "must be a number",
            _ => return (key, message),
        },
    };
    (key, wanted.to_owned())
}

/// Reads a string and refuses numbers and booleans, which the parser would convert. A missing value is
/// an empty string.
///
/// # Errors
/// It is something else.
pub fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    struct Text;

    impl Visitor<'_> for Text {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<String, E> {
            Ok(text.to_owned())
        }

        fn visit_unit<E: serde::de::Error>(self) -> Result<String, E> {
            Ok(String::new())
        }
    }
    deserializer.deserialize_any(Text)
}

/// The message with the name that was probably meant, where it lists the known ones.
pub fn suggesting(message: String) -> String {
    let suggestion = |message: &str| {
        let kinds = ["unknown key", "unknown variant"];
        let (kind, rest) = kinds
            .iter()
            .find_map(|kind| Some((*kind, message.strip_prefix(kind)?.strip_prefix(" `")?)))?;
        let (name, known) = rest.split_once("`, expected ")?;
        let known = known.strip_prefix("one of ").unwrap_or(known);
        let meant = nearest(name, known.split([',', ' ', '`']).filter(|word| !word.is_empty()))?;
        // The message names a key, but no value.
        let named = if kind == "unknown key" { format!(" `{name}`") } else { String::new() };
        Some(format!("{kind}{named} (did you mean `{meant}`?), expected one of {known}"))
    };
    suggestion(&message).unwrap_or(message)
}

/// Line and column of a key such as `tools[2]` or `output.schema`, or of the nearest section
/// around it.
pub fn place_of(yaml: &str, key: &str) -> Option<(u64, u64)> {
    serde_saphyr::from_str_with_options::<Spanned<Node>>(yaml, options())
        .ok()
        .map(|root| locate(&root, key))
}

/// Limits far above what a definition needs and far below what costs noticeable time or memory.
fn options() -> Options {
    serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_documents: 1,
            max_depth: 64,
            max_events: 100_000,
            max_nodes: 50_000,
            max_aliases: 1_000,
            max_anchors: 100,
            max_total_scalar_bytes: 2 * 1024 * 1024,
        },
    }
}

/// A document reduced to its places.
#[derive(Debug)]
enum Node {
    Scalar,
    List(Vec<Spanned<Node>>),
    Table(Vec<(Spanned<String>, Spanned<Node>)>),
}

/// Follows a key such as `tools[2]` or `output.schema` as far as it goes.
fn locate(root: &Spanned<Node>, key: &str) -> (u64, u64) {
    let mut node = root;
    let mut place = root.referenced;
    for segment in key.split(['.', '[']).filter(|s| !s.is_empty()) {
        let next = match &node.value {
            Node::Scalar => None,
            Node::List(items) => segment
                .trim_end_matches(']')
                .parse::<usize>()
                .ok()
                .and_then(|i| items.get(i))
                .map(|n| (n.referenced, n)),
            Node::Table(entries) => {
                entries.iter().find(|(k, _)| k.value == segment).map(|(k, n)| (k.referenced, n))
            }
        };
        match next {
            Some((at, inner)) => (place, node) = (at, inner),
            None => break,
        }
    }
    (place.line(), place.column())
}

impl<'de> serde::Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_str<E>(self, _: &str) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Table(entries))
    }
}
