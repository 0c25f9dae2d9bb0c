"""Layouts, pipelines, copies and inline PTX of the sm90 kernels."""
