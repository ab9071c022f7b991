//! Command lines as models and rules write them: simple commands, joined by pipes, `&&`, `||` and
//! `;`, with quotes and redirections; and nothing else of what a shell can do.
//!
//! Unsupported syntax is refused with advice on what to write instead. The text is checked before
//! the parser sees it: the length is bounded and nesting is refused, because the parser recurses and
//! panics on a few inputs. Nothing is expanded; a word says which of its characters are patterns.
//! A parsing mistake cannot hide a command: the parsed commands are what is judged and executed, and
//! never the text.

use std::panic::{AssertUnwindSafe, catch_unwind};

use brush_parser::ast::{
    self, AndOr, CommandPrefixOrSuffixItem as Item, IoFileRedirectKind as Kind,
    IoFileRedirectTarget as To, IoRedirect,
};

use super::Refused;

/// Bytes of a command line.
pub const MAX_LINE: usize = 8 * 1024;
/// Words of a command line.
const MAX_WORDS: usize = 1000;
/// Commands of a command line.
const MAX_COMMANDS: usize = 50;

/// Commands that are built into shells and are no programs, and those that would run another text.
const SHELL_BUILTINS: &[&str] = &[
    ".",
    ":",
    "alias",
    "bg",
    "bind",
    "builtin",
    "caller",
    "command",
    "compgen",
    "complete",
    "declare",
    "dirs",
    "disown",
    "enable",
    "eval",
    "exec",
    "exit",
    "export",
    "fc",
    "fg",
    "getopts",
    "hash",
    "help",
    "history",
    "jobs",
    "let",
    "local",
    "logout",
    "mapfile",
    "popd",
    "pushd",
    "read",
    "readarray",
    "readonly",
    "return",
    "set",
    "shift",
    "shopt",
    "source",
    "suspend",
    "times",
    "trap",
    "type",
    "typeset",
    "ulimit",
    "umask",
    "unalias",
    "unset",
    "wait",
];
/// Variables that may be set for one command: they change how it writes, not what it runs or reads.
const VARIABLES: &[&str] = &[
    "CI",
    "CLICOLOR",
    "COLUMNS",
    "DEBIAN_FRONTEND",
    "FORCE_COLOR",
    "LANG",
    "LANGUAGE",
    "LINES",
    "NODE_ENV",
    "NO_COLOR",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "RUST_BACKTRACE",
    "SOURCE_DATE_EPOCH",
    "TERM",
    "TZ",
];

/// A whole command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    pub pipelines: Vec<Pipeline>,
}

/// After which outcome of the preceding pipelines a pipeline runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    Always,
    AfterSuccess,
    AfterFailure,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    pub runs: Runs,
    /// Whether `!` stands before it.
    pub negated: bool,
    pub commands: Vec<SimpleCommand>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimpleCommand {
    /// Variables that are set for it.
    pub variables: Vec<(String, Word)>,
    /// The program and its arguments: at least one word.
    pub words: Vec<Word>,
    pub redirections: Vec<Redirection>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirection {
    /// 0, 1 or 2.
    pub stream: u8,
    pub to: Target,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Read(Word),
    Write(Word),
    Append(Word),
    /// Another of the three.
    Stream(u8),
}

/// A word, quotes removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Word {
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    text: String,
    is_quoted: bool,
}

