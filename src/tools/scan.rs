//! The injection scan of what a run reads: results of tools, its inputs and what it recalls.
//!
//! This file decides how a suspicious text is treated; whether it is suspicious is decided by
//! [`crate::governance::injection`]. Only text of tools is scanned, and not the service's own messages.

use serde_json::Value;

use super::results::withheld;
use crate::event::{CallFailure, ScanSource, ScanWarned, Suspicion, ToolCallCompleted};
use crate::governance::injection::{scan, scan_json};
use crate::message::CallTarget;
use crate::run::OnInjection;

/// Scans the result of a call. If it is suspicious, returns a warning, and withholds the result if the
/// definition demands it.
pub fn scan_result(call: &mut ToolCallCompleted, rule: OnInjection) -> Option<ScanWarned> {
    let is_of_tool = call.failure.is_none_or(CallFailure::is_of_tool);
    if rule == OnInjection::Off || call.target != CallTarget::Tool || !is_of_tool {
        return None;
    }
    let suspicion = scan(&call.content)?;
    let is_withheld = rule == OnInjection::Block;
    if is_withheld {
        withheld(call, &suspicion);
    }
    Some(ScanWarned {
        call_id: Some(call.call_id),
        tool: Some(call.tool.clone()),
        source: ScanSource::Result,
        pointer: None,
        withheld: is_withheld,
        suspicion,
    })
}

/// Why inputs are suspicious, with a pointer into the request body.
pub fn scan_inputs(inputs: &Value) -> Option<ScanWarned> {
    let (pointer, suspicion) = scan_json(inputs)?;
    Some(warned(ScanSource::Input, Some(format!("/inputs{pointer}")), suspicion))
}

/// Why a text that a caller gives is suspicious.
pub fn scan_text(text: &str) -> Option<Suspicion> {
    scan(text)
}

/// Scans memories; returns those that may be used, and warnings about suspicious ones.
pub fn scan_memories(memories: Vec<String>, rule: OnInjection) -> (Vec<String>, Vec<ScanWarned>) {
    if rule == OnInjection::Off {
        return (memories, Vec::new());
    }
    let mut warnings = Vec::new();
    let mut kept = memories;
    kept.retain(|memory| {
        let Some(suspicion) = scan(memory) else { return true };
        let is_withheld = rule == OnInjection::Block;
        let warning = warned(ScanSource::Memory, None, suspicion);
        warnings.push(ScanWarned { withheld: is_withheld, ..warning });
        !is_withheld
    });
    (kept, warnings)
}

fn warned(source: ScanSource, pointer: Option<String>, suspicion: Suspicion) -> ScanWarned {
    ScanWarned { call_id: None, tool: None, source, pointer, withheld: false, suspicion }
}
