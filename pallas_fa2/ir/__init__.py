"""Masks and scores as scalar functions of two tokens, compiled for every backend."""
