"""The store: keeps every grading in an SQLite file."""

from kbx_env.store.store import Row, Store, request_key

__all__ = ["Row", "Store", "request_key"]
