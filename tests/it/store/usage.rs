//! Sums of usage are exact at every moment, whatever becomes of the runs.

use std::collections::BTreeMap;

use chrono::{DurationRound, TimeDelta};
use toolloop::event::ModelInterrupted;
use toolloop::store::{StatsFilter, UsageStats};

use super::*;

on_both! {
    sums_match_the_runs_at_every_moment,
    a_run_counts_once_for_each_model_that_responded,
    replicas_share_the_adding_up,
    a_write_that_is_refused_or_repeated_adds_nothing,
}

/// Days over which the runs are accepted.
const DAYS: i64 = 3;

/// A small generator of numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// A run, and what it took by model: responses, and usage.
struct Taken {
    script: Script,
    at: DateTime<Utc>,
    agent: &'static str,
    models: BTreeMap<String, (u64, Usage)>,
    has_ended: bool,
}

impl Taken {
    fn take(&mut self, model: &str, dice: &mut Dice, is_last: bool) -> RunEvent {
        let RunEvent::ModelResponded(mut response) = responded(1, &[]) else { unreachable!() };
        response.iteration = self.script.totals.iterations + 1;
        response.model = model.into();
        let usage = &mut response.usage;
        usage.input_tokens = dice.roll(1000);
        usage.output_tokens = dice.roll(3);
        usage.cached_input_tokens = usage.input_tokens / 2;
        usage.cost_micro_usd = (dice.roll(9) > 0).then(|| i64::try_from(dice.roll(50)).unwrap());
        usage.estimated = dice.roll(7) == 0;
        let usage = *usage;
        let (responses, sum) = self.models.entry(format!("openai/{model}")).or_default();
        sum.add(&usage);
        if is_last && dice.roll(2) == 0 {
            return RunEvent::ModelInterrupted(ModelInterrupted {
                attempt: 1,
                iteration: response.iteration,
                provider: "openai".into(),
                model: model.into(),
                usage,
            });
        }
        *responses += 1;
        RunEvent::ModelResponded(response)
    }
}

/// What a look through all runs says. Deleted ones count at the beginning of their hour, where only a
/// part of that hour is asked for.
fn looked_through(runs: &[Taken], deleted: &[Uuid], filter: &StatsFilter) -> Vec<UsageStats> {
    let hour = |at: DateTime<Utc>| at.duration_trunc(TimeDelta::hours(1)).unwrap();
    let mut sums = BTreeMap::<_, (u64, Usage, bool)>::new();
    for run in runs {
        let is_whole =
            hour(run.at) >= filter.since && hour(run.at) + TimeDelta::hours(1) <= filter.until;
        let at = if deleted.contains(&run.script.id) && !is_whole { hour(run.at) } else { run.at };
        if at < filter.since || at >= filter.until {
            continue;
        }
        if filter.agent.as_ref().is_some_and(|agent| agent != run.agent) {
            continue;
        }
        for (model, (responses, usage)) in &run.models {
            let day = std::cmp::Reverse(run.at.format("%Y-%m-%d").to_string());
            let (runs, sum, is_known) =
                sums.entry((day, run.agent, model)).or_insert((0, Usage::default(), true));
            *runs += u64::from(*responses > 0);
            *is_known &= usage.cost_micro_usd.is_some() || usage.total_tokens() == 0;
            let cost = sum.cost_micro_usd.unwrap_or(0) + usage.cost_micro_usd.unwrap_or(0);
            sum.add(usage);
            sum.cost_micro_usd = Some(cost);
        }
    }
    let mut rows = Vec::new();
    for ((day, agent, model), (runs, mut usage, is_known)) in sums {
        usage.cost_micro_usd = usage.cost_micro_usd.filter(|_| is_known);
        rows.push(UsageStats {
            day: day.0,
            agent: agent.into(),
            model: model.clone(),
            runs,
            usage,
        });
    }
    rows
}

