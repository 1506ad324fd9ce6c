//! The agent: all of it is system calls on memory that belongs to a program.

mod calls;
mod join;
mod thread;
