//! LevelDB and SQLite of the machine's distribution, loaded at run time through their C interfaces, so that
//! the bench builds without them. Owns all of the bench's foreign calls.

use anyhow::{Context, bail};
use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

/// A shared library; it stays loaded.
struct Library(*mut c_void);

impl Library {
    fn open(names: &[&CStr]) -> anyhow::Result<Self> {
        for name in names {
            // SAFETY: the name ends with a zero; the libraries asked for have constructors without
            // conditions.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            if !handle.is_null() {
                return Ok(Self(handle));
            }
        }
        bail!("no {names:?} can be loaded")
    }

    /// The function `name`.
    ///
    /// # Safety
    /// `F` must be the type of a function pointer that fits the library's declaration.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> anyhow::Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is a loaded library's; the name ends with a zero.
        let place = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        anyhow::ensure!(!place.is_null(), "{name:?} is not in the library");
        // SAFETY: the sizes agree, as asserted above; the caller answers for the type.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&place) })
    }
}

/// A struct of function pointers with what fills it from a library.
macro_rules! functions {
    ($name:ident { $($field:ident: $symbol:literal fn($($argument:ty),*) $(-> $result:ty)?,)* }) => {
        struct $name { $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl $name {
            fn load(library: &Library) -> anyhow::Result<Self> {
                // SAFETY: the types are those of the libraries' headers (leveldb/c.h 1.23, sqlite3.h 3.40),
                // with pointers to opaque structs as pointers to void.
                unsafe { Ok(Self { $($field: library.function($symbol)?,)* }) }
            }
        }
    };
}

functions!(LevelDb {
    options: c"leveldb_options_create" fn() -> *mut c_void,
    create_if_missing: c"leveldb_options_set_create_if_missing" fn(*mut c_void, c_uchar),
    compression: c"leveldb_options_set_compression" fn(*mut c_void, c_int),
    open: c"leveldb_open" fn(*const c_void, *const c_char, *mut *mut c_char) -> *mut c_void,
    close: c"leveldb_close" fn(*mut c_void),
    write_options: c"leveldb_writeoptions_create" fn() -> *mut c_void,
    set_sync: c"leveldb_writeoptions_set_sync" fn(*mut c_void, c_uchar),
    read_options: c"leveldb_readoptions_create" fn() -> *mut c_void,
    put: c"leveldb_put" fn(
        *mut c_void,
        *const c_void,
        *const c_char,
        usize,
        *const c_char,
        usize,
        *mut *mut c_char
    ),
    delete: c"leveldb_delete" fn(*mut c_void, *const c_void, *const c_char, usize, *mut *mut c_char),
    get: c"leveldb_get" fn(
        *mut c_void,
        *const c_void,
        *const c_char,
        usize,
        *mut usize,
        *mut *mut c_char
    ) -> *mut c_char,
    free: c"leveldb_free" fn(*mut c_void),
    iterator: c"leveldb_create_iterator" fn(*mut c_void, *const c_void) -> *mut c_void,
    iterator_end: c"leveldb_iter_destroy" fn(*mut c_void),
    first: c"leveldb_iter_seek_to_first" fn(*mut c_void),
    valid: c"leveldb_iter_valid" fn(*const c_void) -> c_uchar,
    next: c"leveldb_iter_next" fn(*mut c_void),
    key: c"leveldb_iter_key" fn(*const c_void, *mut usize) -> *const c_char,
    value: c"leveldb_iter_value" fn(*const c_void, *mut usize) -> *const c_char,
});

/// An open LevelDB with its defaults, and no compression: what the bench writes is what is stored.
pub struct Level {
    calls: LevelDb,
    db: *mut c_void,
    plain: *mut c_void,
    synced: *mut c_void,
    reading: *mut c_void,
}

impl Level {
    /// Opens or makes the one in the directory `name`.
    pub fn open(name: &CStr) -> anyhow::Result<Self> {
        let library = Library::open(&[c"libleveldb.so.1d", c"libleveldb.so.1", c"libleveldb.so"])?;
        let calls = LevelDb::load(&library)?;
        let mut error = null_mut();
        // SAFETY: the options are made here and given to calls that take such; they and the handles live
        // until the process ends.
        let (db, plain, synced, reading) = unsafe {
            let options = (calls.options)();
            (calls.create_if_missing)(options, 1);
            (calls.compression)(options, 0);
            let synced = (calls.write_options)();
            (calls.set_sync)(synced, 1);
            let db = (calls.open)(options, name.as_ptr(), &raw mut error);
            (db, (calls.write_options)(), synced, (calls.read_options)())
        };
        let level = Self {
            calls,
            db,
            plain,
            synced,
            reading,
        };
        level.told(error)?;
        Ok(level)
    }

    /// An error of the library; its text is freed.
    fn told(&self, error: *mut c_char) -> anyhow::Result<()> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: the library says that an error is a text with a zero at its end, which the caller frees.
        let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
        // SAFETY: as above; it is used no more.
        unsafe { (self.calls.free)(error.cast()) };
        bail!("LevelDB: {text}")
    }

    /// Writes; `sync` waits until it is durable.
    pub fn put(&self, key: &[u8], value: &[u8], sync: bool) -> anyhow::Result<()> {
        let mut error = null_mut();
        let how = if sync { self.synced } else { self.plain };
        // SAFETY: database and options are open; the slices are read during the call only.
        unsafe {
            let (key_at, value_at) = (key.as_ptr().cast(), value.as_ptr().cast());
            (self.calls.put)(
                self.db,
                how,
                key_at,
                key.len(),
                value_at,
                value.len(),
                &raw mut error,
            );
        }
        self.told(error)
    }

    /// Deletes.
    pub fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        let mut error = null_mut();
        // SAFETY: as in `put`.
        unsafe {
            (self.calls.delete)(
                self.db,
                self.plain,
                key.as_ptr().cast(),
                key.len(),
                &raw mut error,
            )
        };
        self.told(error)
    }

    /// Looks at a value, if there is one.
    pub fn get<T>(&self, key: &[u8], look: impl FnOnce(&[u8]) -> T) -> anyhow::Result<Option<T>> {
        let (mut error, mut len) = (null_mut(), 0);
        // SAFETY: as in `put`; `len` is written by the call.
        let value = unsafe {
            let key_at = key.as_ptr().cast();
            (self.calls.get)(
                self.db,
                self.reading,
                key_at,
                key.len(),
                &raw mut len,
                &raw mut error,
            )
        };
        self.told(error)?;
        if value.is_null() {
            return Ok(None);
        }
        // SAFETY: the library gave `len` bytes at `value`, which are ours until they are freed below.
        let seen = look(unsafe { std::slice::from_raw_parts(value.cast(), len) });
        // SAFETY: the library gave it to be freed; it is used no more.
        unsafe { (self.calls.free)(value.cast()) };
        Ok(Some(seen))
    }

    /// Shows all pairs in their order.
    pub fn each(&self, mut look: impl FnMut(&[u8], &[u8])) {
        // SAFETY: database and options are open; keys and values are looked at before the iterator moves; it
        // is destroyed at the end.
        unsafe {
            let iterator = (self.calls.iterator)(self.db, self.reading);
            (self.calls.first)(iterator);
            while (self.calls.valid)(iterator) != 0 {
                let (mut key_len, mut value_len) = (0, 0);
                let key = (self.calls.key)(iterator, &raw mut key_len);
                let value = (self.calls.value)(iterator, &raw mut value_len);
                look(
                    std::slice::from_raw_parts(key.cast(), key_len),
                    std::slice::from_raw_parts(value.cast(), value_len),
                );
                (self.calls.next)(iterator);
            }
            (self.calls.iterator_end)(iterator);
        }
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        if !self.db.is_null() {
            // SAFETY: it is open, and nothing uses it any more.
            unsafe { (self.calls.close)(self.db) };
        }
    }
}

