//! What a text hides: encoded stretches decoded, and letters that stand apart put together.
//!
//! Decoding is linear in the text. How deep and how much is decoded is decided by the scan.

use base64::Engine as _;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::engine::{DecodePaddingMode, general_purpose};

use super::words::{Words, classes_of};
use crate::event::Disguise;

/// Characters of the shortest base64 stretch that is decoded.
const MIN_BASE64: usize = 20;
/// Characters of a group of base64.
const GROUP: usize = 4;
/// Bytes of the shortest text that is found between other bytes.
const MIN_DECODED: usize = MIN_BASE64 / GROUP * 3;
/// Characters of the shortest hex stretch that is decoded.
const MIN_HEX: usize = 16;
/// Escapes that make a text worth unescaping.
const MIN_ESCAPES: usize = 3;
/// Letters of the shortest stretch of letters that stand apart.
const MIN_SPACED: usize = 8;
/// Letters that are put together at most, and the longest word among them.
const MAX_SPACED: usize = 4096;
const MAX_SPELT: usize = 14;

const LENIENT: GeneralPurposeConfig = general_purpose::NO_PAD
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const BASE64: GeneralPurpose = GeneralPurpose::new(&base64::alphabet::STANDARD, LENIENT);

/// What is hidden in a text, as far as there is room for it.
pub(super) fn uncovered(text: &str, room: usize) -> Vec<(Disguise, String)> {
    let found = [
        (Disguise::Base64, base64_in(text, room)),
        (Disguise::Hex, hex_in(text, room)),
        (Disguise::Escapes, unescaped(text, room)),
    ];
    found.into_iter().filter_map(|(disguise, text)| Some((disguise, text?))).collect()
}

/// Decoded bytes as text, where they are one.
fn readable(bytes: Vec<u8>) -> Option<String> {
    let wide = bytes.len() >= 8 && bytes.iter().skip(1).step_by(2).all(|byte| *byte == 0);
    let bytes = if wide { bytes.into_iter().step_by(2).collect() } else { bytes };
    let text = String::from_utf8(bytes).ok()?;
    let strange = text.chars().filter(|c| is_strange(*c)).count();
    let letters = text.chars().filter(|c| c.is_alphabetic() || c.is_whitespace()).count();
    (strange * 20 <= text.len() && letters * 2 >= text.chars().count()).then_some(text)
}

fn is_strange(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t')
}

fn base64_in(text: &str, room: usize) -> Option<String> {
    let bytes = text.as_bytes();
    let run_end =
        |from: usize| from + bytes[from..].iter().take_while(|byte| is_base64(**byte)).count();
    let mut found = String::new();
    let mut at = 0;
    while at < bytes.len() && found.len() < room {
        let mut end = run_end(at);
        if end - at < MIN_BASE64 {
            at = end + 1;
            continue;
        }
        let mut run = bytes[at..end].to_vec();
        // Long lines go on in the next.
        while run.len() >= 40 {
            let breaks = bytes[end..].iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
            let (next, next_end) = (end + breaks, run_end(end + breaks));
            if breaks == 0 || breaks > 2 || next_end == next {
                break;
            }
            run.extend_from_slice(&bytes[next..next_end]);
            end = next_end;
        }
        at = end + 1;
        for text in decoded(run) {
            if found.len() >= room {
                break;
            }
            found.push_str(&text);
            found.push(' ');
        }
    }
    (!found.is_empty()).then_some(found)
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_')
}

/// The texts in a run of base64 characters. Words that touch base64 shift its groups of four, and decode to
/// other bytes.
fn decoded(mut run: Vec<u8>) -> impl Iterator<Item = String> {
    for byte in &mut run {
        *byte = match *byte {
            b'-' => b'+',
            b'_' => b'/',
            other => other,
        };
    }
    (0..GROUP).flat_map(move |shift| texts_in(run.get(shift..).unwrap_or_default()))
}

