//! Why a call on a mount is left to the kernel. Owns the reasons and their names in `varve run --stats`.

macro_rules! reasons {
    ($($(#[$doc:meta])* $reason:ident = $name:literal),* $(,)?) => {
        /// Why a call on a mount is left to the kernel.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Why {
            $($(#[$doc])* $reason),*
        }

        impl Why {
            /// All reasons, each at its number.
            pub const ALL: &[Self] = &[$(Self::$reason),*];

            /// Name in `--stats`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name),*
                }
            }
        }
    };
}

reasons![
    /// The process has not made as many calls yet as are worth a session.
    FirstCalls = "first calls of a process",
    /// The daemon refused a session, or is not there.
    NoSession = "no session",
    /// Serving was switched off: rings, other rights, another root.
    SwitchedOff = "serving switched off",
    /// The file is watched in a mount's kernel.
    Watched = "watched file",
    /// The file is, or is to be, mapped shared and writable.
    Mapped = "file mapped for writing",
    /// A map of another kind than those that are served.
    OtherMap = "map of another kind",
    /// The kernel keeps the offset, for a program that inherited the file.
    KernelsOffset = "offset kept by the kernel",
    /// The descriptor was there when the program began.
    Inherited = "descriptor from outside",
    /// The path leaves the mount, or its names alone do not tell.
    PathOutside = "path outside",
    /// A fifo, a socket, a device, or what only stands for a file that is no directory.
    SpecialFile = "fifo, socket or device",
    /// The call, or what it was told to do, is not served.
    NotServed = "call not served",
    /// The file cannot be opened in this process' session, or on the mount.
    CannotOpen = "file that cannot be opened here",
    /// The number of the descriptor is too high.
    HighNumber = "descriptor number too high",
    /// A child that goes on without the library.
    BareChild = "child without the library",
];

impl Why {
    /// The reason with a number.
    #[must_use]
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::Why;
    use std::collections::HashSet;

    #[test]
    fn reasons_have_their_numbers_and_names_of_their_own() {
        for (number, why) in (0..).zip(Why::ALL) {
            assert_eq!(*why as u8, number);
            assert_eq!(Why::of_number(number), Some(*why));
        }
        let names: HashSet<_> = Why::ALL.iter().map(|why| why.name()).collect();
        assert_eq!(names.len(), Why::ALL.len());
        assert_eq!(Why::of_number(Why::ALL.len() as u8), None);
    }
}
