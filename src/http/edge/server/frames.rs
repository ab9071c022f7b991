//! The frames of an HTTP/2 connection, as far as they say whether a request head is incomplete (RFC 9113, section 4).

/// Bytes before the payload of a frame.
const PREFIX: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// The position in the frames of a client.
#[derive(Debug, Default)]
pub(super) struct Frames {
    prefix: [u8; PREFIX],
    /// Bytes of the prefix that have come.
    known: usize,
    /// Bytes of the payload that are missing.
    missing: usize,
    ends_head: bool,
    is_in_head: bool,
}

impl Frames {
    /// Reads the next bytes.
    pub(super) fn read(&mut self, mut bytes: &[u8]) {
        while let [first, behind @ ..] = bytes {
            if self.missing > 0 {
                let came = self.missing.min(bytes.len());
                self.missing -= came;
                bytes = &bytes[came..];
            } else {
                self.prefix[self.known] = *first;
                self.known += 1;
                bytes = behind;
                if self.known == PREFIX {
                    self.begin_payload();
                }
            }
            if self.missing == 0 && self.known == 0 && self.ends_head {
                self.is_in_head = false;
            }
        }
    }

    fn begin_payload(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.prefix;
        self.known = 0;
        self.missing = u32::from_be_bytes([0, high, middle, low]) as usize;
        let is_head = matches!(kind, HEADERS | CONTINUATION);
        self.ends_head = is_head && flags & END_HEADERS != 0;
        self.is_in_head |= is_head && !self.ends_head;
    }

    /// Whether a head has begun whose last frame is incomplete. A head of one frame is small.
    pub(super) fn is_in_head(&self) -> bool {
        self.is_in_head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_ends_with_its_last_frame_however_the_bytes_are_split() {
        let frame = |kind, flags, length: u8| {
            let prefix = [0, 0, length, kind, flags, 0, 0, 0, 1];
            [&prefix[..], &vec![9; usize::from(length)][..]].concat()
        };
        let begun = [frame(4, 4, 6), frame(HEADERS, 5, 30), frame(HEADERS, 1, 0)].concat();
        let rest = [frame(CONTINUATION, 0, 40), frame(CONTINUATION, END_HEADERS, 40)].concat();
        for length in 1..=begun.len() {
            let mut frames = Frames::default();
            begun.chunks(length).for_each(|part| frames.read(part));
            assert!(frames.is_in_head(), "{length}");
            let (last, others) = rest.split_last().unwrap();
            others.chunks(length).for_each(|part| frames.read(part));
            assert!(frames.is_in_head(), "{length}");
            frames.read(&[*last]);
            assert!(!frames.is_in_head(), "{length}");
        }
    }
}
