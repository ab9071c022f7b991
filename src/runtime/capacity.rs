//! The limits for the runs that this replica drives: slots, the reservations of tenants and keys, and memory.

use std::sync::Arc;

use super::reservations::Reservations;
use super::slots::RunSlots;
use crate::bounds::memory;
use crate::engine::ConversationMemory;

/// Runs that are claimed at a time, at most.
const MAX_CLAIM: usize = 64;

/// The limits for runs.
pub(super) struct Capacity {
    pub(super) slots: RunSlots,
    pub(super) reservations: Arc<Reservations>,
    /// Memory for the conversations of all runs under way.
    pub(super) conversation_memory: Arc<ConversationMemory>,
}

impl Capacity {
    pub(super) fn new(slots: RunSlots, reservations: Arc<Reservations>) -> Self {
        Self { slots, reservations, conversation_memory: Arc::default() }
    }

    /// How many runs may be claimed now with this number of free slots. While memory is scarce it is one, and only
    /// if no run is driven.
    pub(super) fn claimable(&self, slots: usize, driven: usize) -> usize {
        if memory::is_scarce() || self.conversation_memory.is_full() {
            return slots.min(usize::from(driven == 0));
        }
        slots.min(MAX_CLAIM)
    }
}
