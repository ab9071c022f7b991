//! What a run that was claimed brings along, and why it cannot go on.

use tokio::sync::OwnedSemaphorePermit;

use crate::engine::{FoldError, Stopped};
use crate::store::{ClaimedRun, StoreError};

/// A claimed run's place among those that are driven at once.
pub(super) enum Place {
    /// One of the workers.
    Worker(OwnedSemaphorePermit),
    /// Its parent's.
    Parent,
    /// None, unless a worker is free: the run is to be ended or parked, or given back.
    Decision,
}

/// Why a claimed run cannot go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResumeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0}")]
    Unusable(String),
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl From<FoldError> for ResumeError {
    fn from(error: FoldError) -> Self {
        unreadable(&error)
    }
}

pub(super) fn unreadable(error: &dyn std::error::Error) -> ResumeError {
    ResumeError::Unusable(format!("its journal cannot be read: {error}"))
}

pub(super) fn unusable(error: &dyn std::error::Error) -> ResumeError {
    ResumeError::Unusable(error.to_string())
}

/// What a run that goes on has left to do before it is driven.
pub(super) struct Resumption {
    pub(super) claimed: ClaimedRun,
    /// Whether its replica died while it owned the run.
    pub(super) has_crashed: bool,
    pub(super) is_alone: bool,
}
