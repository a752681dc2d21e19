"""What a streamed measurement costs, beside the bare forward pass and the obvious loop.

Run `make benchmark`. Every way runs in a process of its own on the same batch (K prompts, one
continuation); the ways take turns, and ratios are taken within a turn. The table goes to standard
output, to benchmarks/overhead.json, and between the marks in README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil
import torch

from nohair.lab import bias, conditions, distances, models, texts
from nohair.lab.models import Subject
from nohair.lab.texts import Texts
from nohair.places import ROOT

RESULT = Path(__file__).with_suffix(".json")
MARKS = ("<!-- overhead -->", "<!-- /overhead -->")


def bare(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    shared = np.tile(continuation.ids, (len(prompts.ids), 1))
    ids = torch.from_numpy(np.concatenate([prompts.ids, shared], axis=1))
    with torch.inference_mode():
        subject.model.base_model(ids, use_cache=False)


def streamed(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    distances.measure(subject, prompts, continuation, floor=False)


def with_floor(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    distances.measure(subject, prompts, continuation, floor=True)


def biased(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    with bias.dilution_bias(subject, prompts.ids.shape[1], strength=1.0) as under:
        streamed(under, prompts, continuation)


def preserving(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    bias.preserving(subject, prompts, continuation)


def inspected(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    conditions.inspect(subject, prompts, continuation)


def pairwise(subject: Subject, prompts: Texts, continuation: Texts) -> None:
    """The loop that one writes first: two forward passes per pair, all states kept."""
    horizon = continuation.ids.shape[1]
    for pair in combinations(prompts.ids, 2):
        states = []
        for prompt in pair:
            ids = torch.from_numpy(np.concatenate([prompt, continuation.ids[0]])[None])
            with torch.inference_mode():
                out = subject.model(ids, output_hidden_states=True)
            states.append(torch.stack(out.hidden_states)[:, 0, -horizon:])
        torch.linalg.vector_norm(states[0] - states[1], dim=-1)


WAYS: dict[str, Callable[[Subject, Texts, Texts], None]] = {
    "bare": bare,
    "streamed": streamed,
    "with_floor": with_floor,
    "biased": biased,
    "preserving": preserving,
    "inspected": inspected,
    "pairwise": pairwise,
}
TITLES = {
    "bare": "bare forward pass, no logits",
    "streamed": "streamed measurement",
    "with_floor": "streamed measurement with its floor",
    "biased": "streamed measurement under a bias, λ = 1",
    "preserving": "finding the bias that keeps every head's share of the prompt",
    "inspected": "conditions and constants of the theorem, norms of the weights included",
    "pairwise": "pair by pair, `output_hidden_states=True`",
}


def once(way: str, count: int, tokens: int, horizon: int, model: str) -> dict[str, float]:
    """Time one way in this process and watch how far its memory grows."""
    subject = models.load(model)
    prompts = texts.prompts(subject, count, tokens)
    continuation = texts.continuations(subject, 1, horizon)
    bare(subject, Texts(prompts.ids[:1], prompts.names[:1], "prompt"), continuation)  # warm up
    process, before, peak, done = psutil.Process(), 0, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    before = peak = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    WAYS[way](subject, prompts, continuation)
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    shape = subject.anatomy
    width = subject.model.config.head_dim * shape.kv_heads
    cache = 2 * shape.layers * width * (tokens + horizon) * count * 4
    return {
        "seconds": seconds,
        "growth_mib": (peak - before) / 2**20,
        "peak_mib": peak / 2**20,
        "cache_mib": cache / 2**20,
    }


def main() -> None:
    """Let the ways take turns, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--horizon", type=int, default=1024)
    parser.add_argument("--long-horizon", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="run this one here and print its numbers")
    asked = parser.parse_args()
    if asked.way:
        settings = (asked.prompts, asked.prompt_tokens, asked.horizon, asked.model)
        print(json.dumps(once(asked.way, *settings)))
        return
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(asked.turns):
        for way in WAYS:
            if way == "pairwise" and turn:
                continue  # minutes long, and its ratio is far from any bound
            print(f"turn {turn + 1} of {asked.turns}: {way}", file=sys.stderr)
            runs[way].append(_apart(asked, way, asked.horizon))
    print(f"long horizon, T = {asked.long_horizon}", file=sys.stderr)
    long = _apart(asked, "streamed", asked.long_horizon)
    result = {
        "model": asked.model,
        "prompts": asked.prompts,
        "prompt_tokens": asked.prompt_tokens,
        "horizon": asked.horizon,
        "cores": psutil.cpu_count(),
        "torch": torch.__version__,
        "ways": {way: _against_bare(taken, runs["bare"]) for way, taken in runs.items()},
        "cache_mib": round(runs["bare"][0]["cache_mib"]),
        "long": {"horizon": asked.long_horizon, "peak_mib": round(long["peak_mib"])},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", "utf8")
    lines = table(result)
    readme = ROOT / "README.md"
    head, rest = readme.read_text("utf8").split(MARKS[0])
    tail = rest.split(MARKS[1])[1]
    readme.write_text(f"{head}{MARKS[0]}\n{lines}\n{MARKS[1]}{tail}", "utf8")
    print(lines)


def _apart(asked: argparse.Namespace, way: str, horizon: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--model", asked.model]
    command += ["--prompts", str(asked.prompts), "--prompt-tokens", str(asked.prompt_tokens)]
    command += ["--horizon", str(horizon)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _against_bare(
    taken: list[dict[str, float]], bare_taken: list[dict[str, float]]
) -> dict[str, float]:
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(taken, bare_taken, strict=False)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "growth_mib": round(statistics.median(a["growth_mib"] for a in taken)),
    }


def table(result: dict[str, object]) -> str:
    """Lay a result out as the table in the README."""
    ways: dict[str, dict[str, float]] = result["ways"]  # type: ignore[assignment]
    long: dict[str, int] = result["long"]  # type: ignore[assignment]
    lines = [
        f"K = {result['prompts']}, P = {result['prompt_tokens']}, T = {result['horizon']}, "
        f"{result['model']}, {result['cores']} cores:",
        "",
        "| way | time, bare = 1 (lowest, highest) | memory growth |",
        "|---|---|---|",
    ]
    for way, numbers in ways.items():
        spread = f"{numbers['ratio']:.2f} ({numbers['ratio_low']:.2f}, {numbers['ratio_high']:.2f})"
        lines.append(f"| {TITLES[way]} | {spread} | {numbers['growth_mib']:.0f} MiB |")
    lines += [
        "",
        f"The model's key-value cache takes {result['cache_mib']} MiB of the streamed ones. "
        f"T = {long['horizon']} peaks at {long['peak_mib'] / 1024:.1f} GiB, model included.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
