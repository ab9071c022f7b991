//! Numbers that follow from a seed.

use std::time::Duration;

use parking_lot::Mutex;

/// A sequence of numbers (SplitMix64).
#[derive(Debug)]
pub(super) struct Drawn(Mutex<u64>);

impl Drawn {
    pub(super) fn from(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }

    /// Another sequence.
    pub(super) fn fork(&self) -> Self {
        Self::from(self.next())
    }

    fn next(&self) -> u64 {
        let mut state = self.0.lock();
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Less than `end`.
    pub(super) fn below(&self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(super) fn percent(&self, chance: u64) -> bool {
        self.below(100) < chance
    }

    pub(super) fn millis(&self, least: u64, end: u64) -> Duration {
        Duration::from_millis(least + self.below(end - least))
    }

    pub(super) fn index(&self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }
}
