//! Parses messages of servers: small ones directly, large ones on the blocking pool, a few at a time.

use super::messages::{self, ServerMessage};
use crate::tools::parse_pool;

/// Bytes of a message that is parsed directly.
const SMALL: usize = 64 * 1024;

/// Reads one message for this tenant.
///
/// # Errors
/// Why it cannot be read: a phrase.
pub(super) async fn read(message: Vec<u8>, tenant: &str) -> Result<ServerMessage, String> {
    if message.len() <= SMALL {
        return messages::parse(&message);
    }
    let parsed = parse_pool::run(tenant, move || messages::parse(&message)).await;
    parsed.unwrap_or_else(|| Err("it cannot be read".to_owned()))
}
