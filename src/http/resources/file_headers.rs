//! What requests for a file say in their headers: preconditions (RFC 9110, section 13) and ranges
//! (section 14); and what answers say of its media type.

use axum::http::HeaderMap;
use axum::http::header::{IF_RANGE, RANGE};
use headers::{ETag, HeaderMapExt as _, IfMatch, IfNoneMatch, IfRange};
use http_range_header::SyntacticallyCorrectRange as RequestedRange;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::tools::stored_files::Condition;

/// The entity tags that a request names.
#[derive(Debug, Clone, Default)]
pub(crate) struct Preconditions {
    matches: Option<IfMatch>,
    none_matches: Option<IfNoneMatch>,
}

/// What becomes of a request for a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Served {
    Content,
    NotModified,
    PreconditionFailed,
}

impl Preconditions {
    pub(crate) fn read(headers: &HeaderMap) -> Self {
        Self { matches: headers.typed_get(), none_matches: headers.typed_get() }
    }

    pub(crate) fn judge(&self, etag: &str) -> Served {
        let Ok(etag) = etag.parse::<ETag>() else { return Served::Content };
        if self.matches.as_ref().is_some_and(|matches| !matches.precondition_passes(&etag)) {
            return Served::PreconditionFailed;
        }
        if self.none_matches.as_ref().is_some_and(|none| !none.precondition_passes(&etag)) {
            return Served::NotModified;
        }
        Served::Content
    }

    /// The condition on which a file is changed.
    pub(crate) fn of_change(self) -> Option<Condition> {
        if self.matches.is_none() && self.none_matches.is_none() {
            return None;
        }
        Some(Box::new(move |etag| match etag {
            Some(etag) => self.judge(etag) == Served::Content,
            None => self.matches.is_none(),
        }))
    }
}

/// The first and last byte of a part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// The file has no such part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unsatisfiable;

impl Range {
    /// The part that is asked for; `None` for the whole file, also where several parts are asked
    /// for, the header makes no sense, or `If-Range` names another content.
    pub(crate) fn read(
        headers: &HeaderMap,
        size: u64,
        etag: &str,
    ) -> Result<Option<Self>, Unsatisfiable> {
        if headers.contains_key(IF_RANGE) {
            let is_modified = |known: IfRange| known.is_modified(etag.parse().ok().as_ref(), None);
            if headers.typed_get().is_none_or(is_modified) {
                return Ok(None); // the client may have a part of another content
            }
        }
        let asked = headers.get(RANGE).and_then(|value| value.to_str().ok());
        let parsed = asked.and_then(|text| http_range_header::parse_range_header(text).ok());
        let parts = parsed.map(http_range_header::ParsedRanges::into_ranges).unwrap_or_default();
        let [asked] = parts.as_slice() else { return Ok(None) };
        let last = size.saturating_sub(1);
        let (start, end) = match *asked {
            RequestedRange::FromStart(start) => (start, last),
            RequestedRange::FromLast(0) => return Err(Unsatisfiable),
            RequestedRange::FromLast(bytes) => (size.saturating_sub(bytes), last),
            RequestedRange::Indexed(start, end) => (start, end.min(last)),
        };
        if start < size { Ok(Some(Self { start, end })) } else { Err(Unsatisfiable) }
    }
}

/// The media type of a file, by its name.
pub(crate) fn media_type(path: &str) -> String {
    let guess = mime_guess::from_path(path).first();
    match guess {
        None => mime_guess::mime::APPLICATION_OCTET_STREAM.to_string(),
        Some(mime) if mime.type_() == mime_guess::mime::TEXT => format!("{mime}; charset=utf-8"),
        Some(mime) => mime.to_string(),
    }
}

