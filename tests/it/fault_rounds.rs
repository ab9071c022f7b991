//! How often stories inject their faults.

/// So many times, or as often as `TOOLLOOP_FAULT_ROUNDS` says.
pub fn rounds(normal: usize) -> usize {
    let wanted = std::env::var("TOOLLOOP_FAULT_ROUNDS").ok();
    wanted.and_then(|rounds| rounds.parse().ok()).unwrap_or(normal)
}
