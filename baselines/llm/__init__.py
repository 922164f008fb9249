"""Language models for policies: clients of servers, local checkpoints, the record of calls, and extraction of kernels."""
