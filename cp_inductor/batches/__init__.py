"""Plans that a batch decides: made once, ahead of time, or by the workers of a data loader."""
