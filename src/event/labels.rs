//! How the labels of a run change.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Resolution, RunEvent};
use crate::run::{Label, Labels};

/// A run has read something that labels it, or an approval has taken a label from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LabelsChanged {
    /// All labels from here on.
    #[schema(value_type = Vec<Label>)]
    pub labels: Labels,
    /// What changed them.
    pub cause: LabelCause,
    /// The call whose result labels the run, or whose approval takes a label from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub call_id: Option<Uuid>,
    /// Its tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub tool: Option<String>,
}

/// What changes the labels of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, ToSchema)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum LabelCause {
    /// What it began with: inputs, the session, memories, or the run that started it.
    Opening,
    /// The result of a call.
    Result,
    /// An approval that takes labels from the run.
    Approval,
}

impl RunEvent {
    /// The labels after this event, of a run that had these before.
    pub fn labels_after(&self, labels: Labels) -> Labels {
        match self {
            Self::LabelsChanged(changed) => changed.labels,
            Self::ScanWarned(warned) if !warned.withheld => labels.and(Labels::UNTRUSTED),
            Self::ApprovalResolved(resolved) => match resolved.resolution {
                Resolution::Approved { clears, .. } => labels.without(clears),
                _ => labels,
            },
            _ => labels,
        }
    }
}
