"""Checkpoints: written asynchronously and atomically, checked, and read on any mesh."""
