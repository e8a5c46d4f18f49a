"""Which axis of an array is sharded over which axis of the mesh."""
