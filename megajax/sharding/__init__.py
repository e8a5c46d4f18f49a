"""Sharding rules: from the logical axes of arrays to the axes of the mesh."""
