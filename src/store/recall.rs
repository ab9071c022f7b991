//! Looking up what earlier runs left.

use uuid::Uuid;

use super::backend::Work;
use super::observations::words;
use super::sql::{Dialect, Query};
use super::tables::{Observation, Record};
use super::{Store, StoreError};

impl Store {
    /// What other runs of this tenant's agent left that has most in common with a text: at most
    /// `limit`, the most relevant first.
    pub async fn recall(
        &self,
        tenant: &str,
        agent: &str,
        except: Uuid,
        text: &str,
        limit: u32,
    ) -> Result<Vec<Observation>, StoreError> {
        let words = words(text);
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let (look, words) = match self.backend.dialect() {
            Dialect::Postgres => (
                "SELECT o.* FROM observations o, to_tsquery('english', :words) q \
                 WHERE o.words @@ q AND o.tenant = :tenant AND o.agent = :agent \
                 AND o.run_id <> :except ORDER BY ts_rank(o.words, q) DESC, o.at DESC, o.seq \
                 LIMIT :limit",
                words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" | "),
            ),
            Dialect::Sqlite => (
                "SELECT o.* FROM observation_words w JOIN observations o ON o.id = w.rowid \
                 WHERE observation_words MATCH :words AND o.tenant = :tenant AND o.agent = :agent \
                 AND o.run_id <> :except ORDER BY bm25(observation_words), o.at DESC, o.seq \
                 LIMIT :limit",
                words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(" OR "),
            ),
        };
        let look = Query::new(look).bind("tenant", tenant).bind("agent", agent);
        let look = look.bind("except", except).bind("words", words).bind("limit", limit);
        self.backend.read(Work::Data, look).await?.iter().map(Record::read).collect()
    }
}
