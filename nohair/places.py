"""Every folder the project reads or writes, named once."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
DATA = ROOT / "data"
TEXTS = DATA / "texts"
PRESETS = DATA / "presets"
RECORDS = DATA / "records"
BUILD = ROOT / "_build"
