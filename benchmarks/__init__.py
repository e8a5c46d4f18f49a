"""Commands whose figures the README and docs quote; each writes what it measured, and where, to benchmarks/results."""
