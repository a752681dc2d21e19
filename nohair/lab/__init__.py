"""Measurements on real networks: texts, models, distances."""

import warnings

# Imported in a notebook, transformers' progress bars miss ipywidgets and say so on the page.
warnings.filterwarnings("ignore", message="IProgress not found")
