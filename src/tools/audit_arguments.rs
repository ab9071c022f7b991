//! The arguments of a call as the audit log stores them: redacted and capped.

use serde_json::Value;

use crate::bounds::secrets::redact;

/// Bytes of arguments in the audit log.
const MAX_AUDITED: usize = 4096;

/// The arguments as the audit log keeps them.
pub(super) fn shown(arguments: &Value, canonical: String) -> String {
    let mut redacted = arguments.clone();
    redact(&mut redacted);
    let mut text = if redacted == *arguments { canonical } else { redacted.to_string() };
    if text.len() > MAX_AUDITED {
        text.truncate(text.floor_char_boundary(MAX_AUDITED - '…'.len_utf8()));
        text.push('…');
    }
    text
}
