"""Drafters: ways to propose the next tokens."""
