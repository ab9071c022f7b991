//! A change of a file whose client goes away, and lists that are too long.

use tokio::sync::oneshot;

use super::*;
use crate::tools::stored_files::ListError;

#[tokio::test]
async fn a_change_is_completed_where_its_client_goes_away() {
    let (go_on, may_go_on) = oneshot::channel::<()>();
    let (done, is_done) = oneshot::channel::<()>();
    let change = async move {
        may_go_on.await.unwrap();
        done.send(()).unwrap();
        Ok::<(), Problem>(())
    };
    let request = completed("t", change);
    assert!(tokio::time::timeout(Duration::from_millis(20), request).await.is_err());
    go_on.send(()).unwrap(); // the change goes on
    is_done.await.unwrap();
}

#[test]
fn a_list_of_too_many_files_asks_for_a_prefix() {
    let problem = Problem::from(ListError::TooMany);
    assert_eq!(problem.code(), Code::InvalidParameter);
}
