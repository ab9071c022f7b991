//! Drivers: how a loop's step becomes a model request, and a completion an assistant message.
//!
//! Pure translation. A driver calls nobody, decides nothing about the run and keeps no state, so
//! replaying a journal through it gives the same messages, call ids included.

mod native;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::message::AssistantMessage;
use crate::providers::{Completion, ModelRequest, ToolChoice};

pub use native::Native;

/// The place of a model response within everything; call ids are made from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The run.
    pub run_id: Uuid,
    /// 1-based.
    pub attempt: u32,
    /// 1-based, within the attempt.
    pub iteration: u32,
}

/// One way of letting a model act.
pub trait Driver: Send + Sync {
    /// Completes a request whose conversation, offers and sampling are set.
    fn request<'a>(&self, base: ModelRequest<'a>, choice: ToolChoice) -> ModelRequest<'a>;

    /// What the model said, in our words. `output_tool` is our name of it, where there is one.
    fn parse(
        &self,
        completion: Completion,
        base: &ModelRequest<'_>,
        place: Place,
        output_tool: Option<&str>,
    ) -> AssistantMessage;
}

/// Our id of a call: the same for the same place, so that recovery makes no new ones.
fn call_id(place: Place, index: usize) -> Uuid {
    let mut hash = Sha256::new();
    hash.update(place.run_id.as_bytes());
    hash.update(place.attempt.to_be_bytes());
    hash.update(place.iteration.to_be_bytes());
    hash.update((index as u64).to_be_bytes());
    let digest = hash.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}
