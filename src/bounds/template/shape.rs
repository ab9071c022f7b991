//! Bounds the length and the nesting of the tags of a template, by its tokens: the parser and the
//! compiler recurse as deep as the nesting.

use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use super::TemplateError;

/// Bytes of one tag.
pub(super) const MAX_TAG: usize = 8 * 1024;
/// Operators, filters, look-ups and brackets of one tag.
pub(super) const MAX_OPERATORS: usize = 200;
/// Brackets in one another.
pub(super) const MAX_BRACKETS: usize = 32;
/// Statements in one another, where a further `elif` counts as one.
pub(super) const MAX_STATEMENTS: usize = 64;
/// The number of any of these up to which the ordinary stack is enough.
const SHALLOW: usize = 8;

/// Words that are operators.
const OPERATORS: [&str; 8] = ["and", "else", "elif", "if", "in", "is", "not", "or"];
/// Statements that have an end; `set` is one where it assigns nothing.
const WITH_END: [&str; 7] = ["autoescape", "call", "filter", "for", "if", "macro", "with"];

/// Whether a source needs a large stack.
///
/// # Errors
/// What of it is too much.
pub(super) fn is_deep(
    source: &str,
    is_expression: bool,
    syntax: SyntaxConfig,
) -> Result<bool, TemplateError> {
    let mut shape = Shape::default();
    if is_expression {
        shape.tag = Some(Tag::default());
    }
    // What is no token is an error of the parser, which reads nothing beyond it.
    for (token, span) in tokenize(source, is_expression, syntax).map_while(Result::ok) {
        shape.take(&token, span)?;
    }
    Ok(shape.most > SHALLOW)
}

#[derive(Default)]
struct Shape<'s> {
    tag: Option<Tag<'s>>,
    /// Open statements, each with its branches.
    statements: Vec<usize>,
    /// The largest count so far.
    most: usize,
}

/// A tag that is being read.
#[derive(Default)]
struct Tag<'s> {
    start: usize,
    word: Option<&'s str>,
    operators: usize,
    brackets: usize,
    assigns: bool,
}

impl<'s> Shape<'s> {
    fn take(&mut self, token: &Token<'s>, span: Span) -> Result<(), TemplateError> {
        if matches!(token, Token::VariableStart | Token::BlockStart) {
            self.tag = Some(Tag { start: span.start_offset as usize, ..Tag::default() });
            return Ok(());
        }
        let Some(tag) = &mut self.tag else { return Ok(()) };
        match token {
            Token::VariableEnd => self.tag = None,
            Token::BlockEnd => {
                let tag = self.tag.take().unwrap_or_default();
                self.statement(&tag);
            }
            token => tag.take(token),
        }
        let (length, operators, brackets) = self.tag.as_ref().map_or((0, 0, 0), |tag| {
            (span.end_offset as usize - tag.start, tag.operators, tag.brackets)
        });
        let statements = self.statements.iter().sum();
        self.most = self.most.max(operators).max(brackets).max(statements);
        for (count, limit, what) in [
            (length, MAX_TAG, "bytes in one tag"),
            (operators, MAX_OPERATORS, "operators, filters and look-ups in one tag"),
            (brackets, MAX_BRACKETS, "brackets in one another"),
            (statements, MAX_STATEMENTS, "statements and branches in one another"),
        ] {
            if count > limit {
                return Err(TemplateError {
                    line: Some(usize::from(span.start_line)),
                    kind: format!("it has more than {limit} {what}"),
                    detail: None,
                });
            }
        }
        Ok(())
    }

    fn statement(&mut self, tag: &Tag<'_>) {
        match tag.word {
            Some("elif") => {
                if let Some(branches) = self.statements.last_mut() {
                    *branches += 1;
                }
            }
            Some("set") if !tag.assigns => self.statements.push(1),
            Some(word) if WITH_END.contains(&word) => self.statements.push(1),
            Some(word) if word.starts_with("end") => {
                self.statements.pop();
            }
            _ => {}
        }
    }
}

impl<'s> Tag<'s> {
    fn take(&mut self, token: &Token<'s>) {
        match token {
            Token::Ident(word) => {
                self.word.get_or_insert(word);
                self.operators += usize::from(OPERATORS.contains(word));
            }
            Token::Assign => self.assigns |= self.brackets == 0,
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => {
                self.operators += 1;
                self.brackets += 1;
            }
            Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                self.brackets = self.brackets.saturating_sub(1);
            }
            Token::Str(_)
            | Token::String(_)
            | Token::Int(_)
            | Token::Int128(_)
            | Token::Float(_)
            | Token::Comma
            | Token::Colon => {}
            _ => self.operators += 1,
        }
    }
}
