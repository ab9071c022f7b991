//! A text as the words of the vocabulary, in one pass: each word with the classes that it belongs
//! to, where it stands and how it is disguised.
//!
//! Words are found by the hash of their folded letters. Which words make a suspicious phrase is
//! decided in [`super::phrases`].

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::LazyLock;

use super::folding::{Folded, fold, unleet};
use super::phrases::{ADDRESS, Classes, IBAN, VOCABULARY};

/// How a word is disguised.
pub(super) const HIDDEN: u8 = 1;
pub(super) const LOOKS_ALIKE: u8 = 2;
pub(super) const LEET: u8 = 4;
/// Bytes of a word in leetspeak. Shorter ones are names: `h1`, `t0`.
const SHORTEST_LEET: usize = 3;
/// Whether a sentence begins with it.
const STARTS_SENTENCE: u8 = 8;
/// Whether a line ends before it.
const LINE: u8 = 16;

/// Bytes of a word that is remembered; longer ones are cut.
const MAX_WORD: usize = 48;
/// Words that are remembered at all; a longer text is looked at in pieces.
pub(super) const PIECE: usize = 64 * 1024;

/// One word.
#[derive(Debug, Clone, Copy)]
pub(super) struct Word {
    pub(super) classes: Classes,
    /// Where it begins in the text.
    pub(super) at: u32,
    /// Its folded letters in [`Words::letters`].
    start: u32,
    length: u8,
    flags: u8,
}

impl Word {
    pub(super) fn starts_sentence(self) -> bool {
        self.flags & STARTS_SENTENCE != 0
    }

    pub(super) fn disguise(self) -> u8 {
        self.flags & (HIDDEN | LOOKS_ALIKE | LEET)
    }

    pub(super) fn len(self) -> usize {
        usize::from(self.length)
    }
}

/// The words of a piece of text.
#[derive(Debug, Default)]
pub(super) struct Words {
    pub(super) all: Vec<Word>,
    letters: Vec<u8>,
}

impl Words {
    pub(super) fn letters_of(&self, word: Word) -> &[u8] {
        let start = word.start as usize;
        self.letters.get(start..start + word.len()).unwrap_or_default()
    }
}

/// Hashes are keys already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

type Table = HashMap<u64, Known, BuildHasherDefault<Identity>>;

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    classes: Classes,
    /// Whether it is written in letters that look like others.
    is_foreign: bool,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table = Table::default();
    for (classes, words) in VOCABULARY {
        for word in words.split_whitespace() {
            let mut reader = Reader::default();
            word.chars().for_each(|c| reader.take(c));
            let (key, is_foreign) = (hash(&reader.word), reader.flags & LOOKS_ALIKE != 0);
            let known = table.entry(key).or_default();
            known.classes |= classes;
            known.is_foreign |= is_foreign;
        }
    }
    table
});

fn known(letters: &[u8]) -> Known {
    TABLE.get(&hash(letters)).copied().unwrap_or_default()
}

/// Classes of a word by its folded letters.
pub(super) fn classes_of(letters: &[u8]) -> Classes {
    known(letters).classes
}

const FNV: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

fn hash(letters: &[u8]) -> u64 {
    let key = letters.iter().fold(FNV, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME));
    key ^ (key >> 29)
}

/// Reads a piece of text.
pub(super) fn words_of(text: &str) -> Words {
    let mut reader = Reader { gap: STARTS_SENTENCE, ..Reader::default() };
    for (place, c) in text.char_indices() {
        reader.place = place;
        reader.take(c);
    }
    reader.end_word();
    reader.words
}

#[derive(Default)]
struct Reader {
    words: Words,
    /// Where it is in the text, and where the word under way began.
    place: usize,
    word_at: usize,
    /// The folded letters of the word under way.
    word: Vec<u8>,
    flags: u8,
    has_plain_letters: bool,
    has_signs: bool,
    /// What is known of the gap before it.
    gap: u8,
    gap_length: u32,
    ends_sentence: bool,
}

