"""A lane process: how many calls it may begin, at which server, and what becomes of each order."""
