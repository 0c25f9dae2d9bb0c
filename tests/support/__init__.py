"""What several tests share, most of it for Hopper kernels on a machine with no GPU."""
