"""Every grading kept, in SQLite: the store, and the names of its columns."""

from kbx_env.store.store import Row, Store, request_key

__all__ = ["Row", "Store", "request_key"]