impl Word {
    /// The text that a program gets as its argument if no pattern is expanded.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|piece| piece.text.as_str()).collect()
    }

    /// Whether it is a pattern of paths.
    pub fn is_pattern(&self) -> bool {
        self.pieces.iter().any(|piece| !piece.is_quoted && piece.text.contains(['*', '?', '[']))
    }

    /// The pattern, with what is quoted escaped.
    pub fn pattern(&self) -> String {
        let special = |c: char| "*?[]{}!\\".contains(c);
        let mut pattern = String::new();
        for Piece { text, is_quoted } in &self.pieces {
            for c in text.chars() {
                if special(c) && (*is_quoted || "{}\\".contains(c)) {
                    pattern.push('\\');
                }
                pattern.push(c);
            }
        }
        pattern
    }

    fn push(&mut self, c: char, quoted: bool) {
        match self.pieces.last_mut() {
            Some(piece) if piece.is_quoted == quoted => piece.text.push(c),
            _ => self.pieces.push(Piece { text: c.into(), is_quoted: quoted }),
        }
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T, Refused> {
    Err(Refused(why.into()))
}

/// Reads a command line.
///
/// # Errors
/// What in it cannot be run, and what to do instead.
pub fn parse(line: &str) -> Result<CommandLine, Refused> {
    let line = line.trim_matches([' ', '\t', '\n']);
    if line.is_empty() {
        return refused("is empty");
    }
    if line.len() > MAX_LINE {
        return refused(format!("is longer than {MAX_LINE} bytes; put long texts into a file"));
    }
    look_through(line)?;
    let parsed = catch_unwind(AssertUnwindSafe(|| program(line)));
    let program = parsed.unwrap_or_else(|_| refused("cannot be read as a command line"))?;
    let mut pipelines = Vec::new();
    for list in program.complete_commands {
        for ast::CompoundListItem(list, separator) in list.0 {
            if matches!(separator, ast::SeparatorOperator::Async) {
                return refused("runs something in the background with &, which is not possible");
            }
            pipelines.push(pipeline(Runs::Always, list.first)?);
            for next in list.additional {
                pipelines.push(match next {
                    AndOr::And(next) => pipeline(Runs::AfterSuccess, next)?,
                    AndOr::Or(next) => pipeline(Runs::AfterFailure, next)?,
                });
            }
        }
    }
    let commands = || pipelines.iter().flat_map(|pipeline| &pipeline.commands);
    if commands().count() == 0 {
        return refused("has no command");
    }
    if commands().count() > MAX_COMMANDS {
        return refused(format!("has more than {MAX_COMMANDS} commands; use several calls"));
    }
    if commands().map(|command| command.words.len()).sum::<usize>() > MAX_WORDS {
        return refused(format!("has more than {MAX_WORDS} words; use several calls"));
    }
    Ok(CommandLine { pipelines })
}

fn program(line: &str) -> Result<ast::Program, Refused> {
    let options = brush_parser::ParserOptions {
        enable_extended_globbing: false,
        tilde_expansion_at_word_start: false,
        ..Default::default()
    };
    let unreadable = |_| Refused("is not a complete command line; look at its quotes".to_owned());
    let tokens = brush_parser::uncached_tokenize_str(line, &options.tokenizer_options())
        .map_err(|error| unreadable(error.to_string()))?;
    brush_parser::parse_tokens(&tokens, &options).map_err(|error| unreadable(error.to_string()))
}

/// The quoting state while the characters of a line are checked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quoted {
    No,
    Single,
    Double,
}

/// Refuses unsupported syntax by its characters, so that no nesting reaches the parser.
fn look_through(line: &str) -> Result<(), Refused> {
    let mut quoted = Quoted::No;
    let mut chars = line.char_indices().peekable();
    let mut starts_word = true;
    let mut starts_command = true;
    let mut joints = 0_usize;
    while let Some((at, c)) = chars.next() {
        let next = chars.peek().map(|(_, next)| *next);
        if c.is_control() && c != '\t' && (c != '\n' || quoted == Quoted::No) {
            return match c {
                '\n' => refused("has several lines; join the commands with && or ; in one line"),
                _ => refused(format!("has the control character {c:?}")),
            };
        }
        match (quoted, c) {
            (Quoted::Single, '\'') | (Quoted::Double, '"') => quoted = Quoted::No,
            (Quoted::Single, _) => {}
            (_, '\\') => {
                if next.is_none_or(char::is_control) {
                    return refused("has a \\ before the end of a line");
                }
                chars.next();
            }
            (_, '`') => return refused(SUBSTITUTION),
            (_, '$') => dollar(next, quoted)?,
            (Quoted::Double, _) => {}
            (Quoted::No, '\'') => quoted = Quoted::Single,
            (Quoted::No, '"') => quoted = Quoted::Double,
            (Quoted::No, '#') if starts_word => {
                return refused("has a comment; leave it out");
            }
            (Quoted::No, _) => unquoted(c, next, starts_word)?,
        }
        if quoted == Quoted::No && matches!(c, ';' | '|' | '&') {
            joints += 1;
            starts_command = true;
        } else if starts_command && !matches!(c, ' ' | '\t') {
            starts_command = begins(line.get(at..).unwrap_or_default())?;
        }
        starts_word = quoted == Quoted::No && matches!(c, ' ' | '\t' | ';' | '|' | '&' | '<' | '>');
    }
    if joints > 2 * MAX_COMMANDS {
        return refused(format!("has more than {MAX_COMMANDS} commands; use several calls"));
    }
    match quoted {
        Quoted::No => Ok(()),
        _ => refused("has a quote that is not closed"),
    }
}

