"""Models: loading, forwards and the only key-value caches."""
