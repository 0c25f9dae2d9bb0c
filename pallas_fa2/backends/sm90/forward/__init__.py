"""Algorithm 1 on sm90."""
