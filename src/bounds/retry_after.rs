//! How long a server asks to be left alone: the header `Retry-After`.

use std::time::Duration;

use chrono::{DateTime, Utc};
use http::HeaderMap;

/// The delay that a server requests: `retry-after-ms`, else `Retry-After` in seconds or as an HTTP
/// date (RFC 9110, 5.6.7). Invalid or negative values and dates in the past are ignored; a number that
/// is too large counts as the longest delay.
pub fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let duration = |seconds: f64| {
        let wait = Duration::try_from_secs_f64(seconds).ok();
        let wait = wait.or_else(|| (seconds > 0.0).then_some(Duration::MAX));
        wait.filter(|wait| !wait.is_zero())
    };
    if let Some(wait) = text("retry-after-ms")
        .and_then(|ms| ms.parse::<f64>().ok())
        .and_then(|ms| duration(ms / 1e3))
    {
        return Some(wait);
    }
    let value = text("retry-after")?;
    match value.parse::<f64>() {
        Ok(seconds) => duration(seconds),
        Err(_) => (DateTime::<Utc>::from(httpdate::parse_http_date(value).ok()?) - now)
            .to_std()
            .ok()
            .filter(|w| !w.is_zero()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_read_in_every_form() {
        let now = "2026-11-21T12:00:00Z".parse().unwrap();
        let table: &[(&str, &str, Option<f64>)] = &[
            ("retry-after", "2", Some(2.0)),
            ("retry-after", " 1.5 ", Some(1.5)),
            ("retry-after-ms", "250", Some(0.25)),
            ("retry-after", "Sat, 21 Nov 2026 12:01:30 GMT", Some(90.0)),
            ("retry-after", "Saturday, 21-Nov-26 12:01:30 GMT", Some(90.0)),
            ("retry-after", "Sat Nov 21 12:01:30 2026", Some(90.0)),
            ("retry-after", "Sat, 21 Nov 2026 11:00:00 GMT", None),
            ("retry-after", "-3", None),
            ("retry-after", "0", None),
            ("retry-after", "soon", None),
            ("retry-after", "NaN", None),
            ("retry-after", "", None),
        ];
        for (name, value, seconds) in table {
            let headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
            let expected = seconds.map(Duration::from_secs_f64);
            assert_eq!(retry_after(&headers, now), expected, "{name}: {value}");
        }
        for longest in ["99999999999999999999", "1e999"] {
            let header = ("retry-after".parse().unwrap(), longest.parse().unwrap());
            assert_eq!(retry_after(&HeaderMap::from_iter([header]), now), Some(Duration::MAX));
        }
        let both = [("retry-after", "9"), ("retry-after-ms", "100")];
        let both = both.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        assert_eq!(retry_after(&HeaderMap::from_iter(both), now), Some(Duration::from_millis(100)));
    }
}