/// The readable texts in groups of base64, of which the last may be incomplete.
fn texts_in(groups: &[u8]) -> Vec<String> {
    let whole = groups.len() - usize::from(groups.len() % GROUP == 1);
    let Ok(bytes) = BASE64.decode(&groups[..whole]) else { return Vec::new() };
    match readable(bytes.clone()) {
        Some(text) => vec![text],
        None => readable_stretches(&bytes).collect(),
    }
}

/// The readable texts between bytes that are not.
fn readable_stretches(bytes: &[u8]) -> impl Iterator<Item = String> {
    bytes
        .utf8_chunks()
        .flat_map(|chunk| chunk.valid().split(is_strange))
        .filter(|stretch| stretch.len() >= MIN_DECODED)
        .filter_map(|stretch| readable(stretch.into()))
}

/// Pairs of hex digits, together or apart, with `0x` or `\x` before them or not.
fn hex_in(text: &str, room: usize) -> Option<String> {
    let bytes = text.as_bytes();
    let mut found = String::new();
    let mut pairs: Vec<u8> = Vec::new();
    let mut at = 0;
    let finish = |pairs: &mut Vec<u8>, found: &mut String| {
        if pairs.len() * 2 >= MIN_HEX
            && found.len() < room
            && let Some(text) = readable(pairs.clone()).or_else(|| readable(without_words(pairs)))
        {
            found.push_str(&text);
            found.push(' ');
        }
        pairs.clear();
    };
    while at < bytes.len() {
        if pairs.is_empty() && DIGITS[usize::from(bytes[at])] == NO_DIGIT {
            at += 1;
            continue;
        }
        let pair = bytes.get(at..at + 2).and_then(|pair| hex_byte(pair[0], pair[1]));
        if let Some(byte) = pair {
            pairs.push(byte);
            at += 2;
            continue;
        }
        let skipped = match &bytes[at..] {
            [b'0', b'x' | b'X', ..] => 2,
            [b' ' | b',' | b':' | b'-', b'0', b'x' | b'X', ..] => 3,
            [b',', b' ', b'0', b'x' | b'X', ..] => 4,
            [b' ' | b':' | b'-' | b',', ..] if !pairs.is_empty() => 1,
            _ => 0,
        };
        if skipped == 0 {
            finish(&mut pairs, &mut found);
        }
        at += skipped.max(1);
    }
    finish(&mut pairs, &mut found);
    (!found.is_empty()).then_some(found)
}

/// Decoded bytes without those of words before and behind them, such as the end of `Decode:`: words of
/// hex digits are bytes beyond ASCII.
fn without_words(bytes: &[u8]) -> Vec<u8> {
    let first = bytes.iter().position(u8::is_ascii).unwrap_or(bytes.len());
    let last = bytes.iter().rposition(u8::is_ascii).map_or(first, |last| last + 1);
    bytes[first..last].to_vec()
}

const NO_DIGIT: u8 = 0xff;

/// The value of each byte as a hex digit.
const DIGITS: [u8; 256] = {
    let (mut table, mut digit) = ([NO_DIGIT; 256], 0);
    while digit < 16 {
        table[b"0123456789abcdef"[digit as usize] as usize] = digit;
        table[b"0123456789ABCDEF"[digit as usize] as usize] = digit;
        digit += 1;
    }
    table
};

fn hex_byte(high: u8, low: u8) -> Option<u8> {
    let (high, low) = (DIGITS[usize::from(high)], DIGITS[usize::from(low)]);
    (high != NO_DIGIT && low != NO_DIGIT).then_some(high << 4 | low)
}

