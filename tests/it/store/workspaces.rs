//! Which path has which content: changes of others are not overwritten, and no content is deleted that
//! is needed.

use chrono::TimeDelta;
use sqlx::{Connection, PgConnection};
use toolloop::store::{
    FileWriter, FileWrites, KeptContent, KeptFile, ObjectClaim, Ownership, PathWrite, PathsChanged,
    PathsWritten,
};

use super::*;

on_both! {
    changes_of_others_are_not_written_over,
    an_equal_change_of_another_is_refused,
    a_run_of_another_owner_writes_nothing,
    changes_are_found_by_their_version,
    contents_go_when_no_path_has_them,
    two_that_write_at_once_have_one_after_the_other,
    nothing_lies_beneath_a_file,
}

fn later() -> DateTime<Utc> {
    Utc::now() + TimeDelta::hours(1)
}

fn file(object: &str, hash: &str) -> KeptContent {
    let (object, hash) = (object.to_owned(), hash.to_owned());
    KeptContent::File(KeptFile { object, hash, size: 3, mode: 0o644, modified_ns: 7 })
}

fn write(path: &str, base: i64, content: Option<KeptContent>) -> PathWrite {
    PathWrite { path: path.to_owned(), base, content }
}

async fn stored(db: &Db, hash: &str) -> String {
    match db.store.claim_object(TENANT, hash).await.unwrap() {
        ObjectClaim::Stored(object) => object,
        ObjectClaim::New(object) => {
            assert!(db.store.object_stored(&object).await.unwrap());
            object
        }
    }
}

/// A write of its own.
fn once(paths: &[PathWrite]) -> FileWrites<'_> {
    FileWrites { id: Uuid::now_v7(), is_whole: false, paths }
}

async fn done(db: &Db, paths: &[PathWrite]) -> (i64, Vec<String>) {
    done_as(db, once(paths)).await
}

async fn done_as(db: &Db, writes: FileWrites<'_>) -> (i64, Vec<String>) {
    match db.store.write_files(TENANT, FileWriter::Caller(None), writes).await.unwrap() {
        PathsWritten::Done { version, changed_by_others } => (version, changed_by_others),
        other => panic!("{other:?}"),
    }
}

async fn beneath(db: &Db, directory: &str, since: Option<i64>) -> PathsChanged {
    db.store.files_since(TENANT, directory, since).await.unwrap()
}

async fn changes_of_others_are_not_written_over(db: Db) {
    let (a, b) = (stored(&db, "aa11").await, stored(&db, "bb22").await);
    let paths = [write("w/x", 0, Some(file(&a, "aa11")))];
    let writes = once(&paths);
    let (first, refused) = done_as(&db, writes).await;
    assert!(refused.is_empty());
    // The same again, as after a lost answer.
    let (second, refused) = done_as(&db, writes).await;
    assert!(refused.is_empty());
    assert_eq!(done(&db, &paths).await.1, ["w/x"], "an equal change of another");
    let writes = [
        write("w/x", first, Some(file(&b, "bb22"))),
        write("w/y", 0, Some(KeptContent::Directory)),
    ];
    assert_eq!(done(&db, &writes).await.1, ["w/x"]);
    assert_eq!(done(&db, &[write("w/x", first, None)]).await.1, ["w/x"]);
    assert_eq!(done(&db, &[write("w/x", 0, None)]).await.1, ["w/x"]);
    assert!(done(&db, &[write("w/x", second, Some(file(&b, "bb22")))]).await.1.is_empty());
    let there = beneath(&db, "w", None).await.paths;
    let contents: Vec<_> = there.into_iter().map(|it| (it.path, it.content.unwrap())).collect();
    assert_eq!(
        contents,
        [("w/x".to_owned(), file(&b, "bb22")), ("w/y".to_owned(), KeptContent::Directory)]
    );
}

async fn an_equal_change_of_another_is_refused(db: Db) {
    let a = stored(&db, "aa11").await;
    let file = || Some(file(&a, "aa11"));
    let (first, _) = done(&db, &[write("in/job", 0, file())]).await;
    let moves = |to: &str| [write("in/job", first, None), write(to, 0, file())];
    let (one, other) = (moves("one/job"), moves("other/job"));
    let move_of = |paths| FileWrites { is_whole: true, ..once(paths) };
    let (mine, others) = (move_of(&one), move_of(&other));
    for _ in 0..2 {
        assert!(done_as(&db, mine).await.1.is_empty());
        let refused = done_as(&db, others).await.1;
        assert_eq!(refused, ["in/job", "other/job"], "nothing of it is done");
    }
    assert_eq!(done(&db, &other[..1]).await.1, ["in/job"], "it is gone already");
    let there = beneath(&db, ".", None).await.paths;
    assert_eq!(there.iter().map(|it| &*it.path).collect::<Vec<_>>(), ["one/job"]);
    // Two that make a directory have both made it.
    for _ in 0..2 {
        let directory = write("d", 0, Some(KeptContent::Directory));
        assert!(done(&db, &[directory]).await.1.is_empty());
    }
}

