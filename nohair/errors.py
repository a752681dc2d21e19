"""The three ways in which a request can end badly, each with its exit code."""


class Refused(ValueError):
    """The input is wrong; nothing was written."""

    exit_code = 2


class Failed(RuntimeError):
    """Something broke while running; nothing was published."""

    exit_code = 3


class Incomplete(RuntimeError):
    """The book is stale or lacks a chapter."""

    exit_code = 4