functions!(SqLite {
    open: c"sqlite3_open" fn(*const c_char, *mut *mut c_void) -> c_int,
    close: c"sqlite3_close" fn(*mut c_void) -> c_int,
    message: c"sqlite3_errmsg" fn(*mut c_void) -> *const c_char,
    version: c"sqlite3_libversion" fn() -> *const c_char,
    prepare: c"sqlite3_prepare_v2" fn(
        *mut c_void,
        *const c_char,
        c_int,
        *mut *mut c_void,
        *mut *const c_char
    ) -> c_int,
    bind_number: c"sqlite3_bind_int64" fn(*mut c_void, c_int, i64) -> c_int,
    bind_text: c"sqlite3_bind_text" fn(*mut c_void, c_int, *const c_char, c_int, *const c_void) -> c_int,
    step: c"sqlite3_step" fn(*mut c_void) -> c_int,
    reset: c"sqlite3_reset" fn(*mut c_void) -> c_int,
    finalize: c"sqlite3_finalize" fn(*mut c_void) -> c_int,
    text: c"sqlite3_column_text" fn(*mut c_void, c_int) -> *const c_uchar,
});

const ROW: c_int = 100;
const DONE: c_int = 101;

/// An open SQLite database.
pub struct Sqlite {
    calls: SqLite,
    db: *mut c_void,
}

