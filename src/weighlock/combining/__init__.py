"""Many models into one, block by block: means, medians, differences. Memory does not grow."""