/// The text with its escapes resolved, where it has enough of them.
fn unescaped(text: &str, room: usize) -> Option<String> {
    let escapes = text.bytes().filter(|byte| matches!(byte, b'%' | b'\\' | b'&')).count();
    if escapes < MIN_ESCAPES {
        return None;
    }
    let (mut bytes, mut resolved) = (Vec::with_capacity(text.len().min(room)), 0);
    let mut rest = text;
    while let Some(plain) = rest.find(['%', '\\', '&']).filter(|_| bytes.len() < room) {
        bytes.extend_from_slice(&rest.as_bytes()[..plain]);
        rest = &rest[plain..];
        let escape = match rest.as_bytes()[0] {
            b'%' => percent(rest),
            b'\\' => backslash(rest),
            _ => reference(rest),
        };
        let (taken, written) = escape.map_or((1, None), |(taken, written)| (taken, Some(written)));
        resolved += usize::from(written.is_some());
        match written {
            Some(written) => bytes.extend_from_slice(&written),
            None => bytes.extend_from_slice(&rest.as_bytes()[..1]),
        }
        rest = &rest[taken..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    (resolved >= MIN_ESCAPES).then(|| String::from_utf8_lossy(&bytes).into_owned())
}

type Escape = Option<(usize, Vec<u8>)>;

fn percent(text: &str) -> Escape {
    let bytes = text.as_bytes();
    let byte = hex_byte(*bytes.get(1)?, *bytes.get(2)?)?;
    Some((3, vec![byte]))
}

/// `\u0041`, `\u{41}`, `\U00000041`, `\x41`, `\101`, `\n`.
fn backslash(text: &str) -> Escape {
    let bytes = text.as_bytes();
    let hex = |from: usize, digits: usize| {
        let number = u32::from_str_radix(text.get(from..from + digits)?, 16).ok()?;
        Some((from + digits, letter(number)?))
    };
    match bytes.get(1)? {
        b'u' if bytes.get(2) == Some(&b'{') => {
            let end = text.bytes().take(12).position(|byte| byte == b'}')?;
            let number = u32::from_str_radix(text.get(3..end)?, 16).ok()?;
            Some((end + 1, letter(number)?))
        }
        b'u' => hex(2, 4),
        b'U' => hex(2, 8),
        b'x' => hex(2, 2),
        b'n' | b't' | b'r' => Some((2, vec![b' '])),
        b'0'..=b'3' => {
            let number = u32::from_str_radix(text.get(1..4)?, 8).ok()?;
            Some((4, letter(number)?))
        }
        _ => None,
    }
}

fn letter(number: u32) -> Option<Vec<u8>> {
    Some(char::from_u32(number)?.to_string().into_bytes())
}

/// `&#65;`, `&#x41;` and the few names that hide delimiters.
fn reference(text: &str) -> Escape {
    let end = text.bytes().take(12).position(|byte| byte == b';')?;
    let name = text.get(1..end)?;
    let written = match name {
        "lt" => b"<".to_vec(),
        "gt" => b">".to_vec(),
        "amp" => b"&".to_vec(),
        "quot" => b"\"".to_vec(),
        "nbsp" | "NewLine" | "Tab" => b" ".to_vec(),
        "zwnj" | "zwj" | "shy" => Vec::new(),
        _ => {
            let number = match name.strip_prefix("#x").or_else(|| name.strip_prefix("#X")) {
                Some(digits) => u32::from_str_radix(digits, 16).ok()?,
                None => name.strip_prefix('#')?.parse().ok()?,
            };
            letter(number)?
        }
    };
    Some((end + 1, written))
}

/// Letters that stand apart, as the words of the vocabulary that they spell.
pub(super) fn spelt(words: &Words) -> Option<String> {
    let mut found = String::new();
    let mut letters: Vec<u8> = Vec::new();
    for word in &words.all {
        if word.len() == 1 && letters.len() < MAX_SPACED {
            letters.extend_from_slice(words.letters_of(*word));
        } else {
            spell(&mut letters, &mut found);
        }
    }
    spell(&mut letters, &mut found);
    (!found.is_empty()).then_some(found)
}

/// Reads letters as words, the longest first; others are passed over.
fn spell(letters: &mut Vec<u8>, found: &mut String) {
    if letters.len() < MIN_SPACED {
        letters.clear();
        return;
    }
    let letters = std::mem::take(letters);
    let mut at = 0;
    while at < letters.len() {
        let longest = (2..=MAX_SPELT.min(letters.len() - at))
            .rev()
            .find(|length| classes_of(&letters[at..at + length]) != 0);
        match longest {
            Some(length) => {
                found.push_str(&String::from_utf8_lossy(&letters[at..at + length]));
                found.push(' ');
                at += length;
            }
            None => at += 1,
        }
    }
    found.push('\n');
}
