"""Measure the reference records in data/records and draw the figure of the front page from them.

Run `.venv/bin/python data/references.py`; about eight minutes on two cores. The records keep
log-spaced positions only, so that they stay small enough to be carried along.
"""

from __future__ import annotations

import hashlib
import json

import matplotlib.pyplot as plt

from nohair import decay, plots, records
from nohair.errors import Refused
from nohair.lab import distances, models
from nohair.lab.protocol import Protocol, run
from nohair.places import DATA, RECORDS
from nohair.summary import summarise

REFERENCES = {"smollm2-135m": None, "smollm2-135m-init": "init"}
FIGURE = DATA / "figures" / "forgetting.svg"
WINDOW = (16, 1024)


def measure() -> None:
    """Measure every reference anew, from a clean commit: a record names the code that made it.

    Raises
    ------
    Refused
        Files that git tracks have been changed, or there is no git.
    """
    commit = records.surroundings()["commit_of_nohair"]
    if commit is None or commit.endswith("-dirty"):
        raise Refused(f"commit {commit}: commit every change before measuring references")
    measured = {
        name: run(models.load("smollm2-135m", twin=twin), Protocol())
        for name, twin in REFERENCES.items()
    }
    for name, record in measured.items():  # a file written earlier would make the tree unclean
        distance = distances.metric(record, "l2")
        fits = decay.profile(distance.t, distance, WINDOW, floor=distance.floor)
        summary = summarise(record, distance, fits)
        records.save(records.thin(record), RECORDS / name, summary)


def draw() -> None:
    """Draw trained and untrained beside each other, after the final norm."""
    plots.use()
    curves = {}
    for name, label in zip(REFERENCES, ("trained", "untrained twin"), strict=True):
        final = json.loads((RECORDS / f"{name}.json").read_text("utf8"))["final"]
        alpha = "α = {alpha:.2f} [{low:.2f}, {high:.2f}]".format(**final)
        distance = distances.metric(records.load(name), "l2")
        curves[f"{label}, {alpha}"] = distance[-1].mean(("continuation", "pair"))
    figure, ax = plt.subplots()
    plots.pair(ax, curves, WINDOW)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None, "Description": fingerprint()})


def fingerprint() -> str:
    """Hash the records that the figure shows; the figure carries it."""
    files = (RECORDS / f"{name}.nc" for name in REFERENCES)
    return " ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


if __name__ == "__main__":
    measure()
    draw()
