//! Where answers are counted and metrics come from; `app.rs` decides what is behind it.

use axum::http::StatusCode;

/// Told of an answer: the route's template, the method, the status.
type OnAnswer = Box<dyn Fn(&str, &'static str, StatusCode) + Send + Sync>;
/// Writes all metrics as text, given how many runs are queued, where that is known, and how many
/// are driven here.
type Scrape = Box<dyn Fn(Option<u64>, usize) -> String + Send + Sync>;

/// Where answers are counted and metrics come from.
pub struct Meters {
    /// Counts answers.
    pub on_answer: OnAnswer,
    /// Writes metrics.
    pub scrape: Scrape,
}