async fn a_run_of_another_owner_writes_nothing(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let writes = [write("x", 0, Some(KeptContent::Directory))];
    for (owner, epoch, is_written) in [("me", 1, true), ("other", 1, false), ("me", 2, false)] {
        let by = FileWriter::Run(script.id, Ownership { owner, epoch });
        let written = db.store.write_files(TENANT, by, once(&writes)).await.unwrap();
        assert_eq!(written != PathsWritten::Fenced, is_written, "{owner} {epoch}");
    }
    db.commit("me", &script.write(vec![completed(json!(1))])).await;
    let by = FileWriter::Run(script.id, Ownership { owner: "me", epoch: 1 });
    let written = db.store.write_files(TENANT, by, once(&writes)).await.unwrap();
    assert_eq!(written, PathsWritten::Fenced, "it has ended");
}

async fn nothing_lies_beneath_a_file(db: Db) {
    let a = stored(&db, "aa11").await;
    let file = || Some(file(&a, "aa11"));
    let directory = || Some(KeptContent::Directory);
    let refused = async |writes: &[PathWrite]| done(&db, writes).await.1;
    assert!(refused(&[write("w/k", 0, file()), write("w/d/e/f", 0, file())]).await.is_empty());
    let writes = [
        write("w/d", 0, file()),
        write("w/d/e", 0, Some(KeptContent::Link("x".to_owned()))),
        write("w/d/g", 0, file()),
        write("w/k/l/m", 0, directory()),
        write("w/k0", 0, file()),
    ];
    assert_eq!(refused(&writes).await, ["w/d", "w/d/e", "w/d/g", "w/k/l/m"]);
    let at = db.store.files_at(TENANT, &["w/k".to_owned(), "w/d/e/f".to_owned()]).await.unwrap();
    let base = |path: &str| at.iter().find(|it| it.path == path).unwrap().version;
    // What changes places in one step.
    let writes = [
        write("w/d", 0, file()),
        write("w/d/e/f", base("w/d/e/f"), None),
        write("w/k", base("w/k"), directory()),
        write("w/k/l", 0, file()),
    ];
    assert!(refused(&writes).await.is_empty());
    db.execute("UPDATE workspace_files SET path = 'w/d/x' WHERE path = 'w/k0'").await;
    let paths = ["w/d", "w/d/x", "w/k/l", "w/none"].map(str::to_owned);
    let deleted = db.store.delete_shadowed_files(TENANT, &paths).await.unwrap();
    assert_eq!(deleted.into_iter().collect::<Vec<_>>(), ["w/d/x"]);
    let there = beneath(&db, "w", None).await.paths;
    let there: Vec<&str> = there.iter().map(|it| it.path.as_str()).collect();
    assert_eq!(there, ["w/d", "w/k", "w/k/l"]);
    // A caller writes while the run is there of which the files are.
    let writes = [write("late", 0, directory())];
    let by = FileWriter::Caller(Some(Uuid::now_v7()));
    let written = db.store.write_files(TENANT, by, once(&writes)).await.unwrap();
    assert_eq!(written, PathsWritten::Orphaned);
}

async fn changes_are_found_by_their_version(db: Db) {
    let directory = || Some(KeptContent::Directory);
    let link = || Some(KeptContent::Link("../x".to_owned()));
    let paths = ["w", "w-beside", "w/a", "w/b/c", "w0", "ü"];
    let writes: Vec<_> = paths.iter().map(|path| write(path, 0, directory())).collect();
    let (first, _) = done(&db, &writes).await;
    let names = |changed: PathsChanged| -> Vec<String> {
        changed.paths.into_iter().map(|it| it.path).collect()
    };
    assert_eq!(names(beneath(&db, "w", None).await), ["w/a", "w/b/c"]);
    assert_eq!(names(beneath(&db, ".", None).await), paths);
    let (second, _) = done(&db, &[write("w/a", first, None), write("w/l", 0, link())]).await;
    let changed = beneath(&db, "w", Some(first)).await;
    assert_eq!((changed.version, changed.is_all), (second, false));
    assert_eq!(changed.paths[0].content, None);
    assert_eq!(changed.paths[1].content, link());
    assert_eq!(names(beneath(&db, "w", Some(second)).await), Vec::<String>::new());
    assert_eq!(db.store.files_version("another").await.unwrap(), 0);

    // Where deletions are forgotten, everything is told.
    db.store.purge_deleted_files(later()).await.unwrap();
    let changed = beneath(&db, "w", Some(first)).await;
    assert!(changed.is_all);
    assert_eq!(names(changed), ["w/b/c", "w/l"]);
    assert!(!beneath(&db, "w", Some(second)).await.is_all);
}

