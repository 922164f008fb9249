"""Trusted: forms the verdict. Never imports, executes or unpickles what a submission wrote."""
