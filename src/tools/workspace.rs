//! Placeholder.
/// Placeholder.
#[derive(Debug, Clone)]
pub struct Workspace;
