//! The memory limit for the conversations of all driven runs together.
//!
//! A run has its conversation in memory as long as it is driven. Once all conversations exceed their part of
//! the process's memory, a run whose conversation grows and is at least as large as the average gets no
//! further memory: it is given back, and continues when other runs have ended. So a few large conversations
//! cannot take the memory of many small ones.
//!
//! A run that waits for its child runs lends its share to all child runs. Otherwise parents could fill the
//! memory and wait forever for children that get none. Only child runs may use what is lent.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::bounds::memory;

/// The memory of all conversations, and its limit.
#[derive(Debug)]
pub struct ConversationMemory {
    bytes: usize,
    in_use: Mutex<MemoryUse>,
}

#[derive(Debug, Default)]
struct MemoryUse {
    bytes: usize,
    /// How many of these bytes are lent by runs that wait for their child runs.
    lent: usize,
    conversations: usize,
}

/// The share of one conversation.
#[derive(Debug)]
pub struct MemoryShare {
    memory: Arc<ConversationMemory>,
    bytes: usize,
    lent: usize,
    is_child: bool,
}

impl Default for ConversationMemory {
    fn default() -> Self {
        let bytes = memory::share_of_limit()
            .map_or(usize::MAX, |part| usize::try_from(part).unwrap_or(usize::MAX));
        Self { bytes, in_use: Mutex::default() }
    }
}

impl ConversationMemory {
    /// Whether the limit is reached.
    pub fn is_full(&self) -> bool {
        self.in_use.lock().bytes >= self.bytes
    }

    /// The share of an empty conversation. `is_child`: it is of a child run.
    pub fn share(self: &Arc<Self>, is_child: bool) -> MemoryShare {
        self.in_use.lock().conversations += 1;
        MemoryShare { memory: Arc::clone(self), bytes: 0, lent: 0, is_child }
    }
}

impl MemoryShare {
    /// Changes the share to the present size of the conversation. False, without a change, if that would exceed
    /// the limit.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        let mut in_use = self.memory.in_use.lock();
        let all = (in_use.bytes - self.bytes).saturating_add(bytes);
        let is_small = in_use.conversations == 1 || bytes < all / in_use.conversations;
        let free = if self.is_child { in_use.lent } else { 0 };
        if bytes > self.bytes && all.saturating_sub(free) > self.memory.bytes && !is_small {
            return false;
        }
        (in_use.bytes, self.bytes) = (all, bytes);
        true
    }

    /// Lends the share to child runs, until [`MemoryShare::take_back`].
    pub fn lend(&mut self) {
        let mut in_use = self.memory.in_use.lock();
        in_use.lent += self.bytes - self.lent;
        self.lent = self.bytes;
    }

    /// Takes the share back, even if that exceeds the limit.
    pub fn take_back(&mut self) {
        self.memory.in_use.lock().lent -= self.lent;
        self.lent = 0;
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        let mut in_use = self.memory.in_use.lock();
        in_use.bytes -= self.bytes;
        in_use.lent -= self.lent;
        in_use.conversations -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bytes: usize) -> Arc<ConversationMemory> {
        Arc::new(ConversationMemory { bytes, in_use: Mutex::default() })
    }

    #[test]
    fn conversations_above_the_average_may_not_grow_in_full_memory() {
        let memory = memory(100);
        let [mut large, mut small, mut other] = [false; 3].map(|is_child| memory.share(is_child));
        assert!(large.resize(70) && small.resize(10) && other.resize(19));
        assert!(!memory.is_full());
        assert!(!large.resize(72), "over 100, and more than a third");
        assert!(small.resize(30), "smaller than the average: it goes on");
        assert!(memory.is_full() && !large.resize(71) && large.resize(69));
        drop(large);
        assert!(!memory.is_full() && other.resize(60));
    }

    #[test]
    fn a_single_conversation_has_no_limit() {
        let mut alone = memory(100).share(false);
        assert!(alone.resize(90) && alone.resize(1_000));
    }

    #[test]
    fn equal_conversations_are_admitted_while_memory_is_free() {
        let memory = memory(100);
        let mut equal: Vec<MemoryShare> = Vec::new();
        let come_in = (0..20).filter(|_| {
            let mut share = memory.share(false);
            let has_room = share.resize(10);
            equal.extend(has_room.then_some(share));
            has_room
        });
        assert_eq!(come_in.count(), 10);
        equal.pop();
        assert!(memory.share(false).resize(10));
    }

    #[test]
    fn the_first_of_equal_conversations_that_grows_is_refused() {
        let memory = memory(100);
        let mut equal: Vec<MemoryShare> = (0..10).map(|_| memory.share(false)).collect();
        assert!(equal.iter_mut().all(|share| share.resize(10)));
        assert!(!equal[0].resize(12));
        equal.remove(0);
        assert!(equal[0].resize(12));
    }

    #[test]
    fn children_continue_while_their_parents_fill_the_memory() {
        let memory = memory(100);
        let mut parents: Vec<MemoryShare> = (0..10).map(|_| memory.share(false)).collect();
        assert!(parents.iter_mut().all(|parent| parent.resize(10)));
        assert!(!memory.share(true).resize(20), "nothing is lent yet");
        parents[0].lend();
        parents[1].lend();
        let (mut child, mut second) = (memory.share(true), memory.share(true));
        assert!(child.resize(15) && !second.resize(15), "as much as their parents lend");
        assert!(!memory.share(false).resize(15) && memory.is_full(), "it is for children alone");
        drop(child);
        assert!(second.resize(15));
        parents[0].take_back();
        parents.truncate(1);
        assert!(parents[0].resize(80) && !memory.is_full() && second.resize(5));
    }
}
