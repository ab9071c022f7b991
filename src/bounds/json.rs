//! Untrusted JSON, parsed with a bound on the memory that its values take: an empty object in a list
//! takes three bytes as text and hundreds in memory.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};

/// Levels of JSON that is kept as text and parsed later; the parser accepts 128.
pub const MAX_NESTING: usize = 96;

/// Values in one text, names not counted: each takes up to 72 bytes of memory beside its text, and an
/// object as much as ten others.
pub const MAX_VALUES: usize = 200_000;

/// Bytes of memory for each byte of JSON text, an upper estimate for ordinary documents.
pub const IN_MEMORY: usize = 8;

/// Values that an object counts as, in addition to those in it.
const OBJECT: usize = 10;

/// Why JSON text is not read, as a clause.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It is not JSON, or not of the expected form.
    #[error("{}", in_words(.0))]
    Malformed(#[from] serde_json::Error),
    /// Its values are nested too deep.
    #[error("the JSON is nested more than {MAX_NESTING} levels deep")]
    TooDeep,
    /// It holds too many values.
    #[error("the JSON holds more than {MAX_VALUES} values, of which an object counts as {OBJECT}")]
    TooMany,
    /// An integer would be kept as a number that is not quite the same.
    #[error("the JSON holds an integer of more than 64 bits, {0}; write it as a string")]
    Inexact(String),
}

/// Describes a parser's error.
pub fn in_words(error: &serde_json::Error) -> String {
    let word = "expected true, false or null, and texts are in double quotes,";
    error.to_string().replace("expected ident", word)
}

/// Reads JSON text of at most [`MAX_NESTING`] levels and [`MAX_VALUES`] values.
///
/// # Errors
/// [`Unreadable`].
pub fn read<'a, T: Deserialize<'a>>(
    json: &'a (impl AsRef<[u8]> + ?Sized),
) -> Result<T, Unreadable> {
    let json = json.as_ref();
    let size = Size::of(json);
    if size.levels > MAX_NESTING {
        return Err(Unreadable::TooDeep);
    }
    if size.values > MAX_VALUES {
        return Err(Unreadable::TooMany);
    }
    Ok(serde_json::from_slice(json)?)
}

/// As [`read`], but refuses integers that do not fit into 64 bits: numbers of callers and models are
/// passed on unchanged or refused.
///
/// # Errors
/// [`Unreadable`].
pub fn read_exactly<'a, T: Deserialize<'a>>(
    json: &'a (impl AsRef<[u8]> + ?Sized),
) -> Result<T, Unreadable> {
    let value = read(json)?;
    match inexact_integer(json.as_ref()) {
        Some(integer) => Err(Unreadable::Inexact(integer)),
        None => Ok(value),
    }
}

/// The first integer of JSON text that is outside of the range of 64 bits, cut to 40 characters.
fn inexact_integer(json: &[u8]) -> Option<String> {
    const FITS: usize = 18;
    let in_number = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
    let (mut at, mut in_string) = (0, false);
    while let Some(byte) = json.get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'-' | b'0'..=b'9' if !in_string => {
                let length = json[at..].iter().take_while(|byte| in_number(byte)).count();
                let number = std::str::from_utf8(&json[at..at + length]).ok()?;
                let is_integer = length > FITS && !number.contains(['.', 'e', 'E']);
                if is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    return Some(number.chars().take(40).collect());
                }
                at += length - 1;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// The nesting and the number of values of JSON text, by its brackets and commas outside of strings.
/// Meaningless for other text.
struct Size {
    levels: usize,
    values: usize,
}

impl Size {
    fn of(json: &[u8]) -> Self {
        let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
        let mut size = Self { levels: 0, values: 1 };
        for byte in json {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                _ if in_string => {}
                b'[' | b'{' => {
                    depth += 1;
                    size.values += if *byte == b'{' { OBJECT } else { 1 };
                    size.levels = size.levels.max(depth);
                }
                b']' | b'}' => depth = depth.saturating_sub(1),
                b',' => size.values += 1,
                _ => {}
            }
        }
        size
    }
}

/// A list of at most so many entries; a longer one is refused while it is read.
#[derive(Debug)]
pub struct AtMost<T, const N: usize>(pub Vec<T>);

impl<T, const N: usize> Default for AtMost<T, N> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const N: usize> IntoIterator for AtMost<T, N> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// The first so many entries of a list; the rest is skipped.
#[derive(Debug)]
pub struct UpTo<T, const N: usize>(pub Vec<T>);

impl<T, const N: usize> Default for UpTo<T, N> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const N: usize> IntoIterator for UpTo<T, N> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for UpTo<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(UpToVisitor::<T, N>(PhantomData))
    }
}

struct UpToVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for UpToVisitor<T, N> {
    type Value = UpTo<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while entries.len() < N {
            match list.next_element()? {
                Some(entry) => entries.push(entry),
                None => return Ok(UpTo(entries)),
            }
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(UpTo(entries))
    }
}

