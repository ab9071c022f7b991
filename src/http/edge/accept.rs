//! Content negotiation by `Accept` (RFC 9110, section 12.5.1): JSON or an event stream.
//!
//! Only routes that offer both read the header. All others answer JSON and ignore it.

use axum::extract::FromRequestParts;
use axum::http::header::ACCEPT;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};

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
            Problem::new(
                Code::NotAcceptable,
                "Accept must allow application/json or text/event-stream.",
            )
        };
        preferred(&parts.headers).ok_or_else(refused)
    }
}

/// The media type with the higher quality value. An event stream must be named, or all text. On a tie
/// it wins over a wildcard; where JSON is named as well, the first wins: clients that are generated from
/// the document name all that an operation answers, and read the first.
pub(super) fn preferred(headers: &HeaderMap) -> Option<MediaType> {
    let given = headers.get_all(ACCEPT);
    if given.iter().all(HeaderValue::is_empty) {
        return Some(MediaType::Json);
    }
    let (mut json, mut stream) = (Quality::default(), Quality::default());
    let values = given.iter().filter_map(|value| value.to_str().ok());
    let ranges = values.flat_map(|value| value.split(','));
    for (place, range) in ranges.enumerate() {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let weight = parts.find_map(|p| p.strip_prefix("q=").or(p.strip_prefix("Q=")));
        let weight = weight.map_or(1.0, |q| q.parse::<f32>().unwrap_or(0.0));
        match kind.as_str() {
            "application/json" => json.consider(3, weight, place),
            "application/*" => json.consider(2, weight, place),
            "*/*" => json.consider(1, weight, place),
            "text/event-stream" => stream.consider(3, weight, place),
            "text/*" => stream.consider(2, weight, place),
            _ => {}
        }
    }
    let first = json.specificity < stream.specificity || stream.place < json.place;
    match (stream.weight > 0.0, json.weight > 0.0) {
        (true, _) if stream.weight > json.weight || (stream.weight >= json.weight && first) => {
            Some(MediaType::EventStream)
        }
        (_, true) => Some(MediaType::Json),
        _ => None,
    }
}

/// The quality value of the most specific range that matches a media type.
#[derive(Default)]
struct Quality {
    specificity: u8,
    weight: f32,
    place: usize,
}

impl Quality {
    fn consider(&mut self, specificity: u8, weight: f32, place: usize) {
        if specificity > self.specificity {
            *self = Self { specificity, weight, place };
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
            (&["text/event-stream, application/json"], Some(MediaType::EventStream)),
            (&["application/*, text/event-stream"], Some(MediaType::EventStream)),
            (&["application/json, text/event-stream"], Some(MediaType::Json)),
            (&["application/json", "text/event-stream"], Some(MediaType::Json)),
            (&["application/json;q=0.5, text/event-stream"], Some(MediaType::EventStream)),
            (&["text/event-stream;q=0.5, application/json"], Some(MediaType::Json)),
            (&["text/event-stream;q=0, */*"], Some(MediaType::Json)),
            (&["application/json;q=0, */*"], None),
            (&["text/html"], None),
            (&["text/*"], Some(MediaType::EventStream)),
            (&["text/*, application/json"], Some(MediaType::EventStream)),
            (&["application/json, text/*"], Some(MediaType::Json)),
            (&["text/*;q=0.5, text/event-stream;q=0, */*"], Some(MediaType::Json)),
            (&[""], Some(MediaType::Json)),
            (&["", "text/event-stream"], Some(MediaType::EventStream)),
            (&["", "text/html"], None),
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
