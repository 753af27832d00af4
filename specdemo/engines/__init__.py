"""Engines: synchronous generators of events, one per way of decoding."""
