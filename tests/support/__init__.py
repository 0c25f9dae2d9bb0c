"""What the tests of Hopper kernels need on a machine with no GPU."""
