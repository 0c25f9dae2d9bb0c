"""Which backend and which configuration run a call."""
