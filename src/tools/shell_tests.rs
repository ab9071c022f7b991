//! What a model reads of long outputs.

use super::*;
use crate::tools::results::capped;
use crate::tools::sandbox::Output;

fn ran(stdout: &str, stderr: &str) -> JobResult {
    let output = |text: &str| {
        let mut output = Output::default();
        output.text.push_str(text);
        output
    };
    JobResult {
        exit_code: Some(0),
        stopped: None,
        stdout: output(stdout),
        stderr: output(stderr),
        duration: std::time::Duration::ZERO,
        level: SandboxLevel::Enforced,
    }
}

/// Bytes that a stream says are left out.
fn left_out(stream: &str) -> usize {
    let Some((_, rest)) = stream.split_once("\n[… ") else { return 0 };
    rest.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn long_outputs_stay_json_and_say_what_is_left_out() {
    let lines = "line\n".repeat(40_000);
    let quotes = "\"\\\u{1}".repeat(20_000);
    let wide = "ä".repeat(40_000);
    let short = "short";
    for (stdout, stderr) in [
        (lines.as_str(), short),
        (short, lines.as_str()),
        (&quotes, &wide),
        (&wide, &wide),
        (&lines, &quotes),
        (short, short),
    ] {
        let ran = ran(stdout, stderr);
        let text = with_streams(summary(&ran), &ran);
        assert_eq!(capped(text.clone()), text, "{} bytes", text.len());
        let result: Value = serde_json::from_str(&text).unwrap();
        for (name, all) in [("stdout", stdout), ("stderr", stderr)] {
            let shown = result[name].as_str().unwrap();
            assert!(shown.starts_with(&all[..4]) && shown.ends_with(&all[all.len() - 4..]));
            let omitted = left_out(shown);
            let note = if omitted == 0 { 0 } else { shown.len() + omitted - all.len() };
            assert!(note < 64 && (omitted > 0) == (all.len() > 40_000), "{name}: {omitted}");
        }
        let is_long = stdout.len() + stderr.len() > MAX_RESULT;
        assert_eq!(is_long, text.len() > MAX_RESULT - 512, "the room is used: {}", text.len());
    }
}
