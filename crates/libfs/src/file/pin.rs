//! The pin of a file as an attribute, so that a program can say where its data is to be without knowing the
//! pool. Nothing is stored with the attributes: the daemon keeps the byte (ADR 43).

use varve_format::{FileBlock, InodeKey, Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{Admin, Cred, Pinned, Request, Response};

use crate::errno::{Errno, OpError, OpResult, Result};
use crate::session::{Mount, Session};

/// The name of a wish, as `varve which-tier` has it.
const fn name(to: PinTo) -> &'static str {
    match to {
        PinTo::Policy => "policy",
        PinTo::Stay => "stay",
        PinTo::Tier(tier) => tier.name(),
    }
}

fn named(value: &[u8]) -> Option<PinTo> {
    let tiers = Tier::ALL.map(PinTo::Tier);
    let all = [PinTo::Policy, PinTo::Stay].into_iter().chain(tiers);
    all.into_iter().find(|to| name(*to).as_bytes() == value)
}

fn ask<T>(session: &Session, asked: Admin) -> OpResult<serde_json::Value, T> {
    let Response::Json(json) = session.call(Request::Admin(asked))? else {
        return Err(OpError::Failed(Errno(libc::EIO)));
    };
    serde_json::from_str(&json).map_err(|_| OpError::Failed(Errno(libc::EIO)))
}

/// The pin's name: `policy`, `stay` or that of a tier.
///
/// # Errors
/// EPERM if the session is neither root's nor the pool owner's.
pub(crate) fn get(mount: &Mount, key: InodeKey) -> Result<Vec<u8>> {
    mount.look(|session| {
        let inodes = vec![(key, FileBlock(0))];
        let mut answer = ask(session, Admin::Placed { inodes })?;
        let pin = match answer.get_mut(0).map(serde_json::Value::take) {
            Some(serde_json::Value::Object(mut placed)) => placed.remove("pin"),
            // Its creation is not digested yet, so no command has pinned it.
            Some(serde_json::Value::Null) => return Ok(name(PinTo::Policy).into()),
            _ => None,
        };
        let pin = pin.and_then(|pin| serde_json::from_value::<Pin>(pin).ok());
        Ok(name(pin.ok_or(Errno(libc::EIO))?.to).into())
    })
}

/// Pins an inode to the tier that `value` names, `policy` or `stay`; `None` unpins it. Durable when it
/// returns; the data moves in the background.
///
/// # Errors
/// EPERM if neither root nor the user of this process, who must be root or the pool's owner, asks for it;
/// EINVAL for another value; ENXIO if the pool has no such tier.
pub(crate) fn set(mount: &Mount, key: InodeKey, value: Option<&[u8]>, cred: &Cred) -> Result<()> {
    let to = value
        .map_or(Some(PinTo::Policy), named)
        .ok_or(Errno(libc::EINVAL))?;
    // The daemon knows whose session it is, not for whom a mount acts.
    if cred.uid != 0 && cred.uid != rustix::process::geteuid().as_raw() {
        return Err(Errno(libc::EPERM));
    }
    mount.look(|session| {
        let asked = Admin::Pin {
            inodes: vec![Pinned { key, name: None }],
            pin: Pin {
                to,
                by: PinnedBy::Command,
            },
            over_own: true,
        };
        let answer = ask(session, asked)?;
        match answer["set"].as_u64() {
            Some(1) => Ok(()),
            _ => Err(OpError::Failed(Errno(libc::ENOENT))),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{name, named};
    use varve_format::{PinTo, Tier};

    #[test]
    fn each_wish_has_a_name_that_is_read_back() {
        for to in [
            PinTo::Policy,
            PinTo::Stay,
            PinTo::Tier(Tier::Nvm),
            PinTo::Tier(Tier::Hdd),
        ] {
            assert_eq!(named(name(to).as_bytes()), Some(to));
        }
        assert_eq!(named(b"NVM"), None);
        assert_eq!(named(b""), None);
    }
}
