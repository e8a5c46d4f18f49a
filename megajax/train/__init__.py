"""Training: optimizer, precision, the step, the loop around it, its log, and the command line that describes a run."""
