//! Appends recorded events to the journal.
//!
//! The start of an iteration is appended when the request of its model call is sent. So a run that is resumed
//! after a crash counts the interrupted model call only if it may have been charged.

use std::pin::pin;
use std::time::Duration;

use futures::FutureExt;
use tokio_util::sync::CancellationToken;

use crate::engine::journal::{Entry, Journal};
use crate::event::{AuditRecord, Event, RunEvent};
use crate::run::{RunStatus, Totals};

/// How long earlier events wait for the request, to be appended together with the start of the iteration.
const LINGER: Duration = Duration::from_millis(1);

/// Recorded events that are not appended yet.
pub(super) struct Outbox<'a> {
    journal: &'a mut Journal,
    events: &'a mut Vec<Event>,
    audit: &'a mut Vec<AuditRecord>,
}

impl<'a> Outbox<'a> {
    pub(super) fn of(
        journal: &'a mut Journal,
        events: &'a mut Vec<Event>,
        audit: &'a mut Vec<AuditRecord>,
    ) -> Self {
        Self { journal, events, audit }
    }

    /// Appends all of them.
    pub(super) fn hand_over(&mut self, totals: &Totals, park: Option<RunStatus>) {
        if !self.events.is_empty() {
            let events = std::mem::take(self.events);
            let audit = std::mem::take(self.audit);
            self.journal.append(Entry { events, audit, totals: totals.clone(), park });
        }
    }

    /// Appends the events before an iteration whose model call is not made yet. The start of the last
    /// iteration after a reached limit is appended, too, because only that event records the limit.
    pub(super) fn hand_over_earlier(&mut self, totals: &Totals) {
        let begins =
            |event: &Event| matches!(event.what, RunEvent::IterationStarted { limit: None, .. });
        let start = self.events.iter().rposition(begins).unwrap_or(self.events.len());
        let later = self.events.split_off(start);
        self.hand_over(totals, None);
        *self.events = later;
    }

    /// Waits for a try of a model call. `sent` resolves when its request is sent. `None` if `stop` resolves before
    /// the try is complete.
    pub(super) async fn during<T>(
        mut self,
        totals: &Totals,
        sent: &CancellationToken,
        stop: impl Future<Output = ()>,
        trying: impl Future<Output = T>,
    ) -> Option<T> {
        let mut stop = pin!(stop);
        let mut trying = pin!(trying);
        if stop.as_mut().now_or_never().is_some() {
            return None;
        }
        let mut has_lingered = false;
        loop {
            tokio::select! {
                biased;
                tried = &mut trying => return Some(tried),
                () = &mut stop => return trying.as_mut().now_or_never(), // it may be complete
                () = sent.cancelled(), if !self.events.is_empty() => self.hand_over(totals, None),
                () = tokio::time::sleep(LINGER), if !has_lingered && !self.events.is_empty() => {
                    self.hand_over_earlier(totals);
                    has_lingered = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::journal::{Ack, Append};

    struct NoStore;

    impl Append for NoStore {
        fn append(&mut self, _: Entry) -> Ack {
            Box::pin(async { Ok(()) })
        }
    }

    #[tokio::test]
    async fn a_try_that_is_complete_when_its_run_is_cancelled_is_not_lost() {
        let (mut journal, mut events, mut audit) = (Journal::new(NoStore), Vec::new(), Vec::new());
        let (totals, sent, cancelled) =
            (Totals::default(), CancellationToken::new(), CancellationToken::new());
        let trying = async {
            cancelled.cancel();
            tokio::task::yield_now().await;
            "answer"
        };
        let outbox = Outbox::of(&mut journal, &mut events, &mut audit);
        let tried = outbox.during(&totals, &sent, cancelled.cancelled(), trying).await;
        assert_eq!(tried, Some("answer"));
        let outbox = Outbox::of(&mut journal, &mut events, &mut audit);
        let tried = outbox.during(&totals, &sent, cancelled.cancelled(), async { "answer" }).await;
        assert_eq!(tried, None, "no request is sent for a cancelled run");
    }
}