/// Words that begin or end what is nested.
const RESERVED: &[&str] = &[
    "!", "[[", "]]", "case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for",
    "function", "if", "in", "select", "then", "until", "while", "{", "}",
];
const COMPOUND: &str = "has a loop, a condition, a group or a function, which are not possible; use only \
                        simple commands, pipes, &&, || and ;";
const SUBSTITUTION: &str = "has a command substitution, which is not possible; run that command by \
                            itself and put what it answers into the next one";

/// Checks the first word of a command. Returns whether the next word is a first word, too.
fn begins(rest: &str) -> Result<bool, Refused> {
    let end = rest.find([' ', '\t', ';', '|', '&', '<', '>']).unwrap_or(rest.len());
    let (word, behind) = rest.split_at(end);
    if word == "!" && !behind.trim_start().starts_with('!') {
        return Ok(true);
    }
    if RESERVED.contains(&word) {
        return refused(COMPOUND);
    }
    Ok(false)
}

fn dollar(next: Option<char>, quoted: Quoted) -> Result<(), Refused> {
    match next {
        Some('(') => refused(SUBSTITUTION),
        Some('\'' | '"') if quoted == Quoted::No => {
            refused("has a quote after $; use plain quotes")
        }
        Some(c) if c.is_alphanumeric() || "_{@*#?$!-[".contains(c) => refused(
            "has a variable after $, and variables are not expanded; write its value, or put the \
             $ into single quotes",
        ),
        _ => Ok(()),
    }
}

fn unquoted(c: char, next: Option<char>, starts_word: bool) -> Result<(), Refused> {
    match (c, next) {
        ('<' | '>', Some('(')) => refused(
            "has a process substitution, which is not possible; write to a file and read that",
        ),
        ('(' | ')', _) => refused(
            "has a bracket ( or ), and there are no subshells, functions or arrays; quote it, or \
             use only simple commands, pipes, &&, || and ;",
        ),
        ('<', Some('<')) => refused(
            "has a here-document or here-string, which is not possible; write the text to a file \
             first",
        ),
        ('~', _) if starts_word => {
            refused("has a ~, which is not expanded; paths are relative to the workspace")
        }
        _ => Ok(()),
    }
}

fn pipeline(runs: Runs, written: ast::Pipeline) -> Result<Pipeline, Refused> {
    if written.timed.is_some() {
        return refused("uses time, which is a part of a shell; the result tells the duration");
    }
    let commands = written.seq.into_iter().map(|command| match command {
        ast::Command::Simple(simple) => simple_command(simple),
        _ => refused(COMPOUND),
    });
    let commands = commands.collect::<Result<_, _>>()?;
    Ok(Pipeline { runs, negated: written.bang, commands })
}

fn simple_command(written: ast::SimpleCommand) -> Result<SimpleCommand, Refused> {
    let mut command =
        SimpleCommand { variables: Vec::new(), words: Vec::new(), redirections: Vec::new() };
    for item in written.prefix.map(|prefix| prefix.0).unwrap_or_default() {
        match item {
            Item::AssignmentWord(assignment, _) => command.variables.push(variable(assignment)?),
            other => add(&mut command, other)?,
        }
    }
    if let Some(name) = written.word_or_name {
        command.words.push(word(&name.value)?);
    }
    for item in written.suffix.map(|suffix| suffix.0).unwrap_or_default() {
        add(&mut command, item)?;
    }
    let Some(program) = command.words.first() else {
        return refused("has variables or redirections without a command");
    };
    let name = program.text();
    if name.is_empty() || (program.is_pattern() && name != "[") {
        return refused("has a command whose name is empty or a pattern");
    }
    if SHELL_BUILTINS.contains(&name.as_str()) {
        return refused(format!("uses {name}, which is a part of a shell and no program"));
    }
    Ok(command)
}

fn add(command: &mut SimpleCommand, item: Item) -> Result<(), Refused> {
    match item {
        Item::Word(written) | Item::AssignmentWord(_, written) => {
            command.words.push(word(&written.value)?);
        }
        Item::IoRedirect(written) => redirection(&mut command.redirections, written)?,
        Item::ProcessSubstitution(..) => return refused(SUBSTITUTION),
    }
    Ok(())
}

