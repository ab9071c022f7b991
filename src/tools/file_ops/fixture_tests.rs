//! What the tests of `file_ops` stand on: a workspace on a real disk, with things outside it worth
//! stealing, and calls that go through the real gate.
//!
//! It asserts nothing about operations, only that the outside is as it was.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::FileOps;
use crate::governance::{Action, Call, Gate, Permit, Policy, Verdict};
use crate::run::{Autonomy, Caller, Effect, Labels};
use crate::tools::file_locks::FileLocks;
use crate::tools::lease::Lease;
use crate::tools::requests::Requests;
use crate::tools::{
    ChangeRecorder, ChildRun, LabelRecorder, Listener, Standing, Tool, ToolContext, ToolError,
    Workspace,
};

/// What lies outside; it must show up in no answer.
pub(super) const SECRET: &str = "TOP-SECRET";

/// `home/tenant` is the workspace, everything else in `home` is outside.
pub(super) struct Fixture {
    home: TempDir,
    runtime: tokio::runtime::Runtime,
    gate: Gate,
    context: ToolContext,
    tool: FileOps,
}

/// Everything is allowed.
pub(super) fn permissive() -> Policy {
    let everything = vec!["./**".to_owned()];
    Policy {
        autonomy: Autonomy::Full,
        read: everything.clone(),
        write: everything,
        ..Policy::default()
    }
}

impl Fixture {
    pub(super) fn new() -> Self {
        Self::under(&permissive())
    }

    pub(super) fn under(policy: &Policy) -> Self {
        let home = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(home.path(), "tenant", ".").unwrap();
        fs::write(home.path().join("outside.txt"), SECRET).unwrap();
        fs::create_dir(home.path().join("tenant-evil")).unwrap();
        fs::write(home.path().join("tenant-evil/secret.txt"), SECRET).unwrap();
        let context = ToolContext {
            run_id: Uuid::nil(),
            agent: "a".into(),
            caller: Arc::new(Caller::local()),
            call_id: Uuid::nil(),
            effect_key: String::new(),
            traceparent: None,
            workspace,
            standing: Standing::new(
                Arc::new(Lease::new(Duration::from_hours(1))),
                CancellationToken::new(),
            ),
            read_labels: LabelRecorder::default(),
            child_run: ChildRun::default(),
            listener: Listener::default(),
            changed: ChangeRecorder::default(),
            has_network: false,
            requests: Requests::default(),
            input: None,
        };
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
        Self { home, runtime, gate: Gate::new(policy).unwrap(), context, tool: FileOps::new() }
    }

    /// On a volume that replicas share.
    pub(super) fn on_volume() -> Self {
        let mut world = Self::new();
        let locks = FileLocks::on_volume(world.home.path().to_owned());
        world.context.workspace = world.context.workspace.locked_by(&locks);
        world
    }

    pub(super) fn outside(&self) -> &Path {
        self.home.path()
    }

    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.home.path().join("tenant").join(path)
    }

    pub(super) fn workspace(&self) -> &Workspace {
        &self.context.workspace
    }

    /// Puts a file, with its directories.
    pub(super) fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), content).unwrap();
    }

    pub(super) fn text(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap()
    }

    /// Every way out that a file system offers.
    pub(super) fn put_traps(&self) {
        for (link, target) in [
            ("leak", "../outside.txt"),
            ("abs", "/etc/passwd"),
            ("up", ".."),
            ("sibling", "../tenant-evil"),
            ("proc", "/proc/self/root"),
            ("loop", "loop"),
            ("chain", "up/outside.txt"),
            ("dangling", "../not-there-yet"),
        ] {
            let _ = symlink(target, self.at(link));
        }
        let _ = fs::hard_link(self.outside().join("outside.txt"), self.at("hard"));
        let _ = mknodat(CWD, self.at("fifo"), FileType::Fifo, Mode::RWXU, 0);
    }

    /// That what lies outside is as it was.
    pub(super) fn assert_outside_is_untouched(&self) {
        let mut names: Vec<_> =
            fs::read_dir(self.outside()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["outside.txt", "tenant", "tenant-evil"]);
        let evil: Vec<_> = fs::read_dir(self.outside().join("tenant-evil"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(evil, ["secret.txt"]);
        for path in ["outside.txt", "tenant-evil/secret.txt"] {
            assert_eq!(fs::read_to_string(self.outside().join(path)).unwrap(), SECRET, "{path}");
        }
    }

    pub(super) fn actions(&self, arguments: &Value) -> Result<Vec<Action>, String> {
        self.runtime.block_on(self.tool.actions(arguments, &self.context)).map_err(message_of)
    }

    /// What the gate gives for a call, or its reason.
    pub(super) fn permit(&self, arguments: &Value) -> Result<Permit, String> {
        let call = Call {
            tool: "file_ops",
            effect: Effect::Once,
            actions: self.actions(arguments)?.into(),
            is_undeclared: false,
            approved_by: None,
            labels: Labels::default(),
            skills: &[],
            directory: self.context.workspace.directory(),
        };
        match self.gate.judge(&["tools:execute".to_owned()], call) {
            Verdict::Pass { permit, .. } => Ok(permit),
            Verdict::Stop(objection) => Err(objection.reason),
        }
    }

    pub(super) fn execute(&self, permit: Permit, arguments: &Value) -> Result<String, String> {
        self.runtime
            .block_on(self.tool.execute(permit, arguments.clone(), &self.context))
            .map_err(message_of)
    }

    /// A whole call.
    pub(super) fn call(&self, arguments: &Value) -> Result<String, String> {
        let permit = self.permit(arguments)?;
        self.execute(permit, arguments)
    }

    /// Whether a call waits while no thread is free that may block, first for its actions and then to be executed.
    pub(super) fn waits_for_threads(&self, arguments: &Value) -> [bool; 2] {
        let permit = self.permit(arguments).unwrap();
        let actions = self.waits(self.tool.actions(arguments, &self.context));
        let execution = self.tool.execute(permit, arguments.clone(), &self.context);
        [actions, self.waits(execution)]
    }

    fn waits<T>(&self, work: impl Future<Output = Result<T, ToolError>>) -> bool {
        self.runtime.block_on(async {
            let (free, is_free) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || is_free.recv());
            let mut work = pin!(work);
            let waits = work.as_mut().now_or_never().is_none();
            drop(free);
            assert!(busy.await.unwrap().is_err());
            if waits {
                work.await.map_err(message_of).unwrap();
            }
            waits
        })
    }
}

fn message_of(error: ToolError) -> String {
    match error {
        ToolError::ForModel(text) => text,
        ToolError::Fatal(text) => panic!("the run would end: {text}"),
        ToolError::OverBudget(why) => panic!("no tool for files starts a run: {why}"),
        ToolError::AwaitsChild(child) => panic!("no tool for files starts a run: {child}"),
        ToolError::AwaitsInput(asked) => panic!("no tool for files asks: {asked:?}"),
    }
}
