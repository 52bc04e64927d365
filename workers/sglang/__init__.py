"""SGLang as its clients see it: requests, replies, facts, errors, and one order from message to result."""
