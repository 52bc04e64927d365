"""The feeder: what is missing in the store goes into the queues, a bounded window at a time."""
