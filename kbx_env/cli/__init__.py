"""The commands of ``kbx`` (``python -m kbx_env``)."""
