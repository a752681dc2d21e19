"""A measurement from its settings: each setting reaches what it names."""

from dataclasses import replace

import pytest

from nohair.lab.models import Subject
from nohair.lab.protocol import Protocol, run

SMALL = Protocol(prompts=2, prompt_tokens=6, continuations=1, horizon=12)


@pytest.mark.parametrize("kind", ["text", "shuffled", "random", "generated"])
def test_the_seed_decides_prompts_and_continuations_and_repeats_them(
    smoke: Subject, kind: str
) -> None:
    first, again, other = (
        run(smoke, replace(SMALL, kind=kind, seed=seed), progress=False) for seed in (0, 0, 1)
    )
    assert first.equals(again)
    assert first.attrs["continuation_kind"] == kind
    for texts in ("prompts_sha256", "continuations_sha256"):
        assert first.attrs[texts] == again.attrs[texts] != other.attrs[texts]


def test_a_record_carries_its_settings_and_has_their_shape(smoke: Subject) -> None:
    record = run(smoke, SMALL, progress=False)
    assert Protocol(**record.attrs["protocol"]) == SMALL
    sizes = record.sizes
    assert (sizes["prompt"], sizes["continuation"], sizes["t"]) == (2, 1, 12)
