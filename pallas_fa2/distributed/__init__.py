"""Attention over several devices."""
