//! Counts repeated occurrences by kind, for a bounded number of kinds. Each kind is reported at its
//! first occurrence and then at most once a minute.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// The pause between two reports of the same kind.
const PAUSE: Duration = Duration::from_mins(1);
/// Kinds that are distinguished in a minute; the rest counts as one.
const MAX_KINDS: usize = 256;

/// Unreported occurrences by kind.
#[derive(Debug)]
pub struct Tally<T>(HashMap<T, Count>);

#[derive(Debug, Default)]
struct Count {
    unreported: u64,
    reported_at: Option<Instant>,
}

impl<T> Default for Tally<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Eq + Hash + Clone> Tally<T> {
    /// Counts an occurrence of a kind. Once there are too many kinds, `rest` maps it to a common one.
    pub fn note(&mut self, what: T, rest: impl FnOnce(T) -> T) {
        let is_further = self.0.len() >= MAX_KINDS && !self.0.contains_key(&what);
        let what = if is_further { rest(what) } else { what };
        self.0.entry(what).or_default().unreported += 1;
    }

    /// The kinds that are due for a report, each with its count; all kinds if `is_last`.
    pub fn take(&mut self, now: Instant, is_last: bool) -> Vec<(T, u64)> {
        let is_due = |count: &Count| {
            is_last || count.reported_at.is_none_or(|at| now.duration_since(at) >= PAUSE)
        };
        let mut due = Vec::new();
        self.0.retain(|what, count| {
            if !is_due(count) {
                return true;
            }
            if count.unreported == 0 {
                return false;
            }
            due.push((what.clone(), std::mem::take(&mut count.unreported)));
            count.reported_at = Some(now);
            true
        });
        due
    }

    /// Returns a count that could not be reported. It is due again a minute after it was taken.
    pub fn give_back(&mut self, what: T, count: u64) {
        self.0.entry(what).or_default().unreported += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_reported_at_first_and_then_once_a_minute() {
        let (start, mut tally) = (Instant::now(), Tally::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        let note = |tally: &mut Tally<u32>| tally.note(1, |_| 0);
        note(&mut tally);
        assert_eq!(tally.take(at(0), false), [(1, 1)]);
        (0..7).for_each(|_| note(&mut tally));
        assert_eq!(tally.take(at(59), false), []);
        assert_eq!(tally.take(at(60), false), [(1, 7)]);
        assert_eq!(tally.take(at(119), false), []);
        note(&mut tally);
        assert_eq!(tally.take(at(61), true), [(1, 1)], "nothing is lost at the end");
        assert_eq!(tally.take(at(121), false), []);
        assert!(tally.0.is_empty(), "what is quiet for a minute is forgotten");
    }

    #[test]
    fn a_failed_report_is_repeated_later() {
        let (start, mut tally) = (Instant::now(), Tally::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        tally.note(1, |_| 0);
        assert_eq!(tally.take(at(0), false), [(1, 1)]);
        tally.note(1, |_| 0);
        tally.give_back(1, 1);
        assert_eq!(tally.take(at(59), false), []);
        assert_eq!(tally.take(at(60), false), [(1, 2)]);
    }

    #[test]
    fn the_rest_counts_as_one() {
        let (now, mut tally) = (Instant::now(), Tally::default());
        (1..=10_000_u32).for_each(|what| tally.note(what, |_| 0));
        let taken = tally.take(now, false);
        assert_eq!(taken.len(), MAX_KINDS + 1);
        assert_eq!(taken.iter().map(|(_, count)| count).sum::<u64>(), 10_000);
    }
}
