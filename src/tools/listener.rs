//! The listener for the progress of a call: the current followers of the run.
//!
//! Progress is not stored, and no model reads it. Its amount is bounded by the tool; the runtime
//! delivers it.

use std::fmt;
use std::sync::Arc;

use crate::event::ToolProgress;

/// Receives the progress of a call; the default ignores it.
#[derive(Clone, Default)]
pub struct Listener(Option<Arc<dyn Fn(ToolProgress) + Send + Sync>>);

impl Listener {
    pub fn new(tell: impl Fn(ToolProgress) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(tell)))
    }

    pub fn tell(&self, progress: ToolProgress) {
        if let Some(tell) = &self.0 {
            tell(progress);
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("listens", &self.0.is_some()).finish()
    }
}
