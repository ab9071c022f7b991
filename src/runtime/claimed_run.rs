//! The types of a claimed run: what remains to be done before it is driven, and why it cannot continue.

use super::workspaces::OpenError;
use crate::engine::{FoldError, Stopped};
use crate::store::{ClaimedRun, Requeue, StoreError};

/// Why a claimed run cannot continue.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResumeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0}")]
    Unusable(String),
    /// This replica does not have the tools or skills that the run needs; another one may have them.
    #[error("{0}")]
    MissingRequirement(String),
    /// The run is left to other replicas.
    #[error("it is left to other replicas")]
    LeftToOthers(Requeue),
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// No slot is free; the run goes back to the queue.
    #[error("no slot is free for it")]
    NoFreeSlot,
    #[error(transparent)]
    Workspace(#[from] OpenError),
}

impl From<FoldError> for ResumeError {
    fn from(error: FoldError) -> Self {
        unreadable(&error.to_string())
    }
}

/// The journal is damaged, or of an unknown version.
pub(super) fn unreadable(why: &str) -> ResumeError {
    ResumeError::Unusable(format!("its journal cannot be read: {why}"))
}

pub(super) fn unusable(error: &dyn std::error::Error) -> ResumeError {
    ResumeError::Unusable(error.to_string())
}

pub(super) fn missing_requirement(error: &dyn std::error::Error) -> ResumeError {
    ResumeError::MissingRequirement(error.to_string())
}

/// What remains to be done before a resumed run is driven.
pub(super) struct Resumption {
    pub(super) claimed: ClaimedRun,
    /// Whether its replica died while it owned the run.
    pub(super) has_crashed: bool,
    /// Whether it must be driven alone, because it may cause crashes.
    pub(super) is_alone: bool,
}
