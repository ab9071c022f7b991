//! Which failures of a database are transient, and which are not.
//!
//! The distinction decides whether the writer tries again and whether a caller gets 503 or 500. It
//! does not decide how often or how long.

use sqlx::Error;
use sqlx::error::DatabaseError;
use sqlx::postgres::PgDatabaseError;

use super::StoreError;

/// Transient SQLSTATEs beside the classes 08 (connection), 53 (resources) and 57P (shutdown):
/// read-only transaction, idle-in-transaction timeout, lock timeout, statement timeout, I/O error.
const TRANSIENT_STATES: [&str; 5] = ["25006", "25P03", "55P03", "57014", "58030"];

/// Serialisation failure and deadlock: the transaction was rolled back so that another one can continue.
const CONFLICTS: [&str; 2] = ["40001", "40P01"];

/// The unique index that is violated when two replicas start different runs of one session at once.
const SESSION_HELD: &str = "runs_session_held";

/// SQLite's busy, locked, I/O error and full.
const TRANSIENT_CODES: [u32; 4] = [5, 6, 10, 13];

impl From<Error> for StoreError {
    fn from(error: Error) -> Self {
        if let Error::Database(database) = &error
            && database.try_downcast_ref::<PgDatabaseError>().is_some()
            && (database.code().is_some_and(|code| CONFLICTS.contains(&&*code))
                || database.constraint() == Some(SESSION_HELD))
        {
            return Self::Conflict(message(&error));
        }
        let is_transient = match &error {
            Error::Io(_)
            | Error::Tls(_)
            | Error::Protocol(_)
            | Error::WorkerCrashed
            | Error::PoolTimedOut
            | Error::PoolClosed => true,
            Error::Database(database) => is_transient(&**database),
            _ => false,
        };
        if is_transient {
            Self::Unavailable(message(&error))
        } else {
            Self::Failed(message(&error))
        }
    }
}

/// The message of a database, without the source line that `Display` adds.
fn message(error: &Error) -> String {
    match error {
        Error::Database(database) => database.message().to_owned(),
        _ => error.to_string(),
    }
}

fn is_transient(error: &dyn DatabaseError) -> bool {
    let Some(code) = error.code() else { return false };
    if error.try_downcast_ref::<PgDatabaseError>().is_some() {
        ["08", "53", "57P"].iter().any(|class| code.starts_with(class))
            || TRANSIENT_STATES.contains(&&*code)
    } else {
        code.parse::<u32>().is_ok_and(|code| TRANSIENT_CODES.contains(&(code & 0xff)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_connection_is_transient_and_a_missing_row_is_not() {
        let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(StoreError::from(Error::Io(broken)).is_transient());
        assert!(StoreError::from(Error::PoolTimedOut).is_transient());
        assert!(!StoreError::from(Error::RowNotFound).is_transient());
    }
}
