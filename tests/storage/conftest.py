"""Hypothesis without its deadline: what is tested here waits for disks, which take their time."""

from hypothesis import settings

settings.register_profile("storage", deadline=None)
settings.load_profile("storage")
