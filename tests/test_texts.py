"""Texts as ids: counts, lengths, kinds, and the texts of this project themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_networks import SPECIAL, network, subject, texts, wrap

from nohair.errors import Refused
from nohair.lab.distances import measure
from nohair.lab.models import Subject
from nohair.lab.texts import continuations, prompts
from nohair.places import TEXTS

PROMPT = np.arange(60, 66)


@pytest.fixture(scope="module")
def bytewise() -> Subject:
    return subject("llama", bos=0, vocab_size=259)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six prompts and three continuations; their first letters tell them apart."""
    for room, count in (("prompts", 6), ("continuations", 3)):
        (tmp_path / room).mkdir()
        for i in range(count):
            letter = "ABCDEF"[i]
            (tmp_path / room / f"{letter}.txt").write_text(f"{letter} {room} " * 4 + "é\n", "utf8")
    return tmp_path


def refusal_of(ask: Any) -> str:
    with pytest.raises(Refused) as refusal:
        ask()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# Prompts


def test_prompts_are_the_first_ids_of_their_files(bytewise: Subject, folder: Path) -> None:
    drawn = prompts(bytewise, 4, 9, folder=folder)
    assert drawn.ids.shape == (4, 9)
    assert drawn.kind == "prompt"
    assert len(set(drawn.names)) == 4
    for name, ids in zip(drawn.names, drawn.ids, strict=True):
        assert bytewise.tokenizer.decode(ids) == f"{name} prompts"


def test_more_prompts_add_to_fewer(bytewise: Subject, folder: Path) -> None:
    few, many = (prompts(bytewise, k, 5, seed=3, folder=folder) for k in (2, 6))
    assert many.names[:2] == few.names
    np.testing.assert_array_equal(many.ids[:2], few.ids)
    orders = {prompts(bytewise, 6, 5, seed=s, folder=folder).names for s in range(5)}
    assert len(orders) > 1


def test_prompts_that_cannot_be_given_are_refused(bytewise: Subject, folder: Path) -> None:
    assert "at least 2" in refusal_of(lambda: prompts(bytewise, 1, 5, folder=folder))
    assert "0 tokens" in refusal_of(lambda: prompts(bytewise, 2, 0, folder=folder))
    many = refusal_of(lambda: prompts(bytewise, 7, 5, folder=folder))
    assert "7 texts" in many
    assert "holds 6" in many
    (folder / "prompts" / "C.txt").write_text("short")
    short = refusal_of(lambda: prompts(bytewise, 6, 30, folder=folder))
    assert "C.txt has 5 tokens, 30 are asked for" in short


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_refused_does_not_hang_on_the_draw(
    bytewise: Subject, folder: Path, seed: int
) -> None:
    """A prompt of exactly the length is long enough, whichever are drawn."""
    length = len("A prompts " * 4 + "é\n".encode().decode("latin1"))
    assert prompts(bytewise, 6, length, seed=seed, folder=folder).ids.shape == (6, length)
    refusal_of(lambda: prompts(bytewise, 6, length + 1, seed=seed, folder=folder))


# Continuations


def test_text_is_read_as_it_stands_and_goes_on_with_the_next(
    bytewise: Subject, folder: Path
) -> None:
    each = {f.stem: f.read_text("utf8") for f in (folder / "continuations").iterdir()}
    whole = sum(len(text.encode()) + 1 for text in each.values())
    drawn = continuations(bytewise, 3, whole, folder=folder)
    assert drawn.ids.shape == (3, whole)
    assert set(drawn.names) == set(each)
    for first, ids in enumerate(drawn.ids):
        order = drawn.names[first:] + drawn.names[:first]
        joined = "".join(each[name] + "\n" for name in order)  # a blank line between
        assert bytewise.tokenizer.decode(ids) == joined
    short = continuations(bytewise, 2, 11, folder=folder)
    assert short.names == drawn.names[:2]
    np.testing.assert_array_equal(short.ids, drawn.ids[:2, :11])


def test_shuffled_is_the_same_bag_of_ids(bytewise: Subject, folder: Path) -> None:
    text = continuations(bytewise, 3, 50, folder=folder)
    shuffled = continuations(bytewise, 3, 50, "shuffled", folder=folder)
    np.testing.assert_array_equal(np.sort(shuffled.ids), np.sort(text.ids))
    assert (shuffled.ids != text.ids).mean() > 0.5
    orders = [np.argsort(row, kind="stable").tolist() for row in shuffled.ids]
    assert orders[0] != orders[1] != orders[2]
    again = continuations(bytewise, 3, 50, "shuffled", folder=folder)
    other = continuations(bytewise, 3, 50, "shuffled", seed=1, folder=folder)
    assert again.sha256 == shuffled.sha256 != other.sha256


