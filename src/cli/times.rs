//! Times on the command line: as RFC 3339, or as a duration from now.

use chrono::{DateTime, TimeDelta, Utc};

use crate::config::parse_duration;

/// A time, or how long ago it was.
pub(super) fn past(text: &str) -> Result<DateTime<Utc>, String> {
    time_or(text, |ago| Utc::now().checked_sub_signed(ago))
        .ok_or_else(|| "write a time like 2026-01-31T08:00:00Z, or an age: 30m, 24h, 7d".to_owned())
}

/// A time, or how long it takes until then.
pub(super) fn future(text: &str) -> Result<DateTime<Utc>, String> {
    time_or(text, |ahead| Utc::now().checked_add_signed(ahead)).ok_or_else(|| {
        "write a time like 2030-01-31T08:00:00Z, or how long the key lasts: 12h, 90d".to_owned()
    })
}

fn time_or(
    text: &str,
    from_now: impl Fn(TimeDelta) -> Option<DateTime<Utc>>,
) -> Option<DateTime<Utc>> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Some(time.to_utc());
    }
    from_now(TimeDelta::from_std(parse_duration(text).ok()?).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_absolute_or_from_now() {
        type Read = fn(&str) -> Result<DateTime<Utc>, String>;
        for (read, days) in [(past as Read, -1), (future, 1)] {
            assert_eq!(
                read("2026-01-31T09:00:00+01:00").unwrap().to_rfc3339(),
                "2026-01-31T08:00:00+00:00"
            );
            let day = TimeDelta::days(days);
            let earliest = Utc::now() + day;
            let time = read("24h").unwrap();
            assert!((earliest..=Utc::now() + day).contains(&time), "{time}");
            for text in ["", "yesterday", "-1h", "99999999999d"] {
                assert!(read(text).is_err(), "{text}");
            }
        }
    }
}
