//! The types of a claimed run: what is left to do before it is driven, and why it cannot continue.

use super::workspaces::OpenError;
use crate::engine::{FoldError, Stopped};
use crate::store::{ClaimedRun, GivenBack, StoreError};

/// Why a claimed run cannot continue.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResumeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0}")]
    Unusable(String),
    /// This replica cannot prepare it; another one may have the tools or skills that it needs.
    #[error("{0}")]
    Lacking(String),
    /// It is left to other replicas.
    #[error("it is left to other replicas")]
    Left(GivenBack),
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// It goes back to the queue.
    #[error("there is no place for it")]
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

pub(super) fn lacking(error: &dyn std::error::Error) -> ResumeError {
    ResumeError::Lacking(error.to_string())
}

/// What is left to do before a resumed run is driven.
pub(super) struct Resumption {
    pub(super) claimed: ClaimedRun,
    /// Whether its replica died while it owned the run.
    pub(super) has_crashed: bool,
    pub(super) is_alone: bool,
}
