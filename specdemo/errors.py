"""Mistakes that a user can mend, each told in one sentence that says what to do."""

from __future__ import annotations


class SpecdemoError(Exception):
    """A fault with a message fit to be shown to the user as it is."""


class BadRequest(SpecdemoError):
    """The request itself cannot be served: a setting out of range, an empty or too long prompt."""


class ModelUnavailable(SpecdemoError):
    """A model cannot be had or used: unknown name, no network, broken files, unsuitable architecture."""


class HelperLost(SpecdemoError):
    """The process that drafts beside the target has ended or does not answer."""
