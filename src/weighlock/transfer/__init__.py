"""What both directions of a transfer use: the virtual file, its digests, landings, rates."""
