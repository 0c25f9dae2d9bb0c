"""What GPU backends share."""
