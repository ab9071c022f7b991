//! Room for conversations: the memory that those of all runs under way take together.
//!
//! A run has its conversation in memory as long as it is driven. Once all together take more than their
//! part of what the process may have, a run whose conversation grows and is not smaller than the average
//! has no room to go on: it is given back, and goes on when others have ended. So few runs that say much
//! cannot take the memory of many that say little.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::bounds::memory;

/// What all conversations have, and may have.
#[derive(Debug)]
pub struct Room {
    bytes: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    conversations: usize,
}

/// The room of one conversation.
#[derive(Debug)]
pub struct Share {
    room: Arc<Room>,
    bytes: usize,
}

impl Default for Room {
    fn default() -> Self {
        let bytes =
            memory::part().map_or(usize::MAX, |part| usize::try_from(part).unwrap_or(usize::MAX));
        Self { bytes, taken: Mutex::default() }
    }
}

impl Room {
    /// Whether conversations take all of it.
    pub fn is_full(&self) -> bool {
        self.taken.lock().bytes >= self.bytes
    }

    /// For a conversation of which nothing is said yet.
    pub fn share(self: &Arc<Self>) -> Share {
        self.taken.lock().conversations += 1;
        Share { room: Arc::clone(self), bytes: 0 }
    }
}

impl Share {
    /// Makes it as large as the conversation is now. False where there is no room for it: it stays as it
    /// was then.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        let mut taken = self.room.taken.lock();
        let all = (taken.bytes - self.bytes).saturating_add(bytes);
        let is_small = taken.conversations == 1 || bytes < all / taken.conversations;
        if bytes > self.bytes && all > self.room.bytes && !is_small {
            return false;
        }
        (taken.bytes, self.bytes) = (all, bytes);
        true
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.room.taken.lock();
        taken.bytes -= self.bytes;
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
    fn what_is_larger_than_the_average_gives_way_where_there_is_no_room() {
        let room = room(100);
        let (mut large, mut small, mut other) = (room.share(), room.share(), room.share());
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
        let mut alone = room(100).share();
        assert!(alone.resize(90) && alone.resize(1_000));
    }

    #[test]
    fn equal_ones_come_in_as_far_as_there_is_room() {
        let room = room(100);
        let mut equal: Vec<Share> = Vec::new();
        let come_in = (0..20).filter(|_| {
            let mut share = room.share();
            let has_room = share.resize(10);
            equal.extend(has_room.then_some(share));
            has_room
        });
        assert_eq!(come_in.count(), 10);
        equal.pop();
        assert!(room.share().resize(10));
    }

    #[test]
    fn of_equal_ones_the_first_that_grows_gives_way() {
        let room = room(100);
        let mut equal: Vec<Share> = (0..10).map(|_| room.share()).collect();
        assert!(equal.iter_mut().all(|share| share.resize(10)));
        assert!(!equal[0].resize(12));
        equal.remove(0);
        assert!(equal[0].resize(12));
    }
}
