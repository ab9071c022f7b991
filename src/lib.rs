//! toolloop runs LLM agents in governed tool-use loops and keeps a durable record of every run.
//!
//! Read `ARCHITECTURE.md` first. Modules are declared in reading order: shared types first, then the
//! modules that use them, and last [`app`], which wires them together.

pub mod clock;
pub mod event;
pub mod jitter;
pub mod message;
pub mod model;
pub mod run;
pub mod tls;

pub mod bounds;
pub mod config;
pub mod fairness;
pub mod objects;
pub mod outbound;

pub mod agents;
pub mod governance;
pub mod providers;
pub mod store;

pub mod drivers;
pub mod tools;

pub mod engine;

pub mod runtime;

pub mod http;
pub mod telemetry;

pub mod app;
pub mod cli;
