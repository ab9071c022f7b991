//! Sums over runs: calls by tool, tokens by day, agent and model.

use chrono::TimeDelta;
use toolloop::store::{StatsFilter, ToolStats, UsageCursor, UsageStats};

use super::*;

on_both! {
    calls_are_counted_by_tool,
    tokens_are_counted_by_day_agent_and_model,
    only_selected_runs_are_counted,
}

pub(super) fn all() -> StatsFilter {
    let (since, until) = (now() - TimeDelta::days(30), now() + TimeDelta::days(1));
    StatsFilter { since, until, agent: None }
}

/// A run in which a tool was called so often, taking 1, 2, 3 … milliseconds.
pub(super) async fn called(db: &Db, mut script: Script, tool: &str, times: u64) {
    db.commit("me", &script.start()).await;
    let calls: Vec<ToolCall> = (0..times).map(|_| call(tool, "{}")).collect();
    let mut events = vec![responded(1, &calls.iter().collect::<Vec<_>>())];
    for (call, duration) in calls.iter().zip(1..) {
        let RunEvent::ToolCallCompleted(mut done) = answered(call, None) else { unreachable!() };
        done.duration_ms = duration;
        events.extend([dispatched(call, Effect::Read), RunEvent::ToolCallCompleted(done)]);
    }
    db.commit("me", &script.write(events)).await;
}

async fn calls_are_counted_by_tool(db: Db) {
    assert_eq!(db.store.tool_stats(TENANT, &all()).await.unwrap(), []);
    called(&db, Script::owned(), "file_ops", 200).await;
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let (shell, unknown, open) = (call("shell", "{}"), call("nobody", "{}"), call("shell", "{}"));
    let failing = call("shell", "{}");
    db.commit(
        "me",
        &script.write(vec![
            responded(1, &[&shell, &failing, &unknown, &open]),
            blocked(&shell),
            dispatched(&failing, Effect::Once),
            answered(&failing, Some(CallFailure::ToolError)),
            answered(&unknown, Some(CallFailure::UnknownTool)),
        ]),
    )
    .await;
    let tool = |tool: &str, counts: [u64; 3], times: [Option<u64>; 3]| ToolStats {
        tool: tool.into(),
        calls: counts[0],
        errors: counts[1],
        blocked: counts[2],
        p50_ms: times[0],
        p95_ms: times[1],
        p99_ms: times[2],
    };
    let expected = [
        tool("file_ops", [200, 0, 0], [Some(100), Some(190), Some(198)]),
        tool("nobody", [1, 1, 0], [None; 3]),
        tool("shell", [2, 1, 1], [Some(3); 3]),
    ];
    assert_eq!(db.store.tool_stats(TENANT, &all()).await.unwrap(), expected);
}

async fn tokens_are_counted_by_day_agent_and_model(db: Db) {
    let day = |days: i64| move |new: &mut NewRun| new.created_at = now() - TimeDelta::days(days);
    for (days, answers) in [(0, 2), (0, 1), (3, 1)] {
        let mut script = Script::with(day(days));
        db.commit("me", &script.start()).await;
        let events = (1..=answers).map(|iteration| responded(iteration, &[])).collect();
        db.commit("me", &script.write(events)).await;
    }
    let mut unpriced = Script::with(|new| new.agent = "writer".into());
    db.commit("me", &unpriced.start()).await;
    let RunEvent::ModelResponded(mut response) = responded(2, &[]) else { unreachable!() };
    response.usage.cost_micro_usd = None;
    db.commit("me", &unpriced.write(vec![responded(1, &[]), RunEvent::ModelResponded(response)]))
        .await;
    let rows = db.store.usage_stats(TENANT, &all(), &page(9999, None)).await.unwrap();
    let today = now().format("%Y-%m-%d").to_string();
    let earlier = (now() - TimeDelta::days(3)).format("%Y-%m-%d").to_string();
    let told: Vec<_> =
        rows.iter().map(|row| (row.day.as_str(), row.agent.as_str(), row.runs)).collect();
    assert_eq!(told, [(&*today, "reader", 2), (&*today, "writer", 1), (&*earlier, "reader", 1)]);
    assert!(rows.iter().all(|row| row.model == "openai/gpt"));
    assert_eq!((rows[0].usage.input_tokens, rows[0].usage.output_tokens), (300, 60));
    assert_eq!((rows[0].usage.cost_micro_usd, rows[1].usage.cost_micro_usd), (Some(21), None));

    // Rows that come before a page do not move it.
    let position = |row: &UsageStats| {
        let UsageStats { day, agent, model, .. } = row.clone();
        UsageCursor { day, agent, model }
    };
    let mut first = Script::with(|new| new.agent = "a".into());
    db.commit("me", &first.start()).await;
    db.commit("me", &first.write(vec![responded(1, &[])])).await;
    for (place, row) in rows.iter().enumerate() {
        let page = page(1, Some(position(row)));
        let next = db.store.usage_stats(TENANT, &all(), &page).await.unwrap();
        assert_eq!(next.first(), rows.get(place + 1), "after {row:?}");
    }
}

async fn only_selected_runs_are_counted(db: Db) {
    let at = now() - TimeDelta::hours(1);
    for (agent, minutes) in [("a", -1), ("b", 0), ("c", 1)] {
        let script = Script::with(|new| {
            new.agent = agent.into();
            new.created_at = at + TimeDelta::minutes(minutes);
        });
        called(&db, script, &format!("tool_of_{agent}"), 1).await;
    }
    let filter = |since: i64, until: i64, agent: Option<&str>| StatsFilter {
        since: at + TimeDelta::minutes(since),
        until: at + TimeDelta::minutes(until),
        agent: agent.map(str::to_owned),
    };
    for (filter, expected) in [
        (filter(-9, 9, None), vec!["a", "b", "c"]),
        (filter(0, 9, None), vec!["b", "c"]),
        (filter(-9, 0, None), vec!["a"]),
        (filter(0, 1, None), vec!["b"]),
        (filter(-9, 9, Some("c")), vec!["c"]),
        (filter(-9, 9, Some("nobody")), vec![]),
        (filter(9, -9, None), vec![]),
    ] {
        let tools = db.store.tool_stats(TENANT, &filter).await.unwrap();
        let tools: Vec<_> =
            tools.iter().map(|row| row.tool.trim_start_matches("tool_of_")).collect();
        assert_eq!(tools, expected, "{filter:?}");
        let usage = db.store.usage_stats(TENANT, &filter, &page(9999, None)).await.unwrap();
        let mut agents: Vec<_> = usage.iter().map(|row| row.agent.as_str()).collect();
        agents.sort_unstable();
        assert_eq!(agents, expected, "{filter:?}");
    }
    assert_eq!(db.store.tool_stats("other", &filter(-9, 9, None)).await.unwrap(), []);
    assert_eq!(
        db.store.usage_stats("other", &filter(-9, 9, None), &page(9999, None)).await.unwrap(),
        []
    );
}
