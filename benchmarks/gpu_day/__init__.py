"""Everything that a machine with GPUs can tell about megajax, in one command: `python -m benchmarks.gpu_day`."""
