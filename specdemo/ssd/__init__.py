"""Speculative speculative decoding (Kumar, Dao, May 2026, arXiv 2603.03251): the next draft is made while this one is
verified, for the outcomes of the verification that are held likely."""
