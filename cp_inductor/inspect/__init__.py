"""Tools that show what the compiler does: what will run, on any rank, on any chip, and why."""
