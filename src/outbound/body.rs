//! The body of an answer, without its compression and up to a bound.
//!
//! A compressed body is decompressed piece by piece into a buffer of bounded size, so that a
//! decompression bomb takes no memory.

use std::io::{self, Write};

use flate2::write::MultiGzDecoder;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;

/// Lower limit of the compressed bytes that are read, if the bound of the decompressed body is smaller:
/// compressed bytes may decompress to nothing.
const LEAST_READ: usize = 64 * 1024;
/// Decompressed bytes of one piece.
const MAX_PIECE: usize = 1024 * 1024;
/// The maximum compression ratio of DEFLATE.
const MOST_COMPRESSED: usize = 1032;

/// A body that is being read.
pub(super) struct Body {
    decoder: Decoder,
    received: usize,
    max: usize,
}

enum Decoder {
    Plain(Room),
    Gzip(Box<MultiGzDecoder<Room>>),
}

/// Bytes up to a bound, and whether there were more.
struct Room {
    bytes: Vec<u8>,
    max: usize,
    overflowed: bool,
}

/// The bytes are not what the answer says they are.
pub(super) struct Damaged;

/// What became of a body.
pub(super) struct Read {
    pub(super) bytes: Vec<u8>,
    pub(super) is_whole: bool,
}

impl Body {
    /// The body behind these headers; `None` where it is encoded in a way that cannot be undone.
    pub(super) fn behind(headers: &HeaderMap, max: usize) -> Option<Self> {
        let room = Room { bytes: Vec::new(), max, overflowed: false };
        let mut encodings = headers.get_all(CONTENT_ENCODING).iter();
        let encoding = encodings.next().map_or(Ok("identity"), |value| value.to_str()).ok()?;
        if encodings.next().is_some() {
            return None;
        }
        let decoder = match encoding.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Decoder::Plain(room),
            "gzip" | "x-gzip" => Decoder::Gzip(Box::new(MultiGzDecoder::new(room))),
            _ => return None,
        };
        Some(Self { decoder, received: 0, max })
    }

    /// Bytes so far, without their compression.
    pub(super) fn len(&self) -> usize {
        self.room().bytes.len()
    }

    /// The decompressed bytes from this position on.
    pub(super) fn behind_byte(&mut self, from: usize) -> &[u8] {
        if let Decoder::Gzip(decoder) = &mut self.decoder {
            let _ = decoder.flush(); // what is wrong with it shows in the next bytes
        }
        self.room().bytes.get(from..).unwrap_or_default()
    }

    /// Drops all but this many of the last bytes, unless that frees little; returns how many were
    /// dropped. The bound then applies to the remaining bytes and those that follow.
    pub(super) fn keep_last(&mut self, bytes: usize) -> usize {
        let kept = &mut self.room_mut().bytes;
        let used = kept.len().saturating_sub(bytes);
        if used <= kept.len() / 2 {
            return 0;
        }
        kept.drain(..used);
        self.received = bytes;
        used
    }

    /// Bytes that can be decompressed on an async worker without delaying its other tasks.
    pub(super) fn at_once(&self) -> usize {
        match self.decoder {
            Decoder::Plain(_) => MAX_PIECE,
            Decoder::Gzip(_) => MAX_PIECE / MOST_COMPRESSED,
        }
    }

    /// Adds received bytes; returns whether more are wanted.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<bool, Damaged> {
        self.received = self.received.saturating_add(bytes.len());
        let written = match &mut self.decoder {
            Decoder::Plain(room) => room.write_all(bytes),
            Decoder::Gzip(decoder) => decoder.write_all(bytes),
        };
        if self.room().overflowed || self.received > self.max.max(LEAST_READ) {
            self.room_mut().overflowed = true;
            return Ok(false);
        }
        written.map(|()| true).map_err(|_| Damaged)
    }

    /// All of it, once nothing more comes or is wanted.
    pub(super) fn finish(mut self) -> Result<Read, Damaged> {
        if let Decoder::Gzip(decoder) = &mut self.decoder
            && self.received > 0
            && !decoder.get_ref().overflowed
        {
            let finished = decoder.try_finish();
            if !decoder.get_ref().overflowed {
                finished.map_err(|_| Damaged)?;
            }
        }
        let Room { bytes, overflowed, .. } = std::mem::take(self.room_mut());
        Ok(Read { bytes, is_whole: !overflowed })
    }

    fn room(&self) -> &Room {
        match &self.decoder {
            Decoder::Plain(room) => room,
            Decoder::Gzip(decoder) => decoder.get_ref(),
        }
    }

    fn room_mut(&mut self) -> &mut Room {
        match &mut self.decoder {
            Decoder::Plain(room) => room,
            Decoder::Gzip(decoder) => decoder.get_mut(),
        }
    }
}

impl Default for Room {
    /// Takes nothing.
    fn default() -> Self {
        Self { bytes: Vec::new(), max: 0, overflowed: true }
    }
}

impl Write for Room {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.max - self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..taken]);
        if taken < bytes.len() {
            self.overflowed = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use http::HeaderValue;

    use super::*;

    fn gzipped(plain: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn read(encoding: &'static str, bytes: &[u8], max: usize) -> Option<(Vec<u8>, bool)> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(encoding));
        let mut body = Body::behind(&headers, max)?;
        for chunk in bytes.chunks(1000) {
            if !body.push(chunk).ok()? {
                break;
            }
        }
        let read = body.finish().ok()?;
        Some((read.bytes, read.is_whole))
    }

    #[test]
    fn bodies_end_where_they_must() {
        let text = vec![b'x'; 5000];
        assert_eq!(read("identity", &text, 5000), Some((text.clone(), true)));
        assert_eq!(read("identity", &text, 4999), Some((text[1..].to_vec(), false)));
        assert_eq!(read("identity", &text, 0), Some((Vec::new(), false)));
        assert_eq!(read("gzip", &gzipped(&text), 5000), Some((text.clone(), true)));
        assert_eq!(read("gzip", &gzipped(&text), 4999), Some((text[1..].to_vec(), false)));
        assert_eq!(read("gzip", b"", 10), Some((Vec::new(), true)));
        let two = [gzipped(b"one "), gzipped(b"two")].concat();
        assert_eq!(read("x-gzip", &two, 10), Some((b"one two".to_vec(), true)));
        let cut = gzipped(&text);
        assert_eq!(read("gzip", &cut[..cut.len() - 9], 9000), None);
        assert_eq!(read("gzip", b"no gzip at all", 9000), None);
        for encoding in ["br", "gzip, gzip", "deflate", "x"] {
            assert_eq!(read(encoding, b"x", 9000), None, "{encoding}");
        }
    }

    #[test]
    fn what_becomes_nothing_ends_as_well() {
        let nothings = gzipped(b"").repeat(4_000);
        assert_eq!(read("gzip", &nothings, 1000), Some((Vec::new(), false)));
    }
}
