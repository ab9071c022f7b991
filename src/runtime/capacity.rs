//! The limits for the runs that this replica drives: slots, the places of tenants and keys, and memory.

use std::sync::Arc;

use super::places::Places;
use super::slots::RunSlots;
use crate::bounds::memory;
use crate::engine::Room;

/// Runs that are claimed at a time, at most.
const MAX_CLAIM: usize = 64;

/// The limits for runs.
pub(super) struct Capacity {
    pub(super) slots: RunSlots,
    pub(super) places: Arc<Places>,
    /// Memory for the conversations of all runs under way.
    pub(super) room: Arc<Room>,
}

impl Capacity {
    pub(super) fn new(slots: RunSlots, places: Arc<Places>) -> Self {
        Self { slots, places, room: Arc::default() }
    }

    /// How many runs may be claimed now with this number of free slots. While memory is scarce it is one, and only
    /// if no run is driven.
    pub(super) fn claimable(&self, slots: usize, driven: usize) -> usize {
        if memory::is_scarce() || self.room.is_full() {
            return slots.min(usize::from(driven == 0));
        }
        slots.min(MAX_CLAIM)
    }
}
