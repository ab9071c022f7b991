//! From the bytes of a page to its text.

use url::Url;

use crate::bounds::html;
use crate::bounds::text::bare_type;
use crate::outbound::Response;
use crate::tools::characters::{content_type, declared_encoding, may_be_text, usual};

/// Bytes at the start of a page that are inspected to detect whether it is text.
const LOOKED_AT: usize = 8192;

/// A page as text.
pub(super) struct Text {
    text: String,
    is_page: bool,
}

impl Text {
    /// # Errors
    /// It is no text.
    pub(super) fn of(response: &Response) -> Result<Self, String> {
        let body = &response.body;
        let written = content_type(response);
        let kind = bare_type(written);
        if !may_be_text(&body[..body.len().min(LOOKED_AT)], written) {
            let kind = if kind.is_empty() { "unknown type" } else { &kind };
            return Err(format!("it is not text but {} bytes of {kind}", body.len()));
        }
        let is_page = match kind.as_str() {
            "text/html" | "application/xhtml+xml" => true,
            "" => looks_like_page(body),
            _ => false,
        };
        let encoding =
            declared_encoding(body, written, is_page).unwrap_or_else(|| usual(body, written));
        let (text, _, _) = encoding.decode(body);
        Ok(Self { text: text.into_owned(), is_page })
    }

    pub(super) fn raw(self) -> String {
        self.text
    }

    /// As Markdown, where it is a page.
    pub(super) fn readable(self, from: &Url) -> Result<String, String> {
        if !self.is_page {
            return Ok(self.text);
        }
        let page = html::readable(&self.text, from).map_err(|refused| format!("it {refused}"))?;
        if page.markdown.is_empty() {
            let title = page.title;
            return Err(format!("it has no text (its title is {title:?}); try it with raw"));
        }
        if page.title.is_empty() || page.markdown.contains(&page.title) {
            return Ok(page.markdown);
        }
        Ok(format!("Title: {}\n\n{}", page.title, page.markdown))
    }
}

fn looks_like_page(body: &[u8]) -> bool {
    let start = String::from_utf8_lossy(&body[..body.len().min(256)]).to_ascii_lowercase();
    let start = start.trim_start_matches(['\u{feff}', ' ', '\n', '\r', '\t']);
    start.starts_with("<!doctype html") || start.starts_with("<html")
}

#[cfg(test)]
mod tests {
    use http::header::CONTENT_TYPE;
    use http::{HeaderMap, HeaderValue, StatusCode};

    use super::*;
    use crate::outbound::BodyPlace;

    fn text(kind: &'static str, body: &[u8]) -> Result<String, String> {
        let mut headers = HeaderMap::new();
        if !kind.is_empty() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        }
        let url = Url::parse("https://site.example/").unwrap();
        let (status, body) = (StatusCode::OK, body.to_vec());
        let response = Response {
            status,
            headers,
            url,
            body,
            is_whole: true,
            requests: 1,
            place: BodyPlace::default(),
        };
        Text::of(&response).map(Text::raw)
    }

    #[test]
    fn characters_are_what_they_are_said_to_be() {
        let table: &[(&str, &[u8], &str)] = &[
            ("text/plain", "ä".as_bytes(), "ä"),
            ("text/plain", b"\xe4", "ä"),
            ("text/plain; charset=iso-8859-1", b"\xe4", "ä"),
            ("text/plain; Charset=\"windows-1251\"", b"\xff", "я"),
            ("text/html; charset=shift_jis", b"\x82\xa0", "あ"),
            ("text/html", b"<meta charset=windows-1251>\xff", "<meta charset=windows-1251>я"),
            ("text/html", b"<meta charset='utf-16'>\xc3\xa4", "<meta charset='utf-16'>ä"),
            ("text/plain", b"charset=windows-1251 \xc3\xbf", "charset=windows-1251 ÿ"),
            (
                "application/xml",
                b"<?xml encoding='windows-1251'?>\xff",
                "<?xml encoding='windows-1251'?>я",
            ),
            ("text/plain", b"\xff\xfea\0b\0", "ab"),
            ("text/html; charset=windows-1251", b"\xef\xbb\xbf\xc3\xa4", "ä"),
            ("application/json", b"\"\xff\"", "\"\u{fffd}\""),
            ("text/plain; charset=utf-16", b"a\0b\0", "ab"),
            ("text/plain; charset=nonsense", b"\xe4", "ä"),
        ];
        for (kind, body, expected) in table {
            assert_eq!(text(kind, body).as_deref(), Ok(*expected), "{kind} {body:?}");
        }
        for (kind, body) in [("text/plain", &b"a\0b"[..]), ("", b"\x7fELF\0")] {
            assert!(text(kind, body).is_err(), "{kind}");
        }
    }
}
