//! Options of a mount as mount(8) and fstab(5) write them. Owns their names; the mount and LibFS implement
//! them.

use crate::exit::Usage;
use varve_fuse_shim::MountFlags;
use varve_libfs::Atime;

/// Flags of the access time; of several options the last one counts.
const ATIME: MountFlags = MountFlags::NOATIME
    .union(MountFlags::RELATIME)
    .union(MountFlags::STRICTATIME);

/// Parsed options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountOptions {
    /// `nosuid`, `nodev`, `noexec`, and the flags of the access time.
    pub flags: MountFlags,
    /// `ro`.
    pub read_only: bool,
    /// `sync`.
    pub sync: bool,
    /// `allow_other` or `noallow_other`, if one of them was given.
    pub allow_other: Option<bool>,
    /// `remount`.
    pub remount: bool,
    /// `nofail`.
    pub nofail: bool,
    /// `nouring`.
    pub no_uring: bool,
}

impl MountOptions {
    /// No options.
    pub const NONE: Self = Self {
        flags: MountFlags::empty(),
        read_only: false,
        sync: false,
        allow_other: None,
        remount: false,
        nofail: false,
        no_uring: false,
    };

    /// Parses options separated by commas; later ones win. Options for other programs alone (`_netdev`,
    /// `auto`, `user`, `x-…`) are ignored.
    ///
    /// # Errors
    /// An unknown option, unless `sloppy`.
    pub fn parse(text: &str, sloppy: bool) -> Result<Self, Usage> {
        let mut options = Self::NONE;
        for word in text.split(',').filter(|word| !word.is_empty()) {
            if !options.take(word) && !sloppy {
                return Err(Usage(format!(
                    "`{word}` is no option of a mount; see `varve mount --help`"
                )));
            }
        }
        Ok(options)
    }

    fn take(&mut self, word: &str) -> bool {
        match word {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "sync" => self.sync = true,
            "async" => self.sync = false,
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            "remount" => self.remount = true,
            "nofail" => self.nofail = true,
            "uring" => self.no_uring = false,
            "nouring" => self.no_uring = true,
            "nosuid" => self.flags |= MountFlags::NOSUID,
            "suid" => self.flags -= MountFlags::NOSUID,
            "nodev" => self.flags |= MountFlags::NODEV,
            "dev" => self.flags -= MountFlags::NODEV,
            "noexec" => self.flags |= MountFlags::NOEXEC,
            "exec" => self.flags -= MountFlags::NOEXEC,
            "nodiratime" => self.flags |= MountFlags::NODIRATIME,
            "diratime" => self.flags -= MountFlags::NODIRATIME,
            "lazytime" => self.flags |= MountFlags::LAZYTIME,
            "nolazytime" => self.flags -= MountFlags::LAZYTIME,
            "noatime" => self.set_atime(MountFlags::NOATIME),
            "relatime" | "atime" | "norelatime" | "nostrictatime" => self.set_atime(MountFlags::RELATIME),
            "strictatime" => self.set_atime(MountFlags::STRICTATIME),
            "user" | "users" | "owner" | "group" => {
                self.flags |= MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            }
            "defaults"
            | "_netdev"
            | "auto"
            | "noauto"
            | "nouser"
            | "nousers"
            | "noowner"
            | "nogroup"
            | "default_permissions" => {}
            // Options that the kernel shows for a mount, and that mount(8) passes back for a remount.
            other => {
                return [
                    "x-",
                    "X-",
                    "comment=",
                    "user=",
                    "user_id=",
                    "group_id=",
                    "rootmode=",
                    "max_read=",
                    "subtype=",
                ]
                .iter()
                .any(|prefix| other.starts_with(prefix));
            }
        }
        true
    }

    /// Replaces the access time flags by one of them.
    pub fn set_atime(&mut self, flag: MountFlags) {
        self.flags = (self.flags - ATIME) | flag;
    }

    /// Returns the policy of access times, if an option sets it.
    pub fn atime(&self) -> Option<Atime> {
        [
            (MountFlags::NOATIME, Atime::Never),
            (MountFlags::RELATIME, Atime::Relative),
            (MountFlags::STRICTATIME, Atime::Strict),
        ]
        .into_iter()
        .find(|(flag, _)| self.flags.contains(*flag))
        .map(|(_, atime)| atime)
    }

    /// Formats the options for a child process, without `remount` and `nofail`.
    pub fn text(&self) -> String {
        let mut words = vec![if self.read_only { "ro" } else { "rw" }];
        for (flag, word) in [
            (MountFlags::NOSUID, "nosuid"),
            (MountFlags::NODEV, "nodev"),
            (MountFlags::NOEXEC, "noexec"),
            (MountFlags::NODIRATIME, "nodiratime"),
            (MountFlags::LAZYTIME, "lazytime"),
            (MountFlags::NOATIME, "noatime"),
            (MountFlags::RELATIME, "relatime"),
            (MountFlags::STRICTATIME, "strictatime"),
        ] {
            if self.flags.contains(flag) {
                words.push(word);
            }
        }
        if self.sync {
            words.push("sync");
        }
        if self.no_uring {
            words.push("nouring");
        }
        match self.allow_other {
            Some(true) => words.push("allow_other"),
            Some(false) => words.push("noallow_other"),
            None => {}
        }
        words.join(",")
    }
}

/// Parses options for clap; the error is the message.
pub fn parse(text: &str) -> Result<MountOptions, String> {
    MountOptions::parse(text, false).map_err(|Usage(why)| why)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::MountOptions;
    use varve_fuse_shim::MountFlags;
    use varve_libfs::Atime;

    #[test]
    fn options_of_fstab_are_read_and_the_last_counts() {
        let options = |text: &str| MountOptions::parse(text, false).unwrap();
        assert_eq!(
            options("defaults,_netdev,auto,x-systemd.automount"),
            MountOptions::NONE
        );
        assert_eq!(options("noatime").atime(), Some(Atime::Never));
        assert_eq!(options("noatime,strictatime").atime(), Some(Atime::Strict));
        assert_eq!(options("strictatime,relatime").atime(), Some(Atime::Relative));
        assert_eq!(options("").atime(), None);
        assert!(options("rw,ro,nofail").read_only && options("nofail").nofail);
        assert!(!options("ro,rw").read_only && options("remount").remount);
        assert_eq!(options("user,exec").flags, MountFlags::NOSUID | MountFlags::NODEV);
        assert!(MountOptions::parse("ro,nonsense", false).is_err());
        assert!(MountOptions::parse("ro,nonsense", true).unwrap().read_only);
        for text in [
            "ro,nosuid,noexec,lazytime,strictatime,sync,nouring,allow_other",
            "rw",
        ] {
            assert_eq!(options(&options(text).text()), options(text));
        }
    }
}
