//! What one evaluation may take: turns and time of its loops, and bytes of what it keeps.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cel::ExecutionError;

/// Iterations of all loops of one evaluation.
const MAX_TURNS: u64 = 200_000;
/// Time that the loops of one evaluation may take.
const MAX_TIME: Duration = Duration::from_secs(2);
/// Bytes of what goes into lists, maps and sums of one evaluation, loops included.
const MAX_KEPT: usize = 16 * 1024 * 1024;
/// Bytes that a value takes where it is kept, beside its text.
const NODE: usize = 32;
/// The function that every iteration of a loop calls. No source can call it: it is no identifier.
pub(super) const TURN: &str = "@turn";
/// The function that checks the size of a value before it becomes part of a larger one.
pub(super) const KEPT: &str = "@kept";

/// Counts and times the turns of one evaluation's loops, and counts what it keeps.
pub(super) struct Meter {
    turns: AtomicU64,
    until: Instant,
    kept: AtomicUsize,
}

impl Meter {
    /// A meter for an evaluation that begins now.
    pub(super) fn new() -> Self {
        let until = Instant::now() + MAX_TIME;
        Self { turns: AtomicU64::new(0), until, kept: AtomicUsize::new(0) }
    }

    pub(super) fn turn(&self) -> Result<cel::Value, ExecutionError> {
        let turns = self.turns.fetch_add(1, Ordering::Relaxed);
        if turns >= MAX_TURNS || Instant::now() >= self.until {
            self.turns.store(MAX_TURNS + 1, Ordering::Relaxed);
            return Err(ExecutionError::function_error(TURN, "too many turns"));
        }
        Ok(cel::Value::Bool(true))
    }

    pub(super) fn kept(&self, value: cel::Value) -> Result<cel::Value, ExecutionError> {
        let so_far = self.kept.load(Ordering::Relaxed);
        let bytes = size_of(&value, MAX_KEPT.saturating_sub(so_far));
        self.kept.store(so_far.saturating_add(bytes), Ordering::Relaxed);
        if so_far.saturating_add(bytes) > MAX_KEPT {
            return Err(ExecutionError::function_error(KEPT, "too large"));
        }
        Ok(value)
    }

    /// Whether more was kept than may be.
    pub(super) fn is_full(&self) -> bool {
        self.kept.load(Ordering::Relaxed) > MAX_KEPT
    }

    /// Whether its loops took too long.
    pub(super) fn is_used_up(&self) -> bool {
        self.turns.load(Ordering::Relaxed) > MAX_TURNS
    }
}

/// The approximate size of a value in bytes. Counting stops once it exceeds `most`.
fn size_of(value: &cel::Value, most: usize) -> usize {
    let mut sum = NODE;
    match value {
        cel::Value::String(text) => sum += text.len(),
        cel::Value::Bytes(bytes) => sum += bytes.len(),
        cel::Value::List(items) => {
            for item in items.iter() {
                if sum > most {
                    break;
                }
                sum += size_of(item, most - sum);
            }
        }
        cel::Value::Map(entries) => {
            for (key, item) in entries.map.iter() {
                if sum > most {
                    break;
                }
                let key = if let cel::objects::Key::String(key) = key { key.len() } else { 0 };
                sum += NODE + key + size_of(item, most - sum);
            }
        }
        _ => {}
    }
    sum
}
