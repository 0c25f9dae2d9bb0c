"""How dQ is summed over the blocks of keys."""
