//! Lists come from a standby where there is one, and from the database itself where it is away.

use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::postgres_cluster::OwnServer;
use crate::service::{Service, Setup};

async fn on(server: &OwnServer, statement: &str) {
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await.unwrap();
}

/// Stops the replay of a standby. The function only requests it, so the state is waited for.
async fn pause(standby: &OwnServer) {
    let mut connection = PgConnection::connect(&standby.url()).await.unwrap();
    on(standby, "SELECT pg_wal_replay_pause()").await;
    let state = "SELECT pg_get_wal_replay_pause_state()";
    while sqlx::query_scalar::<_, String>(state).fetch_one(&mut connection).await.unwrap()
        != "paused"
    {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

async fn listed(service: &Service) -> usize {
    service.get("/v1/runs").await.body["data"].as_array().unwrap().len()
}

async fn shows(service: &Service, runs: usize) {
    for _ in 0..1200 {
        if listed(service).await == runs {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("{} runs are listed, not {runs}", listed(service).await);
}

#[tokio::test]
async fn lists_come_from_the_standby_and_fresh_reads_do_not() {
    let servers = tokio::task::spawn_blocking(|| {
        let main = OwnServer::start();
        let standby = main.standby();
        (main, standby)
    });
    let (main, standby) = servers.await.unwrap();
    let service = Setup::new()
        .agent("quick", "model: scripted/quick\ninstructions: x\n")
        .scenario("quick", "steps: [{text: done}]")
        .variable("TOOLLOOP_DATABASE__READ_URL", &standby.url())
        .start_on(main.url())
        .await;
    service.run("quick", &json!({})).await;
    shows(&service, 1).await;

    pause(&standby).await;
    let run = service.run("quick", &json!({"session_id": "s"})).await;
    assert_eq!(listed(&service).await, 1, "the list is not the standby's");
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    assert_eq!(service.get(&path).await.body["status"], "completed");
    assert_eq!(service.get(&format!("{path}/messages")).await.status, 200);
    let session = service.get("/v1/sessions/s").await.body;
    assert_eq!(session["runs"][0]["run_id"], run["run_id"], "{session:#}");

    on(&standby, "SELECT pg_wal_replay_resume()").await;
    shows(&service, 2).await;

    standby.stop();
    service.run("quick", &json!({})).await;
    assert_eq!(listed(&service).await, 3, "without the standby the list is the database's");
    assert_eq!(service.get("/readyz").await.status, 200);
    service.until_logged("the standby (database.read_url) failed").await;
}
