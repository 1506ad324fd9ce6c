//! Changes of grant rows on media, and of the inode numbers that are reserved under them.
//! [`crate::leases::grants`] decides the changes.

use crate::kernel::Core;
use crate::leases::grants::RowChange;
use varve_format::session::GrantRow;
use varve_store::{StoreError, Tx};

/// Writes row changes to media. Durable when this returns.
///
/// # Errors
/// The store's.
pub(crate) fn write_rows(core: Core<'_>, changes: &[RowChange]) -> Result<(), StoreError> {
    if changes.is_empty() {
        return Ok(());
    }
    write_rows_then(core, changes, |_| Ok(()))
}

/// Writes row changes to media, and then `last`, one operation, in the same transaction if all fit. Durable when
/// this returns.
///
/// # Errors
/// The store's.
pub(crate) fn write_rows_then<T>(
    core: Core<'_>,
    changes: &[RowChange],
    last: impl FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let mut tx = core.store.begin_with_room()?;
    let mut room = core.store.room_for_ops();
    let mut never_made = Vec::new();
    for change in changes {
        match change {
            RowChange::Put(row) => {
                // The row may be gone, because a part of a batch was given back while its session ended: it
                // must not be restored. Nor must a part that a digest removed since the row was read: parts
                // are only ever removed.
                let now = tx.grant(row.lease)?.map(|now| now.batch & row.batch);
                match now {
                    None => {}
                    Some(0) => tx.grant_remove(row.lease)?,
                    Some(batch) => tx.grant_put(&GrantRow { batch, ..*row })?,
                }
            }
            RowChange::Remove(lease) => match tx.grant_remove(*lease) {
                Ok(()) | Err(StoreError::NoGrant(_)) => {}
                Err(error) => return Err(error),
            },
            RowChange::FreeNumber(key) => match tx.release_inode(*key) {
                Ok(()) => never_made.push(*key),
                // Made by now, and perhaps freed again.
                Err(StoreError::NoInode(_)) => {}
                Err(error) => return Err(error),
            },
        }
        // The block with the inode may have to come back from a slower tier.
        room -= usize::from(matches!(change, RowChange::FreeNumber(_)));
        if tx.room_at_least(varve_store::OP_ROOM) < varve_store::OP_ROOM || room == 0 {
            tx.commit()?;
            tx = core.store.begin_with_room()?;
            room = core.store.room_for_ops();
        }
    }
    let done = last(&mut tx)?;
    tx.commit()?;
    if !never_made.is_empty() {
        core.locked().unlearn(&never_made);
    }
    Ok(done)
}
