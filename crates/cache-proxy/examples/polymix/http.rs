//! Heads of messages of HTTP/1.1, as the driver and its origin need them.

use std::io::{self, BufRead};

/// First line and fields of a message.
pub struct Head {
    /// The first line.
    pub line: String,
    /// Names in lower case, and values.
    fields: Vec<(String, String)>,
}

impl Head {
    /// Reads a head; `None` at the end of the connection.
    pub fn read(input: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut fields = Vec::new();
        loop {
            let mut field = String::new();
            if input.read_line(&mut field)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match field.trim_end().split_once(':') {
                Some((name, value)) => fields.push((name.to_ascii_lowercase(), value.trim().to_owned())),
                None => break,
            }
        }
        let line = line.trim_end().to_owned();
        Ok(Some(Self { line, fields }))
    }

    /// The value of a field, by its name in lower case.
    pub fn field(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The value of a field that is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.field(name)?.parse().ok()
    }
}