def test_random_is_even_over_the_vocabulary_without_special_ids(bytewise: Subject) -> None:
    drawn = continuations(bytewise, 4, 20_000, "random")
    counts = np.bincount(drawn.ids.ravel(), minlength=259)
    assert not counts[list(SPECIAL)].any()
    letters = np.delete(counts, SPECIAL)
    assert len(letters) == 256
    # 80,000 draws over 256 ids: 312 each, give or take 18; 256 of them stay within 5 deviations
    assert abs(letters - 312.5).max() < 5 * 18
    assert continuations(bytewise, 4, 20_000, "random").sha256 == drawn.sha256
    assert continuations(bytewise, 4, 20_000, "random", seed=1).sha256 != drawn.sha256


def test_random_ids_of_the_real_tokenizer_are_all_text(smoke: Subject) -> None:
    """Most special ids of a chat model have no role, so a list of the roles misses them."""
    drawn = continuations(smoke, 4, 50_000, "random")
    special = [i for i, token in smoke.tokenizer.added_tokens_decoder.items() if token.special]
    assert len(special) > 10
    assert not np.isin(drawn.ids, special).any()
    assert drawn.ids.max() < len(smoke.tokenizer)


def test_hash_knows_every_id(bytewise: Subject, folder: Path) -> None:
    drawn = continuations(bytewise, 2, 20, folder=folder)
    changed = drawn.ids.copy()
    changed[1, 19] += 1
    assert texts(changed).sha256 != drawn.sha256
    assert texts(drawn.ids.astype(np.int32)).sha256 == drawn.sha256


def test_continuations_that_cannot_be_given_are_refused(bytewise: Subject, folder: Path) -> None:
    def ask(*args: Any, **options: Any) -> str:
        return refusal_of(lambda: continuations(bytewise, *args, folder=folder, **options))

    assert "choose text, shuffled, random, generated" in ask(2, 10, "prose")
    assert "at least 1" in ask(0, 10)
    assert "at least 1" in ask(2, 0)
    assert "holds 3" in ask(4, 10)
    assert "together have" in ask(2, 10_000)
    assert "need a prompt" in ask(1, 10, "generated")


# What a model writes itself


def opinionated(bos: int | None = None) -> Subject:
    """A random network whose head is scaled up until what it writes is far from even."""
    model = network("llama", vocab_size=259)
    model.lm_head.weight.data *= 2
    return wrap(model, bos=bos)


@torch.no_grad()
def log_probabilities(whom: Subject, ids: NDArray[np.int64], tokens: int) -> torch.Tensor:
    """Of every next id but special ones, at the last `tokens` places: (tokens, vocabulary)."""
    logits: torch.Tensor = (
        whom.model(torch.from_numpy(ids)[None]).logits[0, -tokens - 1 : -1].double()
    )
    logits[:, list(SPECIAL)] = -torch.inf
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("bos", [None, 0])
def test_generated_text_is_what_the_model_finds_as_likely_as_its_entropy_says(
    bos: int | None,
) -> None:
    """At temperature 1, -log p(id) is on average the entropy; a truncated or cooler sampler,
    another prompt or a missing first token would all shift it.
    """
    whom = opinionated(bos)
    tokens = 56
    drawn = continuations(whom, 16, tokens, "generated", prompt=PROMPT).ids
    assert drawn.shape == (16, tokens)
    excess, variance, chance = 0.0, 0.0, 0.0
    head = [] if bos is None else [bos]
    for ids in drawn:
        logs = log_probabilities(whom, np.concatenate([head, PROMPT, ids]).astype(int), tokens)
        p = logs.exp()
        surprise = -logs.nan_to_num(neginf=0.0)
        entropy = (p * surprise).sum(dim=-1)
        excess += float((surprise[range(tokens), ids] - entropy).sum())
        variance += float((p * (surprise - entropy[:, None]) ** 2).sum())
        chance += float((surprise.sum(dim=-1) / 256 - entropy).sum())
    deviation = variance**0.5
    assert abs(excess) < 4 * deviation
    assert chance > 20 * deviation, "the network is too even for this test to tell"


