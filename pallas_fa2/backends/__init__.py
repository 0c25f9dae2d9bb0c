"""Backends: each computes attention in its own way, behind one interface (`protocol`)."""
