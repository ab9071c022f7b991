//! Cursors: a position in a list, and which list it is of.
//!
//! A cursor is opaque to clients: the base64url encoding of a short hash of the list (its tenant, path
//! and filters) and of the position. A cursor of another list is refused, since its position would
//! mean nothing here. The hash is no signature and needs none: a position opens nothing that the
//! caller may not read, and is validated like any input.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

/// Parameters that may change from page to page.
const NOT_FILTERS: [&str; 3] = ["limit", "cursor", "after"];
/// Bytes of the hash that a cursor carries.
const HASH: usize = 8;

/// The path and the filters of a list.
#[derive(Debug)]
pub(crate) struct Filters(Sha256);

impl Filters {
    pub(crate) fn new<'a>(path: &str, given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let given = given.into_iter().filter(|(name, _)| !NOT_FILTERS.contains(name));
        let mut filters: Vec<_> = given.collect();
        filters.sort_unstable();
        let mut hash = Sha256::new_with_prefix(path);
        for part in filters.into_iter().flat_map(|(name, value)| [name, value]) {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        Self(hash)
    }

    pub(crate) fn of(self, tenant: &str) -> ListId {
        let whole = self.0.chain_update([0]).chain_update(tenant).finalize();
        let mut id = [0; HASH];
        id.copy_from_slice(&whole[..HASH]);
        ListId(id)
    }
}

/// One list of one tenant, with its filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListId([u8; HASH]);

/// Why a cursor is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Unreadable,
    OfAnotherList,
}

impl Refused {
    /// To follow the name of the parameter.
    pub(crate) fn why(&self) -> &'static str {
        match self {
            Self::Unreadable => "must be the next_cursor of a page of this list",
            Self::OfAnotherList => {
                "belongs to another list or to other filters; only `limit` may change between pages"
            }
        }
    }
}

impl ListId {
    pub(crate) fn cursor(self, position: &str) -> String {
        BASE64_URL_SAFE_NO_PAD.encode([&self.0, position.as_bytes()].concat())
    }

    /// The position that a cursor of this list names, as `read` understands it.
    pub(crate) fn position<T>(
        self,
        cursor: &str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, Refused> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(cursor).map_err(|_| Refused::Unreadable)?;
        let (id, position) = bytes.split_at_checked(HASH).ok_or(Refused::Unreadable)?;
        let position = std::str::from_utf8(position).map_err(|_| Refused::Unreadable)?;
        if id != self.0 {
            return Err(Refused::OfAnotherList);
        }
        read(position).ok_or(Refused::Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_its_tenant_its_path_and_its_filters() {
        let id = |tenant: &str, path: &str, given: &[(&str, &str)]| {
            Filters::new(path, given.iter().copied()).of(tenant)
        };
        let list = id("t", "/runs", &[("agent", "a"), ("status", "failed")]);
        let same = [("status", "failed"), ("limit", "7"), ("cursor", "x"), ("agent", "a")];
        assert_eq!(list, id("t", "/runs", &same));
        for other in [
            id("u", "/runs", &same),
            id("t", "/sessions", &same),
            id("t", "/runs", &[("agent", "a")]),
            id("t", "/runs", &[("agent", "b"), ("status", "failed")]),
            id("t", "/runs", &[("agent", "as"), ("tatus", "failed")]),
            id("t", "/runs", &[("agent", "astatus"), ("failed", "")]),
        ] {
            assert_ne!(list, other);
            let cursor = other.cursor("n7");
            let read = |position: &str| (position == "n7").then_some(7);
            assert_eq!(other.position(&cursor, read), Ok(7));
            assert_eq!(other.position(&cursor, |_| None::<()>), Err(Refused::Unreadable));
            assert_eq!(list.position(&cursor, read), Err(Refused::OfAnotherList));
        }
        for text in ["", "x", "bjE", "%", "AAAAAAAAAAD_"] {
            assert_eq!(list.position(text, |_| Some(())), Err(Refused::Unreadable), "{text}");
        }
    }
}
