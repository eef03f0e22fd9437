//! One goes on where the other stopped.
