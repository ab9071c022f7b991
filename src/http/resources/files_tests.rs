//! A change of a file and its record.

use tokio::sync::oneshot;

use super::*;
use crate::store::{AuditFilter, Page, open};
use crate::tools::stored_files::ListError;

#[tokio::test]
async fn a_change_is_recorded_where_its_client_goes_away() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("files.db").display());
    let store = open(&url, 1, false).await.unwrap();
    store.migrate().await.unwrap();
    let (go_on, changed) = oneshot::channel::<String>();
    let change = async move { Ok::<String, ChangeError>(changed.await.unwrap()) };
    let act = |path: &String| Act {
        tenant: "t".into(),
        subject: "k".into(),
        action: AuditAction::FileDeleted,
        run_id: None,
        reason: None,
        details: json!({"path": path}),
    };
    let request = recorded(&store, "t", change, act);
    assert!(tokio::time::timeout(Duration::from_millis(20), request).await.is_err());
    go_on.send("a.txt".to_owned()).unwrap(); // the change goes on
    let all = Page { limit: 9, after: None };
    for _ in 0..1000 {
        let rows = store.audit("t", &AuditFilter::default(), &all).await.unwrap();
        if let Some(row) = rows.first() {
            assert_eq!(row.action.as_str(), "file.deleted");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the change is not recorded");
}

#[test]
fn a_list_of_too_many_files_asks_for_a_prefix() {
    let problem = Problem::from(ListError::TooMany);
    assert_eq!(problem.code(), Code::InvalidParameter);
}
