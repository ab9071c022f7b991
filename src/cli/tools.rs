//! `toolloop tools import`: makes files of `tools_dir` from descriptions of APIs.
//!
//! What is written is the operator's to look through: methods suggest effects, and nothing is kept
//! of where it came from.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};

use super::UsageError;
use super::invoke::CallArgs;
use super::output::{print, print_notice};
use crate::tools::declared::openapi::{Document, Imported};
use crate::tools::declared::{read_document, readable, written};

#[derive(Debug, Subcommand)]
pub(super) enum ToolsCommand {
    /// Write operations of an OpenAPI document as a file of tools; without any, list them
    Import(ImportArgs),
    /// Call one tool as an agent, under its gate; no model is asked
    Call(CallArgs),
}

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// The document, OpenAPI 3.0 or 3.1 in JSON or YAML
    file: PathBuf,
    /// The operationId of an operation; can be repeated
    #[arg(long = "operation", value_name = "ID")]
    operations: Vec<String>,
    /// The file to write, e.g. tools/issues.yaml [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) fn import(args: ImportArgs) -> anyhow::Result<()> {
    let ImportArgs { file, operations, output } = args;
    let document = read_document(&file)
        .and_then(|root| Document::of(root).map_err(|wrong| format!("{} {wrong}", file.display())))
        .map_err(UsageError)?;
    if operations.is_empty() {
        print(&document.listed().join("\n"))?;
        return Ok(());
    }
    let mut entries = Vec::with_capacity(operations.len());
    let (mut refused, mut parts) = (Vec::new(), Vec::new());
    for id in &operations {
        match document.operation(id) {
            Ok(Imported { entry, left_out }) => {
                entries.push(entry);
                parts.extend(left_out.into_iter().map(|part| (id, part)));
            }
            Err(why) => refused.push(why),
        }
    }
    if entries.is_empty() {
        return Err(UsageError(refused.join("\n")).into());
    }
    for why in refused {
        print_notice(&format!("left out: {why}"));
    }
    for (id, part) in parts {
        print_notice(&format!("left out of the operation {id:?}: {part}"));
    }
    let text = written::yaml(document.base_url().as_deref(), &entries);
    readable(&text).map_err(|why| {
        UsageError(format!("these operations do not fit in one file of tools, import fewer: {why}"))
    })?;
    match output {
        Some(output) => std::fs::write(&output, text)
            .with_context(|| format!("{} cannot be written", output.display()))?,
        None => print(text.trim_end())?,
    }
    Ok(())
}
