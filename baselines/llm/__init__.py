"""Language models behind policies: servers, local checkpoints, the log of calls, and what an answer holds."""
