"""Pipeline parallelism: a schedule is a table anyone can read; one executor runs it."""
