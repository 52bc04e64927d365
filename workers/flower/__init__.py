"""What Flower gains for Eyas: a Throughput page and metrics, in its own process, look and login."""
