"""The order of tiles, and how they are dealt to CTAs: on the host, for every backend."""
