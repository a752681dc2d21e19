"""What the solutions cost beside the simulations they replace, as ratios within one turn.

Run `.venv/bin/python benchmarks/theory.py`, on one thread. The table goes to standard output, to
benchmarks/theory.json, and between the marks in README.md.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import numpy as np  # after the environment says how many threads it may take

from nohair.places import ROOT
from nohair.theory import relay, untrained

RESULT = Path(__file__).with_suffix(".json")
MARKS = ("<!-- theory -->", "<!-- /theory -->")
TURNS = 5

FAR, NEAR = np.geomspace(1, 1e12, 1000), np.arange(1, 1025)
GPT2 = untrained.named("gpt2", 768)

WAYS: dict[str, Callable[[], object]] = {
    "relay, closed form: 64 layers, 1,000 t up to 1e12": lambda: relay.distance(FAR, 64, 32, 0.5),
    "relay, simulated: 64 layers, every t up to 1e5": lambda: relay.recursion(10**5, 64, 32, 0.5),
    "untrained network, grid: 12 layers, T = 1,024": lambda: untrained.distance(GPT2, 12, 32, NEAR),
    "untrained network, full: 12 layers, T = 1,024": lambda: untrained.distance(
        GPT2, 12, 32, NEAR, form="full"
    ),
}


def measure() -> dict[str, dict[str, float]]:
    """Let the ways take turns; the first, a warm-up, is not counted."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(TURNS + 1):
        for way, run in WAYS.items():
            begun = time.perf_counter()
            run()
            if turn:
                taken[way].append(time.perf_counter() - begun)
    first = taken[next(iter(WAYS))]
    return {
        way: {
            "ratio": round(statistics.median(a / b for a, b in zip(ones, first, strict=True)), 3),
            "seconds": round(min(ones), 4),
        }
        for way, ones in taken.items()
    }


def table(result: dict[str, dict[str, float]]) -> str:
    """Lay a result out as the table in the README."""
    head = ["| solution | time, first line = 1 |", "|---|---|"]
    return "\n".join(head + [f"| {way} | {one['ratio']:.1f} |" for way, one in result.items()])


def main() -> None:
    """Measure, print and keep the table."""
    result = measure()
    RESULT.write_text(json.dumps(result, indent=2) + "\n", "utf8")
    readme = ROOT / "README.md"
    start, rest = readme.read_text("utf8").split(MARKS[0])
    end = rest.split(MARKS[1])[1]
    readme.write_text(f"{start}{MARKS[0]}\n{table(result)}\n{MARKS[1]}{end}", "utf8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
