"""Measurements on real networks: texts, models, distances."""
