//! Random numbers for pauses, so that waiting tasks do not all retry at once.
//!
//! The caller decides how long a pause is, and how much of it is random.

use std::time::Duration;

/// The pause, shortened by a random part of it, at most `part`.
pub fn shortened(pause: Duration, part: f64) -> Duration {
    pause.mul_f64(1.0 - part * fraction())
}

/// A random number from 0 to 1; 1 if the system provides none.
pub fn fraction() -> f64 {
    f64::from(getrandom::u32().unwrap_or(u32::MAX)) / f64::from(u32::MAX)
}
