"""What is no study: heat maps, comparison of runs, check of GPU kernels, audit of one call."""
