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
pub struct Room {
    bytes: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    /// How many of these bytes are lent by runs that wait for their child runs.
    lent: usize,
    conversations: usize,
}

/// The share of one conversation.
#[derive(Debug)]
pub struct Share {
    room: Arc<Room>,
    bytes: usize,
    lent: usize,
    is_child: bool,
}

impl Default for Room {
    fn default() -> Self {
        let bytes =
            memory::part().map_or(usize::MAX, |part| usize::try_from(part).unwrap_or(usize::MAX));
        Self { bytes, taken: Mutex::default() }
    }
}

impl Room {
    /// Whether the limit is reached.
    pub fn is_full(&self) -> bool {
        self.taken.lock().bytes >= self.bytes
    }

    /// The share of an empty conversation. `is_child`: it is of a child run.
    pub fn share(self: &Arc<Self>, is_child: bool) -> Share {
        self.taken.lock().conversations += 1;
        Share { room: Arc::clone(self), bytes: 0, lent: 0, is_child }
    }
}

impl Share {
    /// Changes the share to the present size of the conversation. False, without a change, if that would exceed
    /// the limit.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        let mut taken = self.room.taken.lock();
        let all = (taken.bytes - self.bytes).saturating_add(bytes);
        let is_small = taken.conversations == 1 || bytes < all / taken.conversations;
        let free = if self.is_child { taken.lent } else { 0 };
        if bytes > self.bytes && all.saturating_sub(free) > self.room.bytes && !is_small {
            return false;
        }
        (taken.bytes, self.bytes) = (all, bytes);
        true
    }

    /// Lends the share to child runs, until [`Share::take_back`].
    pub fn lend(&mut self) {
        let mut taken = self.room.taken.lock();
        taken.lent += self.bytes - self.lent;
        self.lent = self.bytes;
    }

    /// Takes the share back, even if that exceeds the limit.
    pub fn take_back(&mut self) {
        self.room.taken.lock().lent -= self.lent;
        self.lent = 0;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.room.taken.lock();
        taken.bytes -= self.bytes;
        taken.lent -= self.lent;
        taken.conversations -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(bytes: usize) -> Arc<Room> {
        Arc::new(Room { bytes, taken: Mutex::default() })
    }

    #[test]
    fn conversations_above_the_average_may_not_grow_in_full_memory() {
        let room = room(100);
        let [mut large, mut small, mut other] = [false; 3].map(|is_child| room.share(is_child));
        assert!(large.resize(70) && small.resize(10) && other.resize(19));
        assert!(!room.is_full());
        assert!(!large.resize(72), "over 100, and more than a third");
        assert!(small.resize(30), "smaller than the average: it goes on");
        assert!(room.is_full() && !large.resize(71) && large.resize(69));
        drop(large);
        assert!(!room.is_full() && other.resize(60));
    }

    #[test]
    fn a_conversation_that_is_alone_goes_on() {
        let mut alone = room(100).share(false);
        assert!(alone.resize(90) && alone.resize(1_000));
    }

    #[test]
    fn equal_ones_come_in_as_far_as_there_is_room() {
        let room = room(100);
        let mut equal: Vec<Share> = Vec::new();
        let come_in = (0..20).filter(|_| {
            let mut share = room.share(false);
            let has_room = share.resize(10);
            equal.extend(has_room.then_some(share));
            has_room
        });
        assert_eq!(come_in.count(), 10);
        equal.pop();
        assert!(room.share(false).resize(10));
    }

    #[test]
    fn of_equal_ones_the_first_that_grows_gives_way() {
        let room = room(100);
        let mut equal: Vec<Share> = (0..10).map(|_| room.share(false)).collect();
        assert!(equal.iter_mut().all(|share| share.resize(10)));
        assert!(!equal[0].resize(12));
        equal.remove(0);
        assert!(equal[0].resize(12));
    }

    #[test]
    fn children_go_on_while_their_parents_fill_the_room() {
        let room = room(100);
        let mut parents: Vec<Share> = (0..10).map(|_| room.share(false)).collect();
        assert!(parents.iter_mut().all(|parent| parent.resize(10)));
        assert!(!room.share(true).resize(20), "nothing is lent yet");
        parents[0].lend();
        parents[1].lend();
        let (mut child, mut second) = (room.share(true), room.share(true));
        assert!(child.resize(15) && !second.resize(15), "as much as their parents lend");
        assert!(!room.share(false).resize(15) && room.is_full(), "it is for children alone");
        drop(child);
        assert!(second.resize(15));
        parents[0].take_back();
        parents.truncate(1);
        assert!(parents[0].resize(80) && !room.is_full() && second.resize(5));
    }
}
