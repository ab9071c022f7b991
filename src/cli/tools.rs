//! `toolloop tools import`: makes files of `tools_dir` from descriptions of APIs.
//!
//! What is written is the operator's to look through: methods suggest effects, and nothing is kept
//! of where it came from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::json;

use super::UsageError;
use super::invoke::CallArgs;
use super::output::{one_line, print, print_json, print_notice};
use crate::message::visible::escaped;
use crate::tools::declared::openapi::{Document, Imported, Listed};
use crate::tools::declared::{read_document, readable, yaml_output};

#[derive(Debug, Subcommand)]
pub(super) enum ToolsCommand {
    /// Write operations of an OpenAPI document as a file of tools; without any, list them
    Import(ImportArgs),
    /// Call one tool as an agent, after its permission check; no model is asked
    Call(CallArgs),
}

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// The document, OpenAPI 3.0 or 3.1 in JSON or YAML
    file: PathBuf,
    /// The operationId of an operation; can be repeated
    #[arg(long = "operation", value_name = "ID")]
    operations: Vec<String>,
    /// The file to write, e.g. tools/issues.yaml, which must not exist [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// List the operations as JSON
    #[arg(long, conflicts_with_all = ["operations", "output"])]
    json: bool,
}

pub(super) fn import(args: ImportArgs) -> anyhow::Result<()> {
    let ImportArgs { file, operations, output, json } = args;
    let document = read_document(&file, &file)
        .and_then(|root| Document::of(root).map_err(|wrong| format!("{} {wrong}", file.display())))
        .map_err(UsageError)?;
    if operations.is_empty() {
        let listed = document.listed();
        if json {
            print_json(&json!({"operations": listed}))?;
        } else {
            let line = |Listed { id, method, path }: &Listed| {
                one_line(&format!("{id}  {method} {path}"), usize::MAX)
            };
            print(&listed.iter().map(line).collect::<Vec<_>>().join("\n"))?;
        }
        return Ok(());
    }
    let listed = document.listed();
    let is_missing = |id: &&String| !listed.iter().any(|it| it.id == **id);
    let missing: Vec<&str> = operations.iter().filter(is_missing).map(String::as_str).collect();
    if !missing.is_empty() {
        let (missing, file) = (missing.join(", "), file.display());
        let why = format!("{file} has no such operation: {missing}; nothing was written");
        return Err(UsageError(why).into());
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
        print_notice(&escaped(&format!("left out: {why}")));
    }
    for (id, part) in parts {
        print_notice(&escaped(&format!("left out of the operation {id:?}: {part}")));
    }
    let text = yaml_output::write(&document.server(), &entries);
    readable(&text).map_err(|why| {
        UsageError(format!("these operations do not fit in one file of tools, import fewer: {why}"))
    })?;
    match output {
        Some(output) => write_new(&output, &text)?,
        None => print(text.trim_end())?,
    }
    Ok(())
}

/// Writes a file that is not there yet.
fn write_new(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut file = match OpenOptions::new().write(true).create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(
                UsageError(format!("{} exists; nothing was written", path.display())).into()
            );
        }
        opened => opened.with_context(|| format!("{} cannot be written", path.display()))?,
    };
    file.write_all(text.as_bytes()).with_context(|| format!("{} cannot be written", path.display()))
}
