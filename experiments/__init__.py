"""One file per experiment: a configuration and `main`. The front door is `python -m experiments.gpt3`."""
