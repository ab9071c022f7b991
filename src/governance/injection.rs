//! The injection scan: whether a text looks as if it tried to give instructions to the model that
//! reads it.
//!
//! Phrases of several languages, delimiters of conversations and tool calls weigh 1 to 3; where
//! the weights of neighbouring ones add up to 3, the text is suspicious. Text that is encoded, hidden,
//! spelt letter by letter or written in look-alikes is decoded, and needs less weight. The scan takes
//! linear time, and decoding is bounded in depth and size. It is a filter and not a boundary: what a
//! run may do is decided by the gate's rules. The definition decides how a suspicious text is treated.

mod disguises;
mod folding;
mod marks;
mod phrases;
mod words;

use std::collections::BTreeSet;

use serde_json::Value;

use self::marks::{MARKS, marks_in};
use self::phrases::{PHRASES, phrases_in};
use self::words::{HIDDEN, LEET, LOOKS_ALIKE, PIECE, words_of};
use crate::bounds::json::escaped_key;
use crate::bounds::off_worker;
use crate::event::{Disguise, InjectionKind, Suspicion};

/// Bytes of the longest text that is scanned; a longer one is suspicious by itself.
const MAX_TEXT: usize = 32 * 1024 * 1024;
/// Bytes that are decoded of one text, beside as many as it has itself.
const MAX_DECODED: usize = 1024 * 1024;
/// Encodings in one another.
const MAX_DEPTH: u8 = 3;
/// Bytes that are scanned at once on an async worker.
const QUICK: usize = 8 * 1024;
/// Bytes that two pieces of a long text share.
const OVERLAP: usize = 1024;
/// Bytes within which the weights of phrases are added up.
const NEAR: usize = 600;
/// The weight that makes a text suspicious, and the weight for a hidden text.
const ENOUGH: u32 = 3;
const ENOUGH_HIDDEN: u32 = 2;
/// Phrases and marks.
const RULES: usize = PHRASES.len() + MARKS.len();

/// Why a text is suspicious, if it is.
pub fn scan(text: &str) -> Option<Suspicion> {
    if text.len() <= QUICK { scanned(text) } else { off_worker(|| scanned(text)) }
}

/// Why a JSON value is suspicious, with a JSON pointer to the suspicious string or name. The pointer is
/// empty if only several of them together are suspicious.
pub fn scan_json(value: &Value) -> Option<(String, Suspicion)> {
    let mut whole = String::new();
    gather(value, &mut whole);
    let suspicion = scan(&whole)?;
    Some((culprit(value).unwrap_or_default(), suspicion))
}