impl Reader {
    fn take(&mut self, c: char) {
        if c.is_ascii() {
            match c {
                'a'..='z' => self.letter(c, true),
                'A'..='Z' => self.letter(c.to_ascii_lowercase(), true),
                '0'..='9' | '@' | '$' => {
                    self.has_signs = true;
                    self.letter(c, false);
                }
                '\'' | '\r' => {}
                _ => self.gap(c),
            }
            return;
        }
        match fold(c) {
            Folded::Letter(c) => self.letter(c, true),
            Folded::LooksLike(c) => {
                self.flags |= LOOKS_ALIKE;
                self.letter(c, false);
            }
            Folded::HiddenLetter(c) => {
                self.flags |= HIDDEN;
                self.letter(c, true);
            }
            Folded::Hidden => self.flags |= if self.word.is_empty() { 0 } else { HIDDEN },
            Folded::Nothing => {}
            Folded::Gap => self.gap(c),
        }
    }

    fn letter(&mut self, c: char, is_plain: bool) {
        self.has_plain_letters |= is_plain;
        if self.word.is_empty() {
            self.word_at = self.place;
        }
        if self.word.len() >= MAX_WORD {
            return;
        }
        if c.is_ascii() {
            self.word.push(c as u8);
        } else {
            self.word.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }

    fn gap(&mut self, c: char) {
        self.end_word();
        if c.is_whitespace() {
            if self.ends_sentence || (c == '\n' && self.gap_length > 0 && self.gap & LINE != 0) {
                self.gap |= STARTS_SENTENCE;
            }
            if c == '\n' {
                self.gap |= LINE;
            }
        } else {
            self.ends_sentence = matches!(c, '.' | '!' | '?' | '。' | '！' | '？');
        }
        self.gap_length += 1;
    }

    fn end_word(&mut self) {
        if self.word.is_empty() {
            return;
        }
        let known = known(&self.word);
        let mut classes = known.classes;
        let mut flags = self.flags;
        if known.is_foreign || !self.has_plain_letters {
            flags &= !LOOKS_ALIKE;
        }
        if classes == 0 && self.has_signs {
            (classes, flags) = self.signs(flags);
        }
        let start = u32::try_from(self.words.letters.len()).unwrap_or(u32::MAX);
        let length = u8::try_from(self.word.len()).unwrap_or(u8::MAX);
        let flags = flags | (self.gap & STARTS_SENTENCE);
        let at = u32::try_from(self.word_at).unwrap_or(u32::MAX);
        self.words.all.push(Word { classes, at, start, length, flags });
        self.words.letters.append(&mut self.word);
        (self.flags, self.gap, self.gap_length) = (0, 0, 0);
        (self.has_plain_letters, self.has_signs, self.ends_sentence) = (false, false, false);
    }

    /// A word with digits or signs: leetspeak, an address or an account number.
    fn signs(&self, flags: u8) -> (Classes, u8) {
        if self.has_plain_letters && self.word.len() >= SHORTEST_LEET {
            let plain: Vec<u8> = self.word.iter().map(|byte| unleet(*byte)).collect();
            let known = classes_of(&plain);
            if known != 0 {
                return (known, flags | LEET);
            }
        }
        let is_address = self.word.len() > 4
            && self.word[1..].contains(&b'@')
            && self.word.iter().any(u8::is_ascii_alphabetic);
        let digits = self.word.iter().filter(|byte| byte.is_ascii_digit()).count();
        let is_account = self.word.len() >= 14
            && digits >= 10
            && self.word[..2].iter().all(u8::is_ascii_alphabetic)
            && self.word[2..4].iter().all(u8::is_ascii_digit);
        let address = if is_address { ADDRESS } else { 0 };
        (address | if is_account { IBAN } else { 0 }, flags)
    }
}
