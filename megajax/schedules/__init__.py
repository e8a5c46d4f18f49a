"""Pipeline schedules as plain data, without jax: made, proven, simulated, drawn, read and written."""
