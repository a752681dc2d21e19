"""The families that come with the project: each checkpoint its own, and trained."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nohair.lab.checkpoints import check_learning, fingerprint
from nohair.lab.models import load, presets
from nohair.lab.training import Recipe
from nohair.places import DATA

TINY = DATA / "tiny"
PRESETS = {name: DATA / entry["trained"] for name, entry in presets().items() if "trained" in entry}
of_each_family = pytest.mark.parametrize("name", PRESETS)


def recipe(family: Path) -> tuple[Recipe, dict]:
    described = json.loads((family / "recipe.json").read_text("utf8"))
    return Recipe(**described["recipe"]), described


def held_out(family: Path) -> dict[int, float]:
    with (family / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row["held_out"]) for row in rows if row["held_out"]}


def weights(family: Path) -> Iterator[Path]:
    yield from family.glob("step*/model.safetensors")


def test_every_family_there_is_a_preset() -> None:
    assert sorted(PRESETS.values()) == sorted(path for path in TINY.iterdir() if path.is_dir())


def test_all_of_it_is_small_enough_to_come_with_the_project() -> None:
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 40e6


def test_no_two_checkpoints_of_any_family_have_the_same_weights() -> None:
    steps = [f"{name}@{path.parent.name}" for name in PRESETS for path in weights(PRESETS[name])]
    seen = {fingerprint(load(step, device="cpu").model) for step in steps}
    assert len(seen) == len(steps) > len(PRESETS)


@of_each_family
def test_there_are_the_steps_that_the_recipe_keeps(name: str) -> None:
    planned, _ = recipe(PRESETS[name])
    kept = planned.checkpoints if planned.kept is None else planned.kept
    assert {path.parent.name for path in weights(PRESETS[name])} == {f"step{s}" for s in kept}


@of_each_family
def test_held_out_loss_is_there_for_every_checkpoint_and_falls_all_the_way(name: str) -> None:
    planned, _ = recipe(PRESETS[name])
    losses = held_out(PRESETS[name])
    assert list(losses) == planned.checkpoints
    check_learning(losses)
    assert list(losses.values()) == sorted(losses.values(), reverse=True)
    # A network that knows nothing loses ln 2048 = 7.62.
    assert losses[0] > 7.6
    assert losses[planned.steps] < 4


@of_each_family
def test_loss_of_every_step_is_there(name: str) -> None:
    planned, _ = recipe(PRESETS[name])
    with (PRESETS[name] / "loss.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == list(range(planned.steps))


@of_each_family
def test_all_weights_are_finite_and_float16(name: str) -> None:
    for path in weights(PRESETS[name]):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 — a safetensors file is no mapping
                value = file.get_tensor(key)
                assert value.dtype == torch.float16
                assert value.isfinite().all()


@of_each_family
def test_recipe_counts_the_parameters_of_the_model(name: str) -> None:
    _, described = recipe(PRESETS[name])
    model = load(name, device="cpu").model
    assert sum(p.numel() for p in model.parameters()) == described["parameters"]


def test_all_were_trained_on_the_same_texts() -> None:
    assert len({recipe(family)[1]["corpus_sha256"] for family in PRESETS.values()}) == 1


def test_a_step_is_loaded_by_its_name() -> None:
    found = load("tiny@step64", device="cpu")
    assert found.provenance["revision"] == "step64"
    assert list(found.provenance["weights_sha256"]) == ["model.safetensors"]


@of_each_family
def test_transformers_alone_reads_a_step_and_the_tokenizer(name: str) -> None:
    family = PRESETS[name]
    tokenizer = AutoTokenizer.from_pretrained(family)
    model = AutoModelForCausalLM.from_pretrained(family / "step512")
    assert model.dtype == torch.float16
    text = "The state of the Union is — naturally — strong."
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
    assert (ids[0, 0] == tokenizer.bos_token_id) == (name == "tiny-llama")
    with torch.inference_mode():
        surprise = float(model.float()(ids, labels=ids).loss)
    assert surprise < 6  # a network that knows nothing: 7.62