async fn check(db: &Db, runs: &[Taken], deleted: &[Uuid], dice: &mut Dice, what: &str) {
    let start = first_day();
    let all = StatsFilter { since: start, until: start + TimeDelta::days(DAYS + 1), agent: None };
    let minutes = u64::try_from(DAYS * 24 * 60).unwrap();
    let mut any = || start + TimeDelta::minutes(i64::try_from(dice.roll(minutes)).unwrap());
    let (one, other) = (any(), any());
    let some = StatsFilter { since: one.min(other), until: one.max(other), ..all.clone() };
    let hour = |at: DateTime<Utc>| at.duration_trunc(TimeDelta::hours(1)).unwrap();
    let hours =
        StatsFilter { since: hour(some.since), until: hour(some.until), agent: Some("b".into()) };
    for filter in [all, some, hours] {
        let told = db.store.usage_stats(TENANT, &filter, &page(9999, None)).await.unwrap();
        assert_eq!(told, looked_through(runs, deleted, &filter), "{what}: {filter:?}");
    }
}

fn first_day() -> DateTime<Utc> {
    DateTime::from_timestamp(1_767_225_600, 0).unwrap()
}

async fn sums_match_the_runs_at_every_moment(db: Db) {
    let other = match db.store.kind() {
        "postgres" => store::open(&db.url, 12, false).await.unwrap(),
        _ => db.store.clone(),
    };
    let mut dice = Dice(db.url.len() as u64);
    let (mut runs, mut deleted) = (Vec::<Taken>::new(), Vec::new());
    for step in 0..150 {
        let what = match dice.roll(10) {
            0..=3 => {
                let minutes = dice.roll(u64::try_from(DAYS * 24 * 60).unwrap());
                let at = first_day() + TimeDelta::minutes(i64::try_from(minutes).unwrap());
                let agent = ["a", "b"][usize::from(dice.roll(3) == 0)];
                let mut script = Script::with(|new| {
                    new.agent = agent.into();
                    new.created_at = at;
                });
                db.commit("me", &script.start()).await;
                let models = BTreeMap::new();
                runs.push(Taken { script, at, agent, models, has_ended: false });
                "begin"
            }
            4..=6 => {
                let live: Vec<usize> = (0..runs.len()).filter(|&at| !runs[at].has_ended).collect();
                let Some(&at) = live.get(usize::try_from(dice.roll(9)).unwrap()) else { continue };
                let (run, ends) = (&mut runs[at], dice.roll(2) == 0);
                let model = ["gpt", "gpt", "mini"][usize::try_from(dice.roll(3)).unwrap()];
                let mut events = vec![run.take(model, &mut dice, ends)];
                if ends {
                    events.push(completed(json!(1)));
                }
                run.has_ended = ends;
                let write = run.script.write(events);
                db.commit("me", &write).await;
                "respond"
            }
            7 | 8 => {
                let limit = u32::try_from(dice.roll(4) + 1).unwrap();
                let (one, two) =
                    tokio::join!(db.store.add_up_usage(limit), other.add_up_usage(limit));
                assert!(one.unwrap() + two.unwrap() <= 2 * limit);
                "add up"
            }
            _ => {
                let limit = u32::try_from(dice.roll(3)).unwrap();
                let later = now() + TimeDelta::hours(1);
                db.store.delete_ended(later, limit, &no_files).await.unwrap();
                for run in &runs {
                    if db.store.run(TENANT, run.script.id).await.unwrap().is_none() {
                        deleted.push(run.script.id);
                    }
                }
                "delete"
            }
        };
        check(&db, &runs, &deleted, &mut dice, &format!("{step} {what}")).await;
    }
    assert!(deleted.len() > 9, "{}", deleted.len());
    while db.store.add_up_usage(7).await.unwrap() > 0 {}
    check(&db, &runs, &deleted, &mut dice, "all is added up").await;
}

