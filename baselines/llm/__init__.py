"""Language models for policies: clients of servers, local checkpoints, the record of calls, extraction of kernels."""
