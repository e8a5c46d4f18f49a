"""Checkpoints: written asynchronously and atomically, verified by checksums, and restored on any mesh."""