async fn contents_go_when_no_path_has_them(db: Db) {
    let a = stored(&db, "aa11").await;
    let (first, _) = done(&db, &[write("x", 0, Some(file(&a, "aa11")))]).await;
    let (_, _) = done(&db, &[write("y", 0, Some(file(&a, "aa11")))]).await;
    assert_eq!(stored(&db, "aa11").await, a, "it is kept once");
    let ObjectClaim::New(never) = db.store.claim_object(TENANT, "cc33").await.unwrap() else {
        panic!()
    };
    // One path has it no more, another one does.
    done(&db, &[write("x", first, None)]).await;
    assert!(
        db.store.unused_objects(Utc::now() - TimeDelta::hours(1), 10).await.unwrap().is_empty()
    );
    assert_eq!(db.store.unused_objects(later(), 10).await.unwrap(), [never.as_str()]);
    assert!(!db.store.object_stored(&never).await.unwrap(), "it came too late");
    db.store.forget_objects(&[never]).await.unwrap();
    assert!(db.store.unused_objects(later(), 10).await.unwrap().is_empty());

    let deleted = db.store.files_at(TENANT, &["y".to_owned()]).await.unwrap().remove(0);
    done(&db, &[write("y", deleted.version, None)]).await;
    assert_eq!(db.store.unused_objects(later(), 10).await.unwrap(), [a.as_str()]);
    // What is being deleted is neither referred to nor put again under the same name.
    let late = [write("z", 0, Some(file(&a, "aa11")))];
    let written =
        db.store.write_files(TENANT, FileWriter::Caller(None), once(&late)).await.unwrap();
    assert_eq!(written, PathsWritten::Lost);
    let again = stored(&db, "aa11").await;
    assert_ne!(again, a);
    db.store.forget_objects(&[a, again.clone()]).await.unwrap();
    assert!(done(&db, &[write("z", 0, Some(file(&again, "aa11")))]).await.1.is_empty());
    // Tenants share no contents.
    let of_another = db.store.claim_object("another", "aa11").await.unwrap();
    assert!(matches!(of_another, ObjectClaim::New(_)));
}

async fn two_that_write_at_once_have_one_after_the_other(db: Db) {
    let writers = (0..20).map(|number| {
        let store = Arc::clone(&db.store);
        async move {
            let path = format!("p{number}");
            let writes = [
                write(&path, 0, Some(KeptContent::Directory)),
                write("same", 0, Some(KeptContent::Link(path.clone()))),
            ];
            let by = FileWriter::Caller(None);
            match store.write_files(TENANT, by, once(&writes)).await.unwrap() {
                PathsWritten::Done { version, changed_by_others } => (version, changed_by_others),
                other => panic!("{other:?}"),
            }
        }
    });
    let written = futures::future::join_all(writers).await;
    let mut versions: Vec<i64> = written.iter().map(|(version, _)| *version).collect();
    versions.sort_unstable();
    assert_eq!(versions, (1..=20).collect::<Vec<_>>());
    assert_eq!(written.iter().filter(|(_, refused)| refused.is_empty()).count(), 1);
}

/// A purge between the two reads of a reader hides no deletion from it.
#[tokio::test]
async fn postgres_deletions_that_are_purged_while_they_are_read_are_found() {
    let db = Db::postgres().await;
    let (first, _) = done(&db, &[write("w/x", 0, Some(KeptContent::Directory))]).await;
    done(&db, &[write("w/x", first, None)]).await;
    let mut observer = PgConnection::connect(&db.url).await.unwrap();
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let mut purge = connection.begin().await.unwrap();
    for statement in [
        "LOCK TABLE workspace_files",
        "UPDATE workspaces SET purged = version",
        "DELETE FROM workspace_files WHERE kind = 'gone'",
    ] {
        sqlx::query(statement).execute(&mut *purge).await.unwrap();
    }
    let store = Arc::clone(&db.store);
    let read =
        tokio::spawn(async move { store.files_since(TENANT, "w", Some(first)).await.unwrap() });
    super::ownership::until_blocked(&mut observer).await;
    purge.commit().await.unwrap();
    let changed = read.await.unwrap();
    assert!(changed.is_all && changed.paths.is_empty(), "{changed:?}");
}
