"""Measure how language models forget their prompt."""

from importlib.metadata import version

__version__ = version("nohair")
