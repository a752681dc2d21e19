"""One measurement from its settings: draw the texts, run the model, label the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import get_args

import xarray as xr

from nohair import records
from nohair.errors import Refused
from nohair.lab import bias, distances, texts
from nohair.lab.models import Subject
from nohair.lab.texts import Texts
from nohair.places import TEXTS


@dataclass(frozen=True)
class Protocol:
    """The settings that two measurements must share to be comparable.

    Parameters
    ----------
    prompts
        K, how many prompts; K(K-1)/2 pairs.
    prompt_tokens
        P, tokens per prompt.
    continuations
        How many continuations.
    horizon
        T, tokens per continuation.
    kind
        Of the continuations: ``text``, ``shuffled``, ``random`` or ``generated``.
    bos
        Whether the tokenizer's own first token, if it has one, precedes each prompt.
    seed
        Of the choice of texts, of shuffling and of sampling.
    bias
        Strength λ of the bias on the prompt's logits, 0 for none; ``exact`` for the one that keeps
        each head's share of the prompt as it is at t_0, found on these very texts.
    bias_from
        t_0, where the bias is zero.
    """

    prompts: int = 8
    prompt_tokens: int = 32
    continuations: int = 4
    horizon: int = 1024
    kind: str = "text"
    bos: bool = True
    seed: int = 0
    bias: float | str = 0.0
    bias_from: int = 16

    def __post_init__(self) -> None:
        """Refuse settings that no model can be measured with.

        Raises
        ------
        Refused
            Fewer than two prompts, fewer than one of anything else, or a seed out of range.
        """
        if self.prompts < 2:
            raise Refused(f"prompts = {self.prompts}: a distance needs at least 2 prompts")
        if not 0 <= self.seed < 2**32:
            raise Refused(f"seed = {self.seed}: give a whole number from 0 to {2**32 - 1}")
        for name in ("prompt_tokens", "continuations", "horizon", "bias_from"):
            if (value := getattr(self, name)) < 1:
                raise Refused(f"{name} = {value}: ask for at least 1")
        if self.kind not in get_args(texts.Kind):
            kinds = ", ".join(get_args(texts.Kind))
            raise Refused(f"continuation kind {self.kind!r} is unknown; choose {kinds}")
        if self.bias != "exact" and not (
            isinstance(self.bias, int | float) and isfinite(self.bias)
        ):
            raise Refused(f"bias = {self.bias!r}: give a number (the strength λ) or 'exact'")


def run(
    subject: Subject,
    protocol: Protocol,
    *,
    folder: Path = TEXTS,
    chunk: int = 512,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure one subject.

    Parameters
    ----------
    subject
        The model.
    protocol
        The settings.
    folder
        Holds ``prompts/*.txt`` and ``continuations/*.txt``.
    chunk, progress
        As in `nohair.lab.distances.measure`.

    Returns
    -------
    xarray.Dataset
        What `nohair.lab.distances.measure` returns; its ``attrs`` hold the protocol and the
        surroundings too.

    Raises
    ------
    Refused
        What the texts or the model cannot give; nothing was run.
    Failed
        See `nohair.lab.distances.measure`.
    """
    head = int(protocol.bos and subject.bos is not None)
    subject.check_room(protocol.prompt_tokens, protocol.horizon, head)
    asked = texts.prompts(
        subject, protocol.prompts, protocol.prompt_tokens, seed=protocol.seed, folder=folder
    )
    shared = texts.continuations(
        subject,
        protocol.continuations,
        protocol.horizon,
        protocol.kind,
        seed=protocol.seed,
        folder=folder,
        prompt=asked.ids[0],
        bos=protocol.bos,
    )
    with _biased(subject, protocol, asked, shared, head) as measured:
        record = distances.measure(
            measured, asked, shared, chunk=chunk, bos=protocol.bos, progress=progress
        )
    settings = {"protocol": asdict(protocol), **records.surroundings()}
    return record.assign_attrs(settings)


@contextmanager
def _biased(
    subject: Subject, protocol: Protocol, prompts: Texts, continuations: Texts, head: int
) -> Iterator[Subject]:
    """Put the protocol's bias on the subject until the block ends."""
    tokens, start = protocol.prompt_tokens, protocol.bias_from
    if protocol.bias == "exact":
        table = bias.preserving(subject, prompts, continuations, start, bos=protocol.bos)
        about = {"strength": "exact", "start": start}
        with bias.prompt_bias(subject, tokens, table, head=head, about=about) as biased:
            yield biased
    else:
        strength = float(protocol.bias)
        with bias.dilution_bias(subject, tokens, strength, start, head=head) as biased:
            yield biased
