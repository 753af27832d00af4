"""Speculative decoding beside standard decoding: the same text, sooner, and every drafted token accounted for."""

__version__ = "0.1.0"
