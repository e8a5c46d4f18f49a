"""The launcher: supervises a host's training processes, and restarts the run on the hosts that are left."""
