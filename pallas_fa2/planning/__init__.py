"""Choice of the backend and of its configurations for a call."""
