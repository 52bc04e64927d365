"""What is done: the Celery app, lanes, SGLang, the sink, the feeder and the embedded engine."""
