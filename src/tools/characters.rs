//! The character encoding of the body of an answer: by its byte order mark, its content type, or a
//! declaration in its first bytes.

use encoding_rs::{CoderResult, Encoding, UTF_8, UTF_16BE, UTF_16LE, WINDOWS_1252};
use http::header::CONTENT_TYPE;

use crate::bounds::text::bare_type;
use crate::outbound::Response;

/// Bytes at the start of a page in which it may declare its encoding.
const PROLOGUE: usize = 1024;
/// Bytes that a decoder needs in its output buffer to make progress.
const SLACK: usize = 16;

pub(super) fn content_type(response: &Response) -> &str {
    response.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Whether the bytes at the start of a body can be text: of all that is read here, only UTF-16 has zeros.
pub(super) fn may_be_text(start: &[u8], kind: &str) -> bool {
    let is_wide = |encoding: &Encoding| [UTF_16LE, UTF_16BE].contains(&encoding);
    Encoding::for_bom(start).is_some() || charset(kind).is_some_and(is_wide) || !start.contains(&0)
}

/// The encoding that a body, or its content type, declares.
pub(super) fn declared_encoding(
    body: &[u8],
    kind: &str,
    is_page: bool,
) -> Option<&'static Encoding> {
    let mark = Encoding::for_bom(body).map(|(encoding, _)| encoding);
    mark.or_else(|| charset(kind)).or_else(|| written(body, is_page))
}

/// The encoding that is assumed for a body without a declaration.
pub(super) fn usual(body: &[u8], kind: &str) -> &'static Encoding {
    match std::str::from_utf8(body) {
        Err(_) if !bare_type(kind).contains("json") => WINDOWS_1252,
        _ => UTF_8,
    }
}

/// A body as text of at most so many bytes, with U+FFFD for what is no character and without a mark;
/// nothing where it has more.
pub(super) fn decoded(body: &[u8], encoding: &'static Encoding, most: usize) -> Option<String> {
    let mut decoder = encoding.new_decoder();
    let needed = decoder.max_utf8_buffer_length(body.len()).unwrap_or(usize::MAX);
    let mut text = String::with_capacity(needed.min(most.saturating_add(SLACK)));
    let (result, _, _) = decoder.decode_to_string(body, &mut text, true);
    (result == CoderResult::InputEmpty && text.len() <= most).then_some(text)
}

/// The charset of a content type.
fn charset(kind: &str) -> Option<&'static Encoding> {
    let (_, parameters) = kind.split_once(';')?;
    let value = parameters.split(';').find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("charset").then(|| value.trim().trim_matches(['"', '\'']))
    })?;
    Encoding::for_label(value.as_bytes())
}

/// The charset that a page, or a document of XML, writes at its start.
fn written(body: &[u8], is_page: bool) -> Option<&'static Encoding> {
    let start = String::from_utf8_lossy(&body[..body.len().min(PROLOGUE)]).to_ascii_lowercase();
    let marks: &[&str] = if is_page { &["charset=", "encoding="] } else { &["encoding="] };
    let is_xml = start.trim_start().starts_with("<?xml");
    if !is_page && !is_xml {
        return None;
    }
    let label = marks.iter().find_map(|mark| start.split_once(mark)).map(|(_, rest)| rest)?;
    let label = label.trim_start_matches(['"', '\'', ' ']);
    let end = label.find(|c: char| !c.is_ascii_alphanumeric() && !"-_:.".contains(c))?;
    // What can be read up to here is no UTF-16, whatever it says.
    Encoding::for_label(&label.as_bytes()[..end]).map(|encoding| match encoding.name() {
        "UTF-16LE" | "UTF-16BE" => UTF_8,
        _ => encoding,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_no_longer_than_it_may_be() {
        for (body, encoding, text) in [
            (&b""[..], UTF_8, ""),
            ("äbc".as_bytes(), UTF_8, "äbc"),
            (b"\xe4\x80", WINDOWS_1252, "ä€"),
            (b"a\xff", UTF_8, "a\u{fffd}"),
            (b"\xac\x20\xac\x20", UTF_16LE, "€€"),
        ] {
            let exact = text.len();
            assert_eq!(decoded(body, encoding, exact).as_deref(), Some(text), "{text}");
            assert_eq!(decoded(body, encoding, usize::MAX).as_deref(), Some(text), "{text}");
            if let Some(less) = exact.checked_sub(1) {
                assert_eq!(decoded(body, encoding, less), None, "{text}");
            }
        }
        let long = b"\x80".repeat(100_000);
        assert_eq!(decoded(&long, WINDOWS_1252, 300_000).map(|text| text.len()), Some(300_000));
        assert_eq!(decoded(&long, WINDOWS_1252, 299_999), None);
        let plain = b"a".repeat(100_000);
        assert_eq!(decoded(&plain, UTF_8, 100_000).map(|text| text.len()), Some(100_000));
    }
}
