"""Layers and attention functions for Flax."""
