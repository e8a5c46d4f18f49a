"""One file per experiment: a configuration and `main`. The front door is `python -m experiments.gpt3`.

`papers`, `failures` and `slow_links` are studies of the cost models: they train nothing.
"""
