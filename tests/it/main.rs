//! All integration tests, one binary: each module tells the story of one room or one promise.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]

mod mock_model;
mod providers;
mod samples;
