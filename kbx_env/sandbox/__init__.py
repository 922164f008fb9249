"""Untrusted: where submissions run. Imports only kbx_env.wire and the launch executor."""