/// A statement of it that inserts a number and a text.
pub struct Insert<'a> {
    sqlite: &'a Sqlite,
    statement: *mut c_void,
}

impl Sqlite {
    /// Opens or makes it.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let library = Library::open(&[c"libsqlite3.so.0", c"libsqlite3.so"])?;
        let calls = SqLite::load(&library)?;
        let path = CString::new(path.as_os_str().as_encoded_bytes())?;
        let mut db = null_mut();
        // SAFETY: the path ends with a zero; `db` is written by the call.
        let code = unsafe { (calls.open)(path.as_ptr(), &raw mut db) };
        let sqlite = Self { calls, db };
        sqlite.ok(code, 0)?;
        Ok(sqlite)
    }

    /// Its version.
    pub fn version(&self) -> String {
        // SAFETY: the library answers with a constant text.
        unsafe { CStr::from_ptr((self.calls.version)()) }
            .to_string_lossy()
            .into_owned()
    }

    fn ok(&self, code: c_int, expected: c_int) -> anyhow::Result<()> {
        if code == expected {
            return Ok(());
        }
        // SAFETY: the database is open, or the library answers that it has no memory for one; the text lives
        // until the next call.
        let text = unsafe { CStr::from_ptr((self.calls.message)(self.db)) };
        bail!("SQLite: {} ({code})", text.to_string_lossy())
    }

    fn prepared(&self, text: &str) -> anyhow::Result<*mut c_void> {
        let text = CString::new(text)?;
        let mut statement = null_mut();
        // SAFETY: the database is open; the text ends with a zero; nobody asks for its rest.
        let code =
            unsafe { (self.calls.prepare)(self.db, text.as_ptr(), -1, &raw mut statement, null_mut()) };
        self.ok(code, 0)?;
        Ok(statement)
    }

    /// Runs one statement; the first column of its first row, or nothing.
    pub fn run(&self, text: &str) -> anyhow::Result<String> {
        let statement = self.prepared(text)?;
        let mut answer = String::new();
        // SAFETY: the statement was just made; a column is read while the statement stands on its row; it is
        // finalized once.
        let code = unsafe {
            let mut code = (self.calls.step)(statement);
            if code == ROW {
                let value = (self.calls.text)(statement, 0);
                if !value.is_null() {
                    answer = CStr::from_ptr(value.cast()).to_string_lossy().into_owned();
                }
            }
            while code == ROW {
                code = (self.calls.step)(statement);
            }
            (self.calls.finalize)(statement);
            code
        };
        self.ok(code, DONE).with_context(|| text.to_owned())?;
        Ok(answer)
    }

    /// Prepares the statement `text`, which has two parameters.
    pub fn insert(&self, text: &str) -> anyhow::Result<Insert<'_>> {
        Ok(Insert {
            sqlite: self,
            statement: self.prepared(text)?,
        })
    }
}

impl Insert<'_> {
    /// Runs it, in a transaction of its own.
    pub fn run(&self, number: i64, text: &str) -> anyhow::Result<()> {
        let (calls, len) = (&self.sqlite.calls, c_int::try_from(text.len())?);
        // SAFETY: the statement is not finalized while this value lives; the text outlives the reset, and is
        // bound as one that stays where it is.
        let code = unsafe {
            (calls.bind_number)(self.statement, 1, number);
            (calls.bind_text)(self.statement, 2, text.as_ptr().cast(), len, null());
            let code = (calls.step)(self.statement);
            (calls.reset)(self.statement);
            code
        };
        self.sqlite.ok(code, DONE)
    }
}

impl Drop for Insert<'_> {
    fn drop(&mut self) {
        // SAFETY: it was prepared and is finalized once.
        unsafe { (self.sqlite.calls.finalize)(self.statement) };
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        // SAFETY: its statements are finalized, since they borrow this value.
        unsafe { (self.calls.close)(self.db) };
    }
}

/// Whether LevelDB can be loaded.
pub fn leveldb_there() -> bool {
    Library::open(&[c"libleveldb.so.1d", c"libleveldb.so.1", c"libleveldb.so"]).is_ok()
}

/// Whether SQLite can be loaded.
pub fn sqlite_there() -> bool {
    Library::open(&[c"libsqlite3.so.0", c"libsqlite3.so"]).is_ok()
}