/// The first entry of a list; the rest is skipped.
#[derive(Debug)]
pub struct First<T>(pub Option<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for AtMost<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(AtMostVisitor::<T, N>(PhantomData))
    }
}

struct AtMostVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for AtMostVisitor<T, N> {
    type Value = AtMost<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {N} entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element()? {
            if entries.len() == N {
                return Err(A::Error::custom(format_args!("a list has more than {N} entries")));
            }
            entries.push(entry);
        }
        Ok(AtMost(entries))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for First<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(FirstVisitor(PhantomData))
    }
}

struct FirstVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for FirstVisitor<T> {
    type Value = First<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let first = list.next_element()?;
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(First(first))
    }
}

/// Whether JSON text that is kept as text can be read into values later.
pub fn is_shallow(json: &str) -> bool {
    is_nested_within(json, MAX_NESTING)
}

/// Whether JSON text is nested in at most so many levels.
pub fn is_nested_within(json: &str, levels: usize) -> bool {
    Size::of(json.as_bytes()).levels <= levels
}

/// A key as a part of a JSON pointer (RFC 6901).
pub fn escaped_key(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// The key that a part of a JSON pointer stands for.
pub fn unescaped_key(part: &str) -> String {
    part.replace("~1", "/").replace("~0", "~")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn what_is_no_json_is_told_in_words() {
        let told = |json: &str| read::<Value>(json).unwrap_err().to_string();
        assert_eq!(
            told("nope"),
            "expected true, false or null, and texts are in double quotes, at line 1 column 2"
        );
        assert_eq!(told("{"), "EOF while parsing an object at line 1 column 1");
    }

    #[test]
    fn lists_are_cut_while_they_are_read() {
        let list = |n: usize| format!("[{}]", vec!["{}"; n].join(","));
        let read = |n| serde_json::from_str::<AtMost<IgnoredAny, 3>>(&list(n)).map(|it| it.0.len());
        assert_eq!(read(3).unwrap(), 3);
        assert!(read(4).unwrap_err().to_string().contains("more than 3 entries"));
        assert!(serde_json::from_str::<First<IgnoredAny>>(&list(1_000)).unwrap().0.is_some());
        assert!(serde_json::from_str::<First<IgnoredAny>>("[]").unwrap().0.is_none());
        assert!(serde_json::from_str::<First<IgnoredAny>>("[1, }").is_err());
    }

    #[test]
    fn what_is_read_is_bounded() {
        let list = |n: usize| format!("[{}]", vec!["{}"; n].join(","));
        let nested = |n: usize| format!("{}1{}", r#"{"a":"#.repeat(n), "}".repeat(n));
        let why = |text: &str| read::<Value>(text).map(|_| ()).map_err(|error| error.to_string());
        assert_eq!(why(&list(18_000)), Ok(()));
        let too_many = "the JSON holds more than 200000 values, of which an object counts as 10";
        assert_eq!(why(&list(18_200)).unwrap_err(), too_many);
        assert_eq!(why(&format!("[{}]", vec!["[]"; 99_999].join(","))), Ok(()));
        assert_eq!(why(&nested(96)), Ok(()));
        assert_eq!(why(&nested(97)).unwrap_err(), "the JSON is nested more than 96 levels deep");
        assert_eq!(why(&format!("{:?}", ",[{".repeat(100_000))), Ok(()), "strings are one value");
        assert!(why("[1, }").unwrap_err().starts_with("expected value"));
    }

    #[test]
    fn integers_of_more_than_64_bits_are_refused_where_they_must_stay_the_same() {
        let table = [
            ("18446744073709551615", None),
            ("18446744073709551616", Some("18446744073709551616")),
            ("[-9223372036854775808]", None),
            ("[1, -9223372036854775809]", Some("-9223372036854775809")),
            (r#"{"a": [0, 1000000000000000000001]}"#, Some("1000000000000000000001")),
            (r#"{"a\"1000000000000000000001": "1000000000000000000001\\"}"#, None),
            ("[1e30, 0.10000000000000000000001, 100000000000000000000.5]", None),
        ];
        for (text, expected) in table {
            assert!(read::<Value>(text).is_ok(), "{text}");
            let refused = read_exactly::<Value>(text).err().map(|error| error.to_string());
            let expected = expected.map(|integer| {
                format!("the JSON holds an integer of more than 64 bits, {integer}; write it as a string")
            });
            assert_eq!(refused, expected, "{text}");
        }
    }

    #[test]
    fn brackets_count_outside_of_strings() {
        assert!(is_shallow(&"[]".repeat(1000)));
        assert!(is_shallow(&format!(r#"{{"a": "{}\"["}}"#, "[".repeat(1000))));
        assert!(is_shallow(&"[".repeat(96)));
        assert!(!is_shallow(&"[".repeat(97)));
    }
}
