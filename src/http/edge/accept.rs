//! Content negotiation by `Accept` (RFC 9110, section 12.5.1): JSON or an event stream.
//!
//! Only routes that offer both read the header. All others answer JSON and ignore it.

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::ACCEPT;
use axum::http::request::Parts;

use super::problem::{Code, Problem};
use crate::http::state::App;

/// The negotiated media type of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MediaType {
    Json,
    EventStream,
}

impl FromRequestParts<App> for MediaType {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let refused = || {
            Problem::new(Code::NotAcceptable, "This answers application/json or text/event-stream.")
        };
        preferred(&parts.headers).ok_or_else(refused)
    }
}

/// The media type with the higher quality value. An event stream must be named explicitly; on a tie
/// it wins, since a client that names it can read it.
pub(super) fn preferred(headers: &HeaderMap) -> Option<MediaType> {
    let mut given = headers.get_all(ACCEPT).iter().peekable();
    if given.peek().is_none() {
        return Some(MediaType::Json);
    }
    let (mut json, mut stream) = (Quality::default(), Quality::default());
    for range in given.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let weight = parts.find_map(|p| p.strip_prefix("q=").or(p.strip_prefix("Q=")));
        let weight = weight.map_or(1.0, |q| q.parse::<f32>().unwrap_or(0.0));
        match kind.as_str() {
            "application/json" => json.note(3, weight),
            "application/*" => json.note(2, weight),
            "*/*" => json.note(1, weight),
            "text/event-stream" => stream.note(3, weight),
            _ => {}
        }
    }
    match (stream.weight > 0.0, json.weight > 0.0) {
        (true, _) if stream.weight >= json.weight => Some(MediaType::EventStream),
        (_, true) => Some(MediaType::Json),
        _ => None,
    }
}

/// The quality value of the most specific range that matches a media type.
#[derive(Default)]
struct Quality {
    specificity: u8,
    weight: f32,
}

impl Quality {
    fn note(&mut self, specificity: u8, weight: f32) {
        if specificity > self.specificity {
            *self = Self { specificity, weight };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_accept_header_selects_the_media_type() {
        let cases: &[(&[&str], Option<MediaType>)] = &[
            (&[], Some(MediaType::Json)),
            (&["*/*"], Some(MediaType::Json)),
            (&["application/json"], Some(MediaType::Json)),
            (&["APPLICATION/*"], Some(MediaType::Json)),
            (&["text/html, application/json;q=0.1"], Some(MediaType::Json)),
            (&["text/event-stream"], Some(MediaType::EventStream)),
            (&["Text/Event-Stream; charset=utf-8"], Some(MediaType::EventStream)),
            (&["text/event-stream, */*"], Some(MediaType::EventStream)),
            (&["application/json", "text/event-stream"], Some(MediaType::EventStream)),
            (&["text/event-stream;q=0.5, application/json"], Some(MediaType::Json)),
            (&["text/event-stream;q=0, */*"], Some(MediaType::Json)),
            (&["application/json;q=0, */*"], None),
            (&["text/html"], None),
            (&["text/*"], None),
            (&[""], None),
        ];
        for (accept, expected) in cases {
            let mut headers = HeaderMap::new();
            for value in *accept {
                headers.append(ACCEPT, value.parse().unwrap());
            }
            assert_eq!(preferred(&headers), *expected, "{accept:?}");
        }
    }
}