/// All strings and names of a value.
fn gather(value: &Value, whole: &mut String) {
    match value {
        Value::String(text) => {
            whole.push_str(text);
            whole.push('\n');
        }
        Value::Array(items) => items.iter().for_each(|item| gather(item, whole)),
        Value::Object(fields) => {
            for (name, value) in fields {
                whole.push_str(name);
                whole.push('\n');
                gather(value, whole);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The pointer to the first string or name that is suspicious by itself.
fn culprit(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => scan(text).map(|_| String::new()),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .find_map(|(place, item)| Some(format!("/{place}{}", culprit(item)?))),
        Value::Object(fields) => fields.iter().find_map(|(name, value)| {
            let below = scan(name).map(|_| String::new()).or_else(|| culprit(value))?;
            Some(format!("/{}{below}", escaped_key(name)))
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

fn scanned(text: &str) -> Option<Suspicion> {
    if text.len() > MAX_TEXT {
        return Some(Suspicion { kinds: vec![InjectionKind::TooLong], hidden_in: Vec::new() });
    }
    let mut scan = Scan { room: text.len() + MAX_DECODED, ..Scan::default() };
    scan.look(text, &mut Vec::new());
    (!scan.kinds.is_empty()).then(|| Suspicion {
        kinds: scan.kinds.into_iter().collect(),
        hidden_in: scan.hidden_in.into_iter().collect(),
    })
}

/// What one scan has found.
#[derive(Default)]
struct Scan {
    kinds: BTreeSet<InjectionKind>,
    hidden_in: BTreeSet<Disguise>,
    /// Bytes that may still be decoded.
    room: usize,
}

/// Something suspicious in a piece of text.
struct Hit {
    kind: InjectionKind,
    weight: u32,
    /// Phrases and marks are numbered; each counts once.
    rule: usize,
    at: usize,
    disguise: u8,
}

impl Scan {
    fn is_done(&self) -> bool {
        !self.kinds.is_empty()
    }

    /// Scans a text that was hidden in these disguises, and recursively what is hidden in it.
    fn look(&mut self, text: &str, hidden_in: &mut Vec<Disguise>) {
        let mut start = 0;
        loop {
            let end = text.floor_char_boundary(start + PIECE);
            self.look_at_piece(&text[start..end], hidden_in);
            if self.is_done() || end == text.len() {
                break;
            }
            start = text.floor_char_boundary(end - OVERLAP);
        }
        if !self.is_done() && hidden_in.len() < usize::from(MAX_DEPTH) && self.room > 0 {
            for (disguise, uncovered) in disguises::uncovered(text, self.room) {
                self.room = self.room.saturating_sub(uncovered.len());
                hidden_in.push(disguise);
                self.look(&uncovered, hidden_in);
                hidden_in.pop();
                if self.is_done() {
                    break;
                }
            }
        }
    }

    fn look_at_piece(&mut self, piece: &str, hidden_in: &mut Vec<Disguise>) {
        let words = words_of(piece);
        let mut hits: Vec<Hit> = phrases_in(&words)
            .into_iter()
            .filter_map(|found| {
                let phrase = PHRASES.get(found.phrase)?;
                let (kind, weight, rule) = (phrase.kind, u32::from(phrase.weight), found.phrase);
                Some(Hit { kind, weight, rule, at: found.at, disguise: found.disguise })
            })
            .collect();
        hits.extend(marks_in(&piece.to_lowercase()).into_iter().map(|mark| Hit {
            kind: mark.kind,
            weight: u32::from(mark.weight),
            rule: PHRASES.len() + mark.rule,
            at: mark.at,
            disguise: 0,
        }));
        hits.sort_by_key(|hit| hit.at);
        self.add_up(&hits, hidden_in);
        if !self.is_done()
            && !hidden_in.contains(&Disguise::SpacedLetters)
            && let Some(spelt) = disguises::spelt(&words)
        {
            hidden_in.push(Disguise::SpacedLetters);
            self.look_at_piece(&spelt, hidden_in);
            hidden_in.pop();
        }
    }

    /// Adds up the weights of neighbouring hits.
    fn add_up(&mut self, hits: &[Hit], hidden_in: &[Disguise]) {
        let mut counts = [0_u32; RULES];
        let (mut first, mut weight, mut disguised) = (0, 0, 0_usize);
        for (last, hit) in hits.iter().enumerate() {
            while hit.at - hits[first].at > NEAR {
                let gone = &hits[first];
                counts[gone.rule] -= 1;
                weight -= if counts[gone.rule] == 0 { gone.weight } else { 0 };
                disguised -= usize::from(gone.disguise != 0);
                first += 1;
            }
            weight += if counts[hit.rule] == 0 { hit.weight } else { 0 };
            counts[hit.rule] += 1;
            disguised += usize::from(hit.disguise != 0);
            let is_hidden = disguised > 0 || hidden_in.iter().copied().any(is_deliberate);
            if weight >= if is_hidden { ENOUGH_HIDDEN } else { ENOUGH } {
                return self.found(&hits[first..=last], hidden_in);
            }
        }
    }

    fn found(&mut self, hits: &[Hit], hidden_in: &[Disguise]) {
        self.kinds.extend(hits.iter().map(|hit| hit.kind));
        self.hidden_in.extend(hidden_in.iter().copied());
        let disguise = hits.iter().fold(0, |all, hit| all | hit.disguise);
        for (flag, meant) in [
            (HIDDEN, Disguise::HiddenCharacters),
            (LOOKS_ALIKE, Disguise::Homoglyphs),
            (LEET, Disguise::Leetspeak),
        ] {
            if disguise & flag != 0 {
                self.hidden_in.insert(meant);
            }
        }
    }
}

/// Whether this disguise serves only to hide something. Escapes, for example, also occur in ordinary
/// files.
fn is_deliberate(disguise: Disguise) -> bool {
    !matches!(disguise, Disguise::Escapes)
}

#[cfg(test)]
#[path = "injection_tests.rs"]
mod injection_tests;
