//! Folds characters to what a reader perceives: look-alikes become the letter that they resemble,
//! invisible characters are dropped, and case and accents are ignored.
//!
//! The same folding is applied to the vocabulary, so words of other alphabets are found too. What a
//! word means is decided elsewhere.

use std::sync::LazyLock;

use crate::message::visible::is_hidden;

/// Codes below this are looked up in a table; letters of the alphabets beyond are computed.
const FOLDED_CODES: usize = 0xa740;

/// A character as a reader perceives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Folded {
    /// A letter or digit, or a sign that stands for one.
    Letter(char),
    /// A character that only looks like this letter or digit.
    LooksLike(char),
    /// A hidden character that models read as this one.
    HiddenLetter(char),
    /// Ignored: neither visible nor a gap.
    Nothing,
    /// Deliberately invisible.
    Hidden,
    /// A separator of words.
    Gap,
}

/// Accented Latin letters, each row with the letter that it begins with.
const ACCENTED: [&str; 23] = [
    "aàáâãäåāăąǎạảấầẩẫậắằẳẵặ",
    "cçćĉċč",
    "dďđð",
    "eèéêëēĕėęěẹẻẽếềểễệ",
    "gĝğġģǧ",
    "hĥħ",
    "iìíîïĩīĭįıǐịỉ",
    "jĵ",
    "kķǩ",
    "lĺļľŀł",
    "nñńņňŉŋ",
    "oòóôõöøōŏőǒọỏốồổỗộớờởỡợơ",
    "pṕṗ",
    "rŕŗř",
    "sśŝşšșſ",
    "tţťŧț",
    "uùúûüũūŭůűųǔụủứừửữựư",
    "vṽṿ",
    "wŵẁẃẅ",
    "xẋẍ",
    "yýÿŷỳỵỷỹ",
    "zźżž",
    "bḃḅ",
];

/// Letters of other alphabets that look like Latin ones, in pairs.
const LOOK_ALIKES: &str = "аaвbсcԁdеeѐeёeғfɡgнhһhіiїiıiјjкkӏlмmпnоoрpԛqгrѕsтtуyүyѵvԝwшwхxчyзzбbиnйnлnдd\
αaβbϲcδdεeϝfγyηnιiκkλlμuνvοoπnρpσoτtυuωwχxζzξe\
ᴀaʙbᴄcᴅdᴇeꜰfɢgʜhɪiᴊjᴋkʟlᴍmɴnᴏoᴘpʀrꜱsᴛtᴜuᴠvᴡwʏyᴢzℓlℯeℊgℴoⅰiⅴvⅹxⅼlⅽcⅾdⅿm";

/// Folds a character that is not ASCII.
pub(super) fn fold(c: char) -> Folded {
    let code = u32::from(c);
    match code {
        0x300..=0x36f | 0x1ab0..=0x1aff | 0x20d0..=0x20ff | 0x2019 => return Folded::Nothing,
        0xe0020..=0xe007e => return tagged(code - 0xe0000),
        0xff01..=0xff5e => return look_alike(char::from_u32(code - 0xfee0)),
        0x1d400..=0x1d6a3 => return look_alike(letter((code - 0x1d400) % 52 % 26)),
        0x1d7ce..=0x1d7ff => {
            return look_alike(char::from_u32(u32::from('0') + (code - 0x1d7ce) % 10));
        }
        0x249c..=0x24b5 => return look_alike(letter(code - 0x249c)),
        0x24b6..=0x24e9 => return look_alike(letter((code - 0x24b6) % 26)),
        0x1f130..=0x1f149 => return look_alike(letter(code - 0x1f130)),
        0x1f170..=0x1f189 => return look_alike(letter(code - 0x1f170)),
        0x1f1e6..=0x1f1ff => return look_alike(letter(code - 0x1f1e6)),
        _ => {}
    }
    if is_hidden(c) {
        return if c.is_control() { Folded::Gap } else { Folded::Hidden };
    }
    if !c.is_alphanumeric() {
        return Folded::Gap;
    }
    let lower = c.to_lowercase().next().unwrap_or(c);
    match TABLE.get(lower as usize).copied().flatten() {
        Some((folded, true)) => Folded::LooksLike(folded),
        Some((folded, false)) => Folded::Letter(folded),
        None => Folded::Letter(lower),
    }
}

fn letter(place: u32) -> Option<char> {
    char::from_u32(u32::from('a') + place)
}

fn look_alike(c: Option<char>) -> Folded {
    match c.map(|c| c.to_ascii_lowercase()) {
        Some(c) if c.is_ascii_alphanumeric() => Folded::LooksLike(c),
        _ => Folded::Gap,
    }
}

fn tagged(code: u32) -> Folded {
    match char::from_u32(code).map(|c| c.to_ascii_lowercase()) {
        Some(c) if c.is_ascii_alphanumeric() => Folded::HiddenLetter(c),
        _ => Folded::Gap,
    }
}

/// Letters of the alphabets that are folded, by code: what they are, and whether they only look so.
static TABLE: LazyLock<Vec<Option<(char, bool)>>> = LazyLock::new(|| {
    let accented = ACCENTED.iter().flat_map(|row| {
        let plain = row.chars().next().unwrap_or_default();
        row.chars().skip(1).map(move |c| (c, (plain, false)))
    });
    let letters: Vec<char> = LOOK_ALIKES.chars().collect();
    let alike = letters.chunks_exact(2).map(|pair| (pair[0], (pair[1], true)));
    let mut table = vec![None; FOLDED_CODES];
    for (c, folded) in accented.chain(alike) {
        if let Some(place) = table.get_mut(c as usize) {
            *place = Some(folded);
        }
    }
    table
});

/// The letter that a digit or sign stands for in leetspeak.
pub(super) fn unleet(byte: u8) -> u8 {
    match byte {
        b'0' => b'o',
        b'1' => b'i',
        b'3' => b'e',
        b'4' | b'@' => b'a',
        b'5' | b'$' => b's',
        b'7' => b't',
        b'8' => b'b',
        other => other,
    }
}
