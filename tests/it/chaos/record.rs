//! All that is known of one run when everything is over, and what may not be true of it.

use std::path::Path;

use serde_json::Value;

use super::fleet::Accepted;
use super::ledger::Ledger;
use crate::service::Service;

#[derive(Debug)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) run: Value,
    pub(super) events: Vec<Value>,
    /// The numbers of the events that a reader was sent, if there was one.
    pub(super) streamed: Option<Vec<u64>>,
    /// Whether a cancel of it was accepted; it may have ended by then.
    pub(super) was_cancelled: bool,
    /// Step and key of each request to the service that its tools change.
    pub(super) effects: Vec<(String, String)>,
    pub(super) file: String,
    /// Calls without an end.
    pub(super) open_calls: usize,
    pub(super) children: Vec<Value>,
}

impl Record {
    pub(super) async fn of(
        service: &Service,
        accepted: &Accepted,
        ledger: &Ledger,
        workspace: &Path,
    ) -> Self {
        let path = format!("/v1/runs/{}", accepted.run_id);
        let rows = async |path: String| -> Vec<Value> {
            service.get(&path).await.body["data"].as_array().cloned().unwrap_or_default()
        };
        let events = rows(format!("{path}/events?limit=200")).await;
        let calls = rows(format!("{path}/tool-calls?limit=200")).await;
        let ended = ["succeeded", "failed", "denied", "cancelled", "unknown"];
        let is_open = |call: &&Value| !ended.contains(&call["state"].as_str().unwrap_or_default());
        Self {
            name: accepted.name.clone(),
            run: service.get(&path).await.body,
            streamed: accepted.streamed.clone(),
            was_cancelled: accepted.was_cancelled,
            effects: ledger.effects_of(&accepted.name),
            file: std::fs::read_to_string(workspace.join("default").join(&accepted.name))
                .unwrap_or_default(),
            open_calls: calls.iter().filter(is_open).count(),
            children: rows(format!("/v1/runs?parent_run_id={}", accepted.run_id)).await,
            events,
        }
    }

    /// Every way in which the run was lost, repeated or told wrongly.
    pub(super) fn violations(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut hold = |is_true: bool, what: &str| {
            if !is_true {
                wrong.push(format!("{}: {what}: {self:#?}", self.name));
            }
        };
        let status = self.run["status"].as_str().unwrap_or_default();
        let is_completed = status == "completed";
        let is_cancelled = self.was_cancelled && status == "cancelled";
        hold(is_completed || is_cancelled, "it neither completed nor was cancelled");
        hold(self.run["finished_at"].is_string(), "it has no end");

        let numbers: Vec<u64> =
            self.events.iter().filter_map(|event| event["seq"].as_u64()).collect();
        let expected: Vec<u64> = (1..=self.events.len() as u64).collect();
        hold(numbers == expected, "an event is missing or repeated");
        let ends: Vec<&str> = self
            .events
            .iter()
            .filter_map(|event| event["type"].as_str())
            .filter(|kind| ["run.completed", "run.failed", "run.cancelled"].contains(kind))
            .collect();
        hold(ends == [format!("run.{status}")], "not exactly one event ends it as its row says");
        let is_streamed = self.streamed.as_ref().is_none_or(|streamed| *streamed == numbers);
        hold(is_streamed, "a reader missed an event or saw one twice");

        for step in ["once", "asked"] {
            let count = self.effects.iter().filter(|(of, _)| of == step).count();
            hold(count <= 1, "an effect was repeated");
            hold(count == 1 || is_cancelled, "an effect was lost");
        }
        let mut keys: Vec<&String> =
            self.effects.iter().filter(|(step, _)| step == "again").map(|(_, key)| key).collect();
        hold(!keys.is_empty() || is_cancelled, "an effect was lost");
        keys.dedup();
        hold(keys.len() <= 1, "a repetition had another key");
        hold(
            self.file == "one\ntwo\n"
                || is_cancelled && ["", "one\n"].contains(&self.file.as_str()),
            "a line of the file is lost or doubled",
        );
        hold(self.open_calls == 0, "a call has no end");
        let children: Vec<&str> =
            self.children.iter().map(|child| child["status"].as_str().unwrap_or("none")).collect();
        hold(
            children == ["completed"]
                || is_cancelled && (children.is_empty() || children == ["cancelled"]),
            "it has not one child, which has ended",
        );
        wrong
    }
}
