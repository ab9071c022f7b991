//! Random numbers for pauses, so that those who wait for the same do not all come at once.
//!
//! How long a pause is, and how much of it is random, is decided where it is made.

use std::time::Duration;

/// A pause that is up to this part of it shorter.
pub fn shortened(pause: Duration, part: f64) -> Duration {
    pause.mul_f64(1.0 - part * fraction())
}

/// A random number from 0 to 1; 1 where the system gives none.
pub fn fraction() -> f64 {
    f64::from(getrandom::u32().unwrap_or(u32::MAX)) / f64::from(u32::MAX)
}
