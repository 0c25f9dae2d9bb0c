"""Algorithm 2 on sm90."""
