//! One result of a look at the machine, for a person. Decides nothing.

/// State of one finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is there.
    Good,
    /// Worth knowing; nothing is missing.
    Note,
    /// It is missing for a device of this machine.
    Missing,
}

/// One result of the survey.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Topic in a word or two, or the name of the device in question.
    pub topic: String,
    /// State of the topic.
    pub verdict: Verdict,
    /// For a person.
    pub text: String,
    /// Commands that mend it, in order, for root.
    pub commands: Vec<String>,
}

impl Finding {
    pub(crate) fn new(topic: impl Into<String>, verdict: Verdict, text: impl Into<String>) -> Self {
        Self {
            topic: topic.into(),
            verdict,
            text: text.into(),
            commands: Vec::new(),
        }
    }

    pub(crate) fn mend(mut self, command: impl Into<String>) -> Self {
        self.commands.push(command.into());
        self
    }
}
