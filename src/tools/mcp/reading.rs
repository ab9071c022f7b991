//! Messages of servers are read where they come in; large ones take turns on threads for such work.

use super::messages::{self, Heard};
use crate::tools::readers;

/// Bytes of a message that is read where it comes in.
const SMALL: usize = 64 * 1024;

/// Reads one message.
///
/// # Errors
/// Why it cannot be read: a phrase.
pub(super) async fn read(message: Vec<u8>) -> Result<Heard, String> {
    if message.len() <= SMALL {
        return messages::heard(&message);
    }
    let heard = readers::read(move || messages::heard(&message)).await;
    heard.unwrap_or_else(|| Err("it cannot be read".to_owned()))
}
