"""A training run as a row of subjects: its checkpoints, one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from nohair.errors import Refused
from nohair.lab import models
from nohair.lab.models import Subject
from nohair.lab.texts import Texts


def each(
    family: str, steps: Sequence[int], dtype: str = "float32", device: str = "auto"
) -> Iterator[tuple[int, Subject]]:
    """Load the checkpoints of a run, one at a time, and see that no two are the same.

    Parameters
    ----------
    family
        What has checkpoints named ``step0``, ``step1``, …: a preset or a folder that ``nohair
        train`` made, or a hub id with such revisions.
    steps
        Steps of training, increasing.
    dtype, device
        As for `nohair.lab.models.load`.

    Raises
    ------
    Refused
        Fewer than two steps, or not increasing; a step that is not there; two steps with the same
        weights.
    """
    if len(steps) < 2:
        raise Refused(f"steps = {list(steps)}: what changes with training takes at least 2 steps")
    for before, after in pairwise(steps):
        if after <= before:
            raise Refused(
                f"steps = {list(steps)}: {after} comes after {before}; name each step once, "
                "in the order of training"
            )
    seen: dict[str, int] = {}
    for step in steps:
        subject = models.load(f"{family}@step{step}", dtype=dtype, device=device)
        earlier = seen.setdefault(fingerprint(subject.model), step)
        if earlier != step:
            raise Refused(
                f"{family}: steps {earlier} and {step} have the same weights; fetch them again, "
                "or leave one out"
            )
        yield step, subject


def fingerprint(model: Any) -> str:
    """Hash a model's weights, names and values, as sha256."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@torch.inference_mode()
def loss(subject: Subject, continuations: Texts) -> float:
    """Measure the mean next-token loss on the texts themselves, with no prompt, in nats."""
    head = [] if subject.bos is None else [subject.bos]
    losses = []
    for row in continuations.ids:
        ids = torch.tensor([[*head, *row]], device=subject.device)
        losses.append(float(subject.model(ids, labels=ids).loss))
    return sum(losses) / len(losses)


def check_learning(losses: Mapping[int, float]) -> None:
    """Refuse steps whose loss did not fall from the first to the last: no training lies between.

    Parameters
    ----------
    losses
        In nats per token, by step, in the order of training.

    Raises
    ------
    Refused
        The last loss is not below the first.
    """
    first, *_, last = losses
    if not losses[last] < losses[first]:
        raise Refused(
            f"the loss is {losses[first]:.3f} at step {first} and {losses[last]:.3f} at step "
            f"{last}: it did not fall; name the steps of one training run"
        )