fn variable(written: ast::Assignment) -> Result<(String, Word), Refused> {
    let (ast::AssignmentName::VariableName(name), ast::AssignmentValue::Scalar(value), false) =
        (written.name, written.value, written.append)
    else {
        return refused("sets a part of a variable, which is not possible");
    };
    if !VARIABLES.contains(&name.as_str()) && !name.starts_with("LC_") {
        let name = super::text::shortened(&name);
        return refused(format!(
            "sets the variable {name}, which may change what programs run; leave it out"
        ));
    }
    Ok((name, word(&value.value)?))
}

fn redirection(to: &mut Vec<Redirection>, written: IoRedirect) -> Result<(), Refused> {
    let unusual =
        || Refused("has an unusual redirection; possible are <, >, >>, 2>, 2>&1 and &>".into());
    let stream = |given: Option<ast::IoFd>, usual: u8| match given {
        None => Ok(usual),
        Some(given) => u8::try_from(given).ok().filter(|fd| *fd <= 2).ok_or_else(unusual),
    };
    let add = |stream, target| Redirection { stream, to: target };
    match written {
        IoRedirect::OutputAndError(file, appends) => {
            let file = word(&file.value)?;
            to.push(add(1, if appends { Target::Append(file) } else { Target::Write(file) }));
            to.push(add(2, Target::Stream(1)));
        }
        IoRedirect::File(fd, Kind::Read, To::Filename(file)) => {
            to.push(add(stream(fd, 0)?, Target::Read(word(&file.value)?)));
        }
        IoRedirect::File(fd, Kind::Write | Kind::Clobber, To::Filename(file)) => {
            to.push(add(stream(fd, 1)?, Target::Write(word(&file.value)?)));
        }
        IoRedirect::File(fd, Kind::Append, To::Filename(file)) => {
            to.push(add(stream(fd, 1)?, Target::Append(word(&file.value)?)));
        }
        IoRedirect::File(fd, Kind::DuplicateOutput, To::Fd(other)) => {
            to.push(add(stream(fd, 1)?, Target::Stream(stream(Some(other), 0)?)));
        }
        IoRedirect::File(fd, Kind::DuplicateOutput, To::Duplicate(other)) => {
            let other = word(&other.value)?.text();
            let other: u8 = other.parse().ok().filter(|fd| *fd <= 2).ok_or_else(unusual)?;
            to.push(add(stream(fd, 1)?, Target::Stream(other)));
        }
        _ => return Err(unusual()),
    }
    Ok(())
}

/// Removes the quotes of a word.
fn word(raw: &str) -> Result<Word, Refused> {
    let mut word = Word::default();
    let mut quoted = Quoted::No;
    let mut chars = raw.chars().peekable();
    while let Some(c) = chars.next() {
        match (quoted, c) {
            (Quoted::Single, '\'') | (Quoted::Double, '"') => quoted = Quoted::No,
            (Quoted::Double, '\\') => match chars.peek().copied() {
                Some(escaped @ ('$' | '`' | '"' | '\\')) => {
                    chars.next();
                    word.push(escaped, true);
                }
                _ => word.push('\\', true),
            },
            (Quoted::Single | Quoted::Double, c) => word.push(c, true),
            (Quoted::No, '\\') => word.push(chars.next().unwrap_or('\\'), true),
            (Quoted::No, '\'') => quoted = Quoted::Single,
            (Quoted::No, '"') => quoted = Quoted::Double,
            (Quoted::No, c) => word.push(c, false),
        }
    }
    if quoted != Quoted::No {
        return refused("has a quote that is not closed");
    }
    if has_alternatives(&word) {
        return refused("has alternatives in braces, which are not expanded; write each of them");
    }
    Ok(word)
}

/// Words joined to one text. A word that could be read as several words, or as none, is quoted.
pub fn shown(words: &[String]) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=+.,:/@%^*?!~#{}[]$&|<>()\\".contains(c);
    let mut text = String::new();
    for word in words {
        if !text.is_empty() {
            text.push(' ');
        }
        if !word.is_empty() && word.chars().all(plain) {
            text.push_str(word);
        } else {
            text.push('\'');
            text.push_str(&word.replace('\'', "'\\''"));
            text.push('\'');
        }
    }
    text
}

/// Whether a shell would expand braces in the word to several words: `{a,b}` or `{1..3}`.
fn has_alternatives(word: &Word) -> bool {
    word.pieces.iter().filter(|piece| !piece.is_quoted).any(|piece| {
        piece.text.split('{').skip(1).any(|rest| {
            rest.split_once('}')
                .is_some_and(|(inner, _)| inner.contains(',') || inner.contains(".."))
        })
    })
}

#[cfg(test)]
#[path = "command_line_tests.rs"]
mod command_line_tests;
