"""Celery and Redis: the app's settings, queues and messages, who holds what, and how a process ends."""
