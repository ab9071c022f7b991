//! All integration tests, one binary: each module tells the story of one room or one promise.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(unreachable_pub, reason = "nothing of a test binary is reachable")]

mod api;
mod approvals;
mod bounds;
mod calling;
mod chromium;
mod client_tools;
mod clients;
mod commands;
mod console;
mod context_window;
mod contracts;
mod crashes;
mod delegation;
mod dialects;
mod dry_run;
mod faults;
mod full_disk;
mod fuzzing;
mod hardening;
mod house;
mod installing;
mod machine;
mod matrix;
mod memory;
mod mock_anthropic;
mod mock_model;
mod mock_ollama;
mod mock_server;
mod openai_histories;
mod openai_responses;
mod openai_streams;
mod places;
mod postgres_cluster;
mod providers;
mod rate_limits;
mod react;
mod reclaims;
mod retention;
mod reviews;
mod rivals;
mod routing;
mod samples;
mod service;
mod sessions;
mod shared_budgets;
mod skills;
mod stats;
mod store;
mod stories;
mod streaming;
mod telemetry;
