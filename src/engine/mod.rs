//! The loop: what a run does, step by step.
//!
//! [`state`] decides and remembers, without I/O; [`run`] performs the steps and journals what
//! happened; [`plan`] combines request and definition; [`requirements`] checks that the models can
//! meet it. Authorization, storage and streaming are not known here.

pub mod answer_call;
pub mod budget;
pub mod client_tools;
pub mod context;
pub mod handlers;
pub mod journal;
pub mod output;
pub mod phrases;
pub mod plan;
pub mod reflection;
pub mod requirements;
pub mod run;
pub mod state;
pub mod validation;

pub use crate::tools::lease::Lease;
pub use handlers::Handlers;
pub use journal::{AppendFailed, Entry, Journal};
pub use plan::{Contract, Plan, PlanError, Rules, Window};
pub use run::conversation_memory::ConversationMemory;
pub use run::{Audience, Driven, Pieces, Run, RunControl, Stopped};
pub use state::{Disposal, FoldError, State, Step};