/// `Content-Disposition`: only what no browser executes is shown in it.
pub(crate) fn disposition(path: &str) -> String {
    const SHOWN: [&str; 11] = [
        "text/plain",
        "text/csv",
        "text/markdown",
        "application/json",
        "image/png",
        "image/jpeg",
        "image/gif",
        "image/webp",
        "image/avif",
        "audio/mpeg",
        "video/mp4",
    ];
    let guess = mime_guess::from_path(path).first();
    let is_shown = guess.is_some_and(|mime| SHOWN.contains(&mime.essence_str()));
    let kind = if is_shown { "inline" } else { "attachment" };
    let name = path.rsplit('/').next().unwrap_or_default();
    format!("{kind}; filename*=UTF-8''{}", utf8_percent_encode(name, NON_ALPHANUMERIC))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(given: &[(&'static str, &str)]) -> HeaderMap {
        given.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_range_is_one_part_or_the_whole() {
        let part = |start, end| Ok(Some(Range { start, end }));
        for (range, read) in [
            ("bytes=0-3", part(0, 3)),
            ("bytes=2-", part(2, 9)),
            ("bytes=-3", part(7, 9)),
            ("bytes=-30", part(0, 9)),
            ("bytes=9-9", part(9, 9)),
            ("bytes=8-99", part(8, 9)),
            ("bytes=10-", Err(Unsatisfiable)),
            ("bytes=10-12", Err(Unsatisfiable)),
            ("bytes=-0", Err(Unsatisfiable)),
            ("bytes=99999999999999999999999-", Err(Unsatisfiable)),
            ("bytes=0-1,3-4", Ok(None)),
            ("bytes=3-2", Ok(None)),
            ("bytes=-", Ok(None)),
            ("bytes=+1-2", Ok(None)),
            ("bytes=a-b", Ok(None)),
            ("lines=0-1", Ok(None)),
            ("", Ok(None)),
        ] {
            assert_eq!(Range::read(&headers(&[("range", range)]), 10, "\"a\""), read, "{range}");
        }
        let empty = Range::read(&headers(&[("range", "bytes=0-")]), 0, "\"a\"");
        assert_eq!(empty, Err(Unsatisfiable));
        for (tag, read) in [
            ("\"a\"", part(0, 0)),
            ("\"b\"", Ok(None)),
            ("W/\"a\"", Ok(None)),
            ("b", Ok(None)),
            ("", Ok(None)),
        ] {
            let given = headers(&[("range", "bytes=0-0"), ("if-range", tag)]);
            assert_eq!(Range::read(&given, 10, "\"a\""), read, "{tag}");
        }
    }

    #[test]
    fn preconditions_compare_entity_tags() {
        for (name, value, served) in [
            ("if-match", "\"a\"", Served::Content),
            ("if-match", "\"b\", \"a\"", Served::Content),
            ("if-match", "*", Served::Content),
            ("if-match", "W/\"a\"", Served::PreconditionFailed),
            ("if-match", "\"b\"", Served::PreconditionFailed),
            ("if-none-match", "\"a\"", Served::NotModified),
            ("if-none-match", "W/\"a\"", Served::NotModified),
            ("if-none-match", "*", Served::NotModified),
            ("if-none-match", "\"b\"", Served::Content),
            ("accept", "x", Served::Content),
        ] {
            let given = Preconditions::read(&headers(&[(name, value)]));
            assert_eq!(given.judge("\"a\""), served, "{name}: {value}");
        }
        for (name, value, there, missing) in [
            ("if-none-match", "*", false, true),
            ("if-match", "*", true, false),
            ("if-match", "\"a\"", true, false),
            ("if-match", "\"b\"", false, false),
        ] {
            let holds = Preconditions::read(&headers(&[(name, value)])).of_change().unwrap();
            assert_eq!((holds(Some("\"a\"")), holds(None)), (there, missing), "{name}: {value}");
        }
        assert!(Preconditions::default().of_change().is_none());
    }

    #[test]
    fn what_a_browser_could_execute_is_a_download() {
        for (path, kind, shown) in [
            ("out/a.TXT", "text/plain; charset=utf-8", "inline"),
            ("a.html", "text/html; charset=utf-8", "attachment"),
            ("a.svg", "image/svg+xml", "attachment"),
            ("a.png", "image/png", "inline"),
            ("a.js", "text/javascript; charset=utf-8", "attachment"),
            ("a.xml", "text/xml; charset=utf-8", "attachment"),
            ("txt", "application/octet-stream", "attachment"),
            ("a.unknown-type", "application/octet-stream", "attachment"),
        ] {
            assert_eq!(media_type(path), kind, "{path}");
            assert!(disposition(path).starts_with(shown), "{path}");
        }
        let odd = disposition("a/ä \"\r\n.txt");
        assert_eq!(odd, "inline; filename*=UTF-8''%C3%A4%20%22%0D%0A%2Etxt");
    }
}
