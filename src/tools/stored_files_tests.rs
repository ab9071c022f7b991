//! Files that are put in their places, and taken back.

use std::path::PathBuf;

use super::*;

fn workspace() -> (tempfile::TempDir, Workspace, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let workspace = Workspace::open(root.path(), "t", "w").unwrap();
    let directory = root.path().join("t/w");
    for name in ["a", "b"] {
        std::fs::write(directory.join(name), "old").unwrap();
    }
    (root, workspace, directory)
}

fn new_files(workspace: &Workspace) -> Vec<NewFile> {
    let new = |path: &str| NewFile {
        path: path.to_owned(),
        staged: StagedFile::with(&workspace.root(), "new file", None).unwrap(),
        size: 8,
    };
    ["a", "d/n", "b"].into_iter().map(new).collect()
}

fn contents(directory: &std::path::Path) -> [String; 3] {
    let read = |path: &str| std::fs::read_to_string(directory.join(path)).unwrap_or_default();
    ["a", "d/n", "b"].map(read)
}

#[test]
fn files_are_placed_all_or_none() {
    let (_root, workspace, directory) = workspace();
    let last = directory.join("b");
    let changing: Condition = Box::new(move |_| {
        std::fs::write(&last, "theirs").unwrap(); // after it was looked at
        true
    });
    let stored = StoredFiles::default();
    let refused = stored.place(&workspace, &new_files(&workspace), Some(&changing));
    assert!(matches!(refused, Err(ChangeError::Condition)), "{refused:?}");
    assert_eq!(contents(&directory), ["old", "", "theirs"]);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2, "nothing else is left");
}

#[test]
fn what_was_placed_is_taken_back_unless_it_has_changed_since() {
    let (_root, workspace, directory) = workspace();
    let new = new_files(&workspace);
    let placements = StoredFiles::default().place(&workspace, &new, None).unwrap();
    let are_new: Vec<bool> = placements.iter().map(|placement| placement.is_new).collect();
    assert_eq!(are_new, [false, true, false]);
    assert_eq!(contents(&directory), ["new file", "new file", "new file"]);
    std::fs::write(directory.join("b"), "theirs").unwrap();
    let placed: Vec<(NewFile, Placement)> = new.into_iter().zip(placements).collect();
    assert_eq!(StoredFiles::take_back(&workspace, &placed), ["a", "d/n", "d"]);
    assert_eq!(contents(&directory), ["old", "", "theirs"]);
    drop(placed);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2, "nothing else is left");
}

#[test]
fn a_file_does_not_change_places_with_a_directory() {
    let (_root, workspace, directory) = workspace();
    std::fs::create_dir(directory.join("c")).unwrap();
    let staged = StagedFile::with(&workspace.root(), "new file", None).unwrap();
    let refused = staged.exchange(&workspace.root(), "c").unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::IsADirectory);
    assert!(directory.join("c").is_dir());
}

#[test]
fn a_list_says_where_there_are_too_many_files() {
    let (_root, workspace, _) = workspace();
    assert_eq!(paths(&workspace, "", 2).unwrap().len(), 2);
    assert!(matches!(paths(&workspace, "", 1), Err(ListError::TooMany)));
}
