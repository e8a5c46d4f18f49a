"""Optimizers: what a function that makes one is given, those that are built in, and how their state is sharded."""