def test_generated_text_knows_its_seed_and_leaves_the_global_one_alone() -> None:
    whom = opinionated()
    state = torch.random.get_rng_state()
    one, again, other = (
        continuations(whom, 2, 20, "generated", seed=s, prompt=PROMPT) for s in (0, 0, 7)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.sha256 == again.sha256 != other.sha256
    assert one.ids[0].tolist() != one.ids[1].tolist()


@pytest.mark.parametrize("favourite", SPECIAL)
def test_generated_text_neither_ends_early_nor_holds_special_ids(favourite: int) -> None:
    model = network("phi", vocab_size=259)
    model.lm_head.bias.data[favourite] = 100
    drawn = continuations(wrap(model), 1, 40, "generated", prompt=PROMPT)
    assert drawn.ids.shape == (1, 40)
    assert not np.isin(drawn.ids, SPECIAL).any()


# Joined as ids


def test_continuation_is_the_same_after_a_prompt_that_would_swallow_its_start(
    smoke: Subject, tmp_path: Path
) -> None:
    """CASES 12: read as one string, 'Ans' + 'wer' would become another token."""
    files = {"prompts/a": "So Ans", "prompts/b": "Ans ", "continuations/c": "wer is four\n"}
    for name, text in files.items():
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    two = prompts(smoke, 2, 2, folder=tmp_path)
    shared = continuations(smoke, 1, 3, folder=tmp_path)
    assert sorted(smoke.tokenizer.batch_decode(two.ids)) == ["Ans ", "So Ans"]
    fed: list[torch.Tensor] = []
    hook = smoke.model.base_model.register_forward_pre_hook(lambda m, args: fed.append(args[0]))
    measure(smoke, two, shared, floor=False, progress=False)
    hook.remove()
    expected = smoke.tokenizer("wer is four").input_ids
    assert torch.cat(fed, dim=1)[:, 2:].tolist() == [expected, expected]
    assert smoke.tokenizer("So Answer is four").input_ids[2:] != expected


# The texts of this project

TABLE = re.compile(r"^\| `(\S+\.txt)`\s*\| (.*?) *\|.*?([\d,]+) \|$", re.MULTILINE)


def counted(smoke: Subject, room: str) -> dict[str, int]:
    files = sorted((TEXTS / room).glob("*.txt"))
    return {f.name: len(smoke.tokenizer(f.read_text("utf8")).input_ids) for f in files}


def test_readme_lists_every_text_with_its_true_count(smoke: Subject) -> None:
    readme = (TEXTS / "README.md").read_text("utf8")
    listed = {name: int(count.replace(",", "")) for name, _, count in TABLE.findall(readme)}
    found = counted(smoke, "prompts") | counted(smoke, "continuations")
    assert listed == found
    together = re.search(r"\| together .*?([\d,]+) \|", readme)
    assert together is not None
    total = sum(counted(smoke, "continuations").values())
    assert int(together[1].replace(",", "")) == total


def test_texts_are_as_many_and_as_long_as_the_protocol_needs(smoke: Subject) -> None:
    asked, shared = counted(smoke, "prompts"), counted(smoke, "continuations")
    assert len(asked) >= 24
    assert min(asked.values()) >= 160
    assert len(shared) >= 6
    assert min(shared.values()) >= 1500
    assert sum(shared.values()) >= 9000
    readme = (TEXTS / "README.md").read_text("utf8")
    languages = [language for name, language, _ in TABLE.findall(readme) if name in asked]
    assert sum("English" not in language for language in languages) >= 4


def test_texts_are_plain_and_end_with_one_newline() -> None:
    for path in TEXTS.glob("*/*.txt"):
        text = path.read_bytes().decode("utf8")
        assert text == text.strip() + "\n", path.name
        assert "\r" not in text
        assert "\ufeff" not in text


def test_no_two_prompts_begin_alike(smoke: Subject) -> None:
    count = len(list((TEXTS / "prompts").glob("*.txt")))
    drawn = prompts(smoke, count, 160)
    assert len({tuple(row[:3]) for row in drawn.ids.tolist()}) == count


def test_long_horizon_is_joined_of_the_projects_own_texts(smoke: Subject) -> None:
    drawn = continuations(smoke, 3, 8000)
    assert drawn.ids.shape == (3, 8000)
    for name, ids in zip(drawn.names, drawn.ids, strict=True):
        own = (TEXTS / "continuations" / f"{name}.txt").read_text("utf8")
        assert smoke.tokenizer.decode(ids).startswith(own)
    assert len({tuple(row[:20]) for row in drawn.ids.tolist()}) == 3
    total = sum(counted(smoke, "continuations").values())
    assert str(total // 1000) in refusal_of(lambda: continuations(smoke, 1, total + 100))


def test_negative_seed_is_refused_by_its_value(smoke: Subject) -> None:
    with pytest.raises(Refused, match="seed = -1"):
        prompts(smoke, 2, 4, seed=-1)
