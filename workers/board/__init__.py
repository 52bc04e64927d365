"""What a run looks like from outside: snapshots in Redis, rates, and the board that commands show."""
