//! What the injection scan says of a text: what it seems to try, and how it hides it. Never the
//! text itself.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;
use utoipa::ToSchema;
use uuid::Uuid;

/// A text that was let through, or a result that was withheld, although it looks as if it tried to
/// give the model instructions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScanWarned {
    /// The call with this result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub call_id: Option<Uuid>,
    /// Its tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub tool: Option<String>,
    /// What was scanned.
    pub source: ScanSource,
    /// JSON pointer into the request, for an input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub pointer: Option<String>,
    /// Whether the model was given an error instead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withheld: bool,
    #[serde(flatten)]
    pub suspicion: Suspicion,
}

impl ScanWarned {
    /// A sentence for the caller.
    pub fn in_words(&self) -> String {
        let what = match (self.source, &self.tool, &self.pointer) {
            (ScanSource::Result, Some(tool), _) => format!("A result of {tool}"),
            (ScanSource::Result, None, _) => "A result".to_owned(),
            (ScanSource::Memory, ..) => "Something recalled of earlier runs".to_owned(),
            (ScanSource::Input, _, Some(pointer)) => format!("The input {pointer}"),
            (ScanSource::Input, _, None) => "An input".to_owned(),
        };
        let withheld = if self.withheld { "; it was withheld from the model" } else { "" };
        format!("{what} looks like a prompt injection: {}{withheld}.", self.suspicion.in_words())
    }
}

/// What was scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, ToSchema)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ScanSource {
    Input,
    Result,
    /// Something recalled of earlier runs when the run began.
    Memory,
}

/// Why a text is suspicious.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Suspicion {
    /// What the text seems to try; at least one.
    pub kinds: Vec<InjectionKind>,
    /// How that is hidden, if it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hidden_in: Vec<Disguise>,
}

/// What a text may try to do to a model.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    IntoStaticStr,
    ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum InjectionKind {
    /// Replaces the model's instructions by others.
    Override,
    /// Poses as another part of the conversation: role labels, delimiters, tokens of chat templates.
    RoleMarker,
    /// Poses as a tool call, or dictates one.
    ToolCall,
    /// Asks for something to be sent away or disclosed.
    Exfiltration,
    /// Speaks to the model as its user would, or wants the user not to know.
    Impersonation,
    /// Is too long to be scanned.
    TooLong,
}

/// How a text is hidden from a reader.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    IntoStaticStr,
    ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Disguise {
    Base64,
    Hex,
    /// Percent-encoding, `\u0041` and the like, HTML references.
    Escapes,
    /// Zero-width, bidirectional and other characters that are not seen.
    HiddenCharacters,
    Homoglyphs,
    /// Digits and signs for letters.
    Leetspeak,
    SpacedLetters,
}

impl Suspicion {
    /// The kinds in words, for people and models.
    pub fn in_words(&self) -> String {
        let kinds: Vec<&str> = self.kinds.iter().map(|kind| kind.in_words()).collect();
        let mut text = kinds.join(", ");
        let hidden: Vec<&str> = self.hidden_in.iter().map(|disguise| disguise.in_words()).collect();
        if !hidden.is_empty() {
            text.push_str("; hidden in ");
            text.push_str(&hidden.join(", "));
        }
        text
    }
}

impl InjectionKind {
    fn in_words(self) -> &'static str {
        match self {
            Self::Override => "replaces instructions",
            Self::RoleMarker => "poses as another part of the conversation",
            Self::ToolCall => "dictates a tool call",
            Self::Exfiltration => "asks for something to be sent away",
            Self::Impersonation => "speaks as the user",
            Self::TooLong => "is too long to be scanned",
        }
    }
}

impl Disguise {
    fn in_words(self) -> &'static str {
        match self {
            Self::Base64 => "base64",
            Self::Hex => "hex",
            Self::Escapes => "escapes",
            Self::HiddenCharacters => "hidden characters",
            Self::Homoglyphs => "homoglyphs",
            Self::Leetspeak => "leetspeak",
            Self::SpacedLetters => "spaced letters",
        }
    }
}
