"""Look over a machine before work starts: what is here, what is missing, how to mend it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from nohair.lab import models
from nohair.places import ROOT

PACKAGES = ("torch", "transformers", "jupyter-book", "sphinx-book-theme", "papermill", "ipykernel")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MEMORY_GIB, DISK_GIB = 4, 3  # chapter 1 peaks at about half of either


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether it is well, and what was found or has to be done."""

    name: str
    ok: bool
    text: str


def findings() -> list[Finding]:
    """Look at interpreter, packages, device, memory, disk, and every preset."""
    supported = sys.version_info >= (3, 11)
    python = f"{sys.version.split()[0]} at {sys.executable}"
    found = [Finding("python", supported, python if supported else f"{python}; 3.11 is needed")]
    found += [_package(name) for name in PACKAGES]
    found.append(_kernel())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found.append(Finding("device", True, str(accelerator or "cpu, no accelerator found")))
    found.append(_room("memory", psutil.virtual_memory().available / 2**30, MEMORY_GIB))
    found.append(_room("disk", shutil.disk_usage(ROOT).free / 2**30, DISK_GIB))
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    found.append(Finding("browser", True, browser or "none found: the browser tests are skipped"))
    for name, entry in models.presets().items():
        mend = models.missing(name)
        found.append(Finding(name, mend is None, mend or entry["title"]))
    return found


def _package(name: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, False, "not installed; make setup")
    if name == "jupyter-book" and not found.startswith("1."):
        return Finding(name, False, f"{found}; this book needs pip install 'jupyter-book<2'")
    return Finding(name, True, found)


def _kernel() -> Finding:
    command = [sys.executable, "-m", "ipykernel_launcher", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Finding("kernel", False, f"{sys.executable} cannot start one; make setup")
    return Finding("kernel", True, f"ipykernel {done.stdout.strip()} of this interpreter")


def _room(name: str, free: float, needed: float) -> Finding:
    text = f"{free:.1f} GiB free"
    return Finding(name, free >= needed, text if free >= needed else f"{text}, {needed} needed")