async fn a_run_counts_once_for_each_model_that_responded(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let answer = |iteration, model: &str| {
        let RunEvent::ModelResponded(mut response) = responded(iteration, &[]) else {
            unreachable!()
        };
        response.model = model.into();
        RunEvent::ModelResponded(response)
    };
    db.commit("me", &script.write(vec![answer(1, "gpt"), answer(2, "mini")])).await;
    for iteration in 3..6 {
        db.commit("me", &script.write(vec![answer(iteration, "gpt")])).await;
        while db.store.add_up_usage(1).await.unwrap() > 0 {}
    }
    let hour = now().duration_trunc(TimeDelta::hours(1)).unwrap();
    let (since, until) = (hour - TimeDelta::hours(1), hour + TimeDelta::hours(2));
    let filter = StatsFilter { since, until, agent: None };
    let rows = db.store.usage_stats(TENANT, &filter, &page(9999, None)).await.unwrap();
    let told: Vec<_> =
        rows.iter().map(|row| (&*row.model, row.runs, row.usage.output_tokens)).collect();
    assert_eq!(told, [("openai/gpt", 1, 80), ("openai/mini", 1, 20)]);
    assert_eq!(db.store.usage_stats("other", &filter, &page(9999, None)).await.unwrap(), []);
}

/// How many rows of a table there are.
async fn rows(db: &Db, table: &str) -> u64 {
    db.sql(&format!("SELECT CAST(count(*) AS text) FROM {table}")).await.parse().unwrap()
}

async fn replicas_share_the_adding_up(db: Db) {
    let mut writes = Vec::new();
    for _ in 0..40 {
        let mut script = Script::owned();
        db.commit("me", &script.start()).await;
        let write = script.write(vec![responded(1, &[])]);
        writes.push(write.clone());
        db.commit("me", &write).await;
    }
    assert_eq!(rows(&db, "usage_added").await, 40, "no commit writes a row of another");
    let other = match db.store.kind() {
        "postgres" => store::open(&db.url, 12, false).await.unwrap(),
        _ => db.store.clone(),
    };
    let mut replicas = tokio::task::JoinSet::new();
    for store in [db.store.clone(), other] {
        replicas.spawn(async move {
            let mut moved = 0;
            for _ in 0..30 {
                moved += store.add_up_usage(3).await.unwrap();
            }
            moved
        });
    }
    assert_eq!(replicas.join_all().await.into_iter().sum::<u32>(), 40);
    assert_eq!((rows(&db, "usage_added").await, db.store.add_up_usage(9).await.unwrap()), (0, 0));
    let runs = "SELECT CAST(sum(runs) AS text) FROM usage_sums WHERE span = ";
    assert_eq!(db.sql(&format!("{runs}'day'")).await, "40");
    assert_eq!(db.sql(&format!("{runs}'hour'")).await, "40");
    // One commit of many runs adds one row.
    let mut scripts: Vec<Script> = (0..20).map(|_| Script::owned()).collect();
    let starts: Vec<RunWrite> = scripts.iter_mut().map(Script::start).collect();
    db.store.commit("me", &starts).await.unwrap();
    let answers: Vec<RunWrite> =
        scripts.iter_mut().map(|script| script.write(vec![responded(1, &[])])).collect();
    db.store.commit("me", &answers).await.unwrap();
    assert!(rows(&db, "usage_added").await <= 2, "or two, where the hour has just ended");
}

async fn a_write_that_is_refused_or_repeated_adds_nothing(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let write = script.write(vec![responded(1, &[])]);
    assert_eq!(db.commit_one("another", &write).await, WriteOutcome::Fenced);
    assert_eq!(rows(&db, "usage_added").await, 0);
    db.commit("me", &write).await;
    db.commit_again("me", &write).await;
    assert_eq!(rows(&db, "usage_added").await, 1);
    // Nor does it take anything from what others add in the same commit.
    let (mut lost, mut kept) = (Script::owned(), Script::owned());
    db.commit("another", &lost.start()).await;
    db.commit("me", &kept.start()).await;
    let batch = [lost, kept].map(|mut script| script.write(vec![responded(1, &[])]));
    let outcomes = db.store.commit("me", &batch).await.unwrap().outcomes;
    assert_eq!(outcomes, [WriteOutcome::Fenced, WriteOutcome::Committed]);
    assert_eq!(rows(&db, "usage_added").await, 2);
    let runs = db.sql("SELECT CAST(sum(runs) AS text) FROM usage_added").await;
    assert_eq!(runs, "2");
}
