//! What befalls processes, and what must be true of every run that was at that point: killed around the
//! effect of a call and around the answer of a model, all together, while they write; told to end;
//! suspended, and without a thread to spare, for longer than their lease.
//!
//! `TOOLLOOP_FAULT_ROUNDS=50 cargo test --test it process_faults -- --nocapture` repeats each fault that often, and says
//! how many runs it met.
//!
//! With other features: a run has one call, with an effect of each kind, of an HTTP tool or of a program.
//! Children, approvals, streams, cancels: `chaos`. Sessions, skills, client tools: `crashes`. Files in an object
//! store: `object_store`.

mod busy_threads;
mod drains;
mod effects;
mod interrupted_calls;
mod lost_answers;
mod site;
mod suspensions;
mod takeovers;
mod torn_writes;
