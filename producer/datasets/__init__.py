"""Datasets: from a manifest's rows to prompts in the store. No server and no Redis is asked here."""
