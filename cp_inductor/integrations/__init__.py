"""Other libraries' trainers on sharded sequences. Each module is imported by those who use it."""
