//! Arguments that are parts of addresses: each is one name, whatever is in it.

use serde_json::json;

use super::{Output, toolloop};
use crate::service::{Db, Setup, on_one_store};

on_one_store!(no_argument_leads_to_another_address);

async fn no_argument_leads_to_another_address(db: Db) {
    let setup = || {
        Setup::new()
            .agent(
                "echo",
                "model: scripted/echo\nenable_double_confirmation: false\ntools: [file_ops]\n",
            )
            .scenario("echo", "steps: [{text: hi}]")
            .file("here/a.txt", "kept")
    };
    let service = setup().start(db).await;
    let run = service.run("echo", &json!({})).await["run_id"].as_str().unwrap().to_owned();
    let url = service.url("");
    let alone = setup().write_directory();
    let of_alone = toolloop(alone.path(), &["invoke", "echo"]).await;
    let answer: serde_json::Value = serde_json::from_str(&of_alone.out).unwrap();
    let own = answer["run_id"].as_str().unwrap();
    let both = async |arguments: &[&str]| -> (Output, Output) {
        let remote = [arguments, &["--server", &url, "--key", &service.key]].concat();
        let local: Vec<&str> = arguments
            .iter()
            .map(|argument| if *argument == run { own } else { argument })
            .collect();
        (toolloop(service.dir.path(), &remote).await, toolloop(alone.path(), &local).await)
    };
    for path in
        ["..", ".", "../messages", "../../../keys", "here/./a.txt", "here/../here/a.txt", "", "/"]
    {
        let content = service.dir.path().join("agents/echo.yaml");
        for arguments in [
            &["files", "get", &run, path][..],
            &["files", "put", &run, path, content.to_str().unwrap()],
        ] {
            let (remote, local) = both(arguments).await;
            assert_eq!((remote.code, &*remote.err), (Some(1), &*local.err), "{arguments:?}");
            assert_eq!((local.code, &*remote.out), (Some(1), ""), "{arguments:?}");
        }
    }
    for agent in ["..", ".", "a/b", "echo?x=1", "../runs?"] {
        for arguments in [
            &["invoke", agent][..],
            &["invoke", agent, "--dry-run"],
            &["tools", "call", agent, "file_ops"],
            &["policy", "replay", "--agent", agent],
        ] {
            let (remote, local) = both(arguments).await;
            assert_eq!((remote.code, &*remote.err), (Some(1), &*local.err), "{arguments:?}");
            assert!(local.code == Some(1) && local.err.contains("no"), "{}", local.err);
        }
    }
    let (remote, local) = both(&["files", "get", &run, "here/a.txt"]).await;
    assert_eq!((&*remote.out, &*local.out), ("kept", "kept"), "{} {}", remote.err, local.err);
}
