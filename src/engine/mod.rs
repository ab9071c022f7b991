//! The loop: what a run does, step by step.
//!
//! [`state`] decides and remembers, without I/O; [`run`] performs the steps and journals what
//! happened; [`plan`] is what a request and a definition agree on, [`demands`] whether the models
//! can keep it. Who may start a run, where it is
//! stored and streamed is not known here.

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
pub use run::room::Room;
pub use run::{Audience, Driven, Pieces, Run, RunControl, Stopped};
pub use state::{Disposal, FoldError, State, Step};
