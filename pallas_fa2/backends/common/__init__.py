"""Modules that all GPU backends share."""
