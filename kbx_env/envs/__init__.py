"""The gymnasium environments: what an agent sees, does and is paid for."""
