"""Where gradings run: in this process, in worker processes, on several GPUs, on a Ray cluster."""
