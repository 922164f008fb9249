"""Worker pools: in this process, in worker processes, on several GPUs, on a Ray cluster."""
