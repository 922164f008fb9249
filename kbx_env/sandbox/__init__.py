"""Untrusted: where submissions run. Imports only kbx_env.protocol.wire and the launch executor."""
