//! An incremental parser of our own server's event streams.
//!
//! The part of <https://html.spec.whatwg.org/multipage/server-sent-events.html> that this service
//! sends: `event`, `id` and `data` fields, lines that end with LF or CRLF, comments as keep-alive.
//! It does no I/O; connections are handled in [`super::event_follower`].

/// Maximum size of one message in bytes; far above the largest event.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) event: String,
    pub(super) id: String,
    /// The `data` fields, joined by line feeds.
    pub(super) data: String,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {MAX_MESSAGE} bytes")]
pub(super) struct TooLong;

#[derive(Debug, Default)]
pub(super) struct Parser {
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    message: Message,
    has_data: bool,
}

impl Parser {
    /// Parses the next bytes and returns the messages that they complete.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Message>, TooLong> {
        let mut messages = Vec::new();
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (head, rest) = bytes.split_at(end);
            self.line.extend_from_slice(head);
            let mut line = std::mem::take(&mut self.line);
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            messages.extend(self.take_line(&String::from_utf8_lossy(&line)));
            bytes = rest.get(1..).unwrap_or_default();
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() + self.message.data.len() > MAX_MESSAGE {
            Err(TooLong)
        } else {
            Ok(messages)
        }
    }

    fn take_line(&mut self, line: &str) -> Option<Message> {
        if line.is_empty() {
            let message = std::mem::take(&mut self.message);
            return std::mem::take(&mut self.has_data).then_some(message);
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.message.event),
            "id" => value.clone_into(&mut self.message.id),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.message.data.push('\n');
                }
                self.message.data.push_str(value);
            }
            _ => {} // a comment or an unused field
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(event: &str, id: &str, data: &str) -> Message {
        Message { event: event.into(), id: id.into(), data: data.into() }
    }

    #[test]
    fn fields_comments_and_line_endings_are_parsed() {
        let stream = ": hello\n\nevent: run.started\nid: 1\ndata: {\"a\":\ndata:  1}\nretry: 5\n\n\
                      id: 2\r\nevent:x\r\ndata\r\n\r\n: alive\n\nevent: never sent\n\ndata: not over yet\n";
        let messages = Parser::default().push(stream.as_bytes()).unwrap();
        assert_eq!(messages, [message("run.started", "1", "{\"a\":\n 1}"), message("x", "2", "")]);
    }

    #[test]
    fn a_message_over_the_size_limit_is_an_error() {
        let mut parser = Parser::default();
        let piece = vec![b'x'; MAX_MESSAGE / 2];
        assert_eq!(parser.push(&piece), Ok(vec![]));
        assert_eq!(parser.push(&piece), Ok(vec![]));
        assert_eq!(parser.push(b"x"), Err(TooLong));
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same_messages(
            sent in prop::collection::vec(("[a-z.]{1,12}", 1..99_u32, "[^\r\n]{0,40}"), 0..6),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            crlf in any::<bool>(),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let frame = |(event, id, data): &(String, u32, String)| {
                format!(":{end}event: {event}{end}id: {id}{end}data: {data}{end}{end}")
            };
            let stream = sent.iter().map(frame).collect::<Vec<_>>().concat();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.push(stream.len());
            cuts.sort_unstable();
            let (mut parser, mut start, mut read) = (Parser::default(), 0, Vec::new());
            for cut in cuts {
                read.extend(parser.push(&stream.as_bytes()[start..cut]).unwrap());
                start = cut;
            }
            let expected: Vec<Message> =
                sent.iter().map(|(event, id, data)| message(event, &id.to_string(), data)).collect();
            prop_assert_eq!(read, expected);
        }
    }
}
