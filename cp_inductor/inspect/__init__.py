"""What a user asks the compiler: what will run, on any rank, on any chip, and why."""
