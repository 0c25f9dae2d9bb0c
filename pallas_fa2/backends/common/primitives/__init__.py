"""Layouts, inline PTX and operations on register tiles of every GPU backend."""
