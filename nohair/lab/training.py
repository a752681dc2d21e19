"""Training a family of small models, with checkpoints from the first step to the last."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import cos, inf, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedTokenizerFast

from nohair.errors import Refused
from nohair.lab import twins
from nohair.lab.corpus import Corpus

VOCABULARY, POSITIONS = 2048, 2048
END = "<|endoftext|>"
# Each family as its own published models are built: Pythia's has no first token of its own and
# reads on from wherever a row begins, Llama's begins every row with one.
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "hidden_size": 112,
        "intermediate_size": 448,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "rotary_pct": 0.5,
        "use_parallel_residual": True,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_size": 112,
        "intermediate_size": 336,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
BEGINS = {"gpt_neox": False, "llama": True}
HELD_OUT_ROWS = 64
KEEP_EVERY = 32  # steps between two states to resume from


@dataclass(frozen=True)
class Recipe:
    """All that decides what a run gives, but for the corpus.

    Parameters
    ----------
    family
        ``gpt_neox`` or ``llama``, see `SHAPES`.
    seed
        Of the weights and of which rows are read when.
    steps, batch, context
        Steps of `batch` rows of `context` tokens.
    rate, warmup, weight_decay
        AdamW with betas 0.9 and 0.95: the rate rises over `warmup` steps to `rate` and falls along
        a cosine to a tenth of it; gradients are clipped to norm 1.
    kept
        Checkpoints whose weights are written; None for all.
    """

    family: str = "gpt_neox"
    seed: int = 0
    steps: int = 2048
    batch: int = 8
    context: int = 1024
    rate: float = 3e-3
    warmup: int = 64
    weight_decay: float = 0.1
    kept: list[int] | None = None

    def __post_init__(self) -> None:
        """Refuse a recipe that cannot be followed."""
        if self.family not in SHAPES:
            raise Refused(f"family {self.family!r} is unknown; choose {', '.join(SHAPES)}")
        if self.seed < 0:
            raise Refused(f"seed = {self.seed}: give a whole number of at least 0")
        for name in ("steps", "batch", "warmup"):
            if (value := getattr(self, name)) < 1:
                raise Refused(f"{name} = {value}: ask for at least 1")
        if not 0 < self.rate < inf:
            raise Refused(f"rate = {self.rate}: give a learning rate above 0, such as 0.003")
        if not 2 <= self.context <= POSITIONS:
            raise Refused(f"context = {self.context}: give 2 to {POSITIONS} tokens")
        if wrong := [step for step in self.kept or () if step not in self.checkpoints]:
            choices = ", ".join(map(str, self.checkpoints))
            raise Refused(f"step {wrong[0]} is no checkpoint of this run; choose from {choices}")

    @property
    def checkpoints(self) -> list[int]:
        """Steps at which the held-out loss is measured: 0, the powers of two, the last."""
        powers = [2**k for k in range(self.steps.bit_length()) if 2**k < self.steps]
        return [0, *powers, self.steps]

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.55 + 0.45 * cos(pi * done))


@dataclass(frozen=True)
class Checkpoint:
    """A step, its held-out loss in nats per token, and where its weights are, if they are kept."""

    step: int
    held_out: float
    folder: Path | None


def train(
    recipe: Recipe, corpus: Corpus, folder: Path, *, progress: bool | None = None
) -> Iterator[Checkpoint]:
    """Train, giving each checkpoint as it is written; go on where an interrupted run stopped.

    The folder holds, when all is done: ``tokenizer.json``, ``recipe.json`` (recipe, corpus and its
    hash, versions), ``loss.csv`` (per step; held out at checkpoints) and ``step0``, ``step1``, …,
    each a folder in float16 that transformers loads. On one machine, with one number of threads, a
    run gives the same bytes whether it was interrupted or not.

    Parameters
    ----------
    recipe, corpus
        What to do with which texts.
    folder
        New, or that of an interrupted run of the same recipe and corpus.
    progress
        Show a bar with the loss and the time left; by default on a terminal only.

    Raises
    ------
    Refused
        The folder is finished, or is another run's; the corpus is too small for one row.
    """
    described = {
        "recipe": asdict(recipe),
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
    }
    _check(folder, described)
    tokenizer = _tokenizer(folder, corpus, BEGINS[recipe.family])
    rows = _Rows(recipe, _stream(tokenizer, corpus.trained), tokenizer)
    held_out = _Rows(recipe, _stream(tokenizer, corpus.held_out), tokenizer).in_order(HELD_OUT_ROWS)
    _begin(folder, described, tokenizer)
    run = _Run(recipe, tokenizer, folder)
    run.resume()
    quiet = None if progress is None else not progress
    with tqdm(
        total=recipe.steps, initial=run.step, unit="step", desc="training", disable=quiet
    ) as bar:
        while True:
            if run.step in recipe.checkpoints and not run.tested:
                yield run.checkpoint(held_out)
            if run.step == recipe.steps:
                break
            bar.set_postfix(loss=f"{run.advance(rows.at(run.step)):.3f}", refresh=False)
            bar.update()
            if run.step % KEEP_EVERY == 0:
                run.keep()
    run.finish(described)


def kept_step(folder: Path) -> int:
    """Say from which step an interrupted run in this folder goes on; 0 if it kept nothing yet."""
    kept = folder / "state.pt"
    return int(torch.load(kept, weights_only=True)["step"]) if kept.exists() else 0


def _check(folder: Path, described: dict[str, Any]) -> None:
    """Refuse a folder that is neither free nor this run's own."""
    if (folder / "recipe.json").exists():
        raise Refused(f"{folder} holds a finished run; name another folder with --out")
    begun = folder / "begun.json"
    if begun.exists():
        if json.loads(begun.read_text("utf8")) != described:
            raise Refused(
                f"{folder} holds an unfinished run of another recipe or corpus; name another "
                "folder with --out, or give the same options to go on with it"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise Refused(f"{folder} is not empty and holds no run; name another folder with --out")


def _begin(folder: Path, described: dict[str, Any], tokenizer: Any) -> None:
    """Make the folder this run's own; what a state was kept after is all there already."""
    if not (folder / "state.pt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "begun.json", json.dumps(described, indent=1) + "\n")
        tokenizer.save_pretrained(folder)


def _tokenizer(folder: Path, corpus: Corpus, begins: bool) -> Any:
    """Read the tokenizer of the run, or train a byte-level BPE on the texts that are trained on."""
    if (folder / "state.pt").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus.trained,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if begins:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END)


def _stream(tokenizer: Any, texts: Sequence[str]) -> NDArray[np.int64]:
    """Join the ids of all texts, an end after each."""
    rows = tokenizer(list(texts), add_special_tokens=False).input_ids
    return np.concatenate([np.array([*row, tokenizer.eos_token_id], np.int64) for row in rows])


class _Rows:
    """Rows of one stream of ids; which ones a step reads depends on the seed and the step alone."""

    def __init__(self, recipe: Recipe, stream: NDArray[np.int64], tokenizer: Any) -> None:
        self.recipe, self.stream = recipe, stream
        self.head = [tokenizer.bos_token_id] if BEGINS[recipe.family] else []
        self.length = recipe.context - len(self.head)
        if len(stream) < self.length:
            raise Refused(
                f"the corpus has {len(stream)} tokens (held out or not), one row takes "
                f"{self.length}; give more texts or a smaller context"
            )

    def at(self, step: int) -> torch.Tensor:
        rng = np.random.default_rng([self.recipe.seed, step])
        starts = rng.integers(0, len(self.stream) - self.length + 1, self.recipe.batch)
        return self._cut(starts)

    def in_order(self, most: int) -> torch.Tensor:
        starts = np.arange(0, len(self.stream) - self.length + 1, self.length)
        return self._cut(starts[:most])

    def _cut(self, starts: NDArray[np.int64]) -> torch.Tensor:
        rows = [[*self.head, *self.stream[s : s + self.length]] for s in starts]
        return torch.tensor(rows)


class _Run:
    """The model in training, its optimiser, and what was logged so far."""

    def __init__(self, recipe: Recipe, tokenizer: Any, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        ends = tokenizer.eos_token_id
        config = AutoConfig.for_model(
            recipe.family,
            **SHAPES[recipe.family],
            vocab_size=VOCABULARY,
            max_position_embeddings=POSITIONS,
            bos_token_id=ends,
            eos_token_id=ends,
        )
        self.model = twins.fresh(config, "init", recipe.seed, torch.float32).train()
        weights = list(self.model.parameters())
        plain: dict[str, Any] = {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0}
        self.optimiser = torch.optim.AdamW(
            [{"params": [p for p in weights if p.ndim > 1]}, plain],
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
        )
        self.step = 0
        self.log: list[dict[str, Any]] = []

    @property
    def tested(self) -> bool:
        """Whether this step's held-out loss is known."""
        return any(row["step"] == self.step and row["held_out"] != "" for row in self.log)

    def advance(self, rows: torch.Tensor) -> float:
        """Take one step; its loss in nats per token, before the step."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        loss = self.model(rows, labels=rows).loss
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.log.append({"step": self.step, "loss": round(float(loss.detach()), 5), "held_out": ""})
        self.step += 1
        return float(loss.detach())

    def checkpoint(self, held_out: torch.Tensor) -> Checkpoint:
        """Measure the held-out loss, and write the weights if they are kept.

        The step counts as tested only once its folder is there: an interrupt in between repeats it.
        """
        kept = self.recipe.kept is None or self.step in self.recipe.kept
        found = Checkpoint(self.step, self._loss(held_out), self._written() if kept else None)
        self.log.append({"step": self.step, "loss": "", "held_out": round(found.held_out, 5)})
        self.keep()
        return found

    def _written(self) -> Path:
        """Write the weights in float16 to a folder of their own."""
        folder = self.folder / f"step{self.step}"
        work = folder.with_name(f".{folder.name}")
        for left in (work, folder):
            shutil.rmtree(left, ignore_errors=True)
        work.mkdir()
        half = deepcopy(self.model).half()
        half.config.dtype, half.config.architectures = torch.float16, [type(half).__name__]
        half.config.save_pretrained(work)
        # save_model would note the tied weight beside the format, in an order that is random.
        once = {name: weight.detach() for name, weight in half.named_parameters()}
        save_file(once, work / "model.safetensors", metadata={"format": "pt"})
        return work.replace(folder)

    @torch.inference_mode()
    def _loss(self, rows: torch.Tensor) -> float:
        self.model.eval()
        parts = torch.split(rows, self.recipe.batch)
        losses = [float(self.model(part, labels=part).loss) for part in parts]
        self.model.train()
        return float(np.average(losses, weights=[len(part) for part in parts]))

    def keep(self) -> None:
        """Keep all that going on from here needs."""
        state = {
            "step": self.step,
            "log": self.log,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        work = self.folder / ".state.pt"
        torch.save(state, work)
        work.replace(self.folder / "state.pt")

    def resume(self) -> None:
        """Go on from the state that was kept, if one was."""
        kept = self.folder / "state.pt"
        if kept.exists():
            state = torch.load(kept, weights_only=True)
            self.step, self.log = state["step"], state["log"]
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])

    def finish(self, described: dict[str, Any]) -> None:
        """Write what the run was, and drop what only going on would need."""
        with (self.folder / ".loss.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", "loss", "held_out"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.log)
        (self.folder / ".loss.csv").replace(self.folder / "loss.csv")
        names = ("torch", "transformers", "tokenizers", "numpy")
        surroundings = {
            "versions": {name: version(name) for name in names},
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }
        _write(self.folder / "recipe.json", json.dumps(described | surroundings, indent=1) + "\n")
        (self.folder / "state.pt").unlink()
        (self.folder / "begun.json").unlink()


def _write(path: Path, text: str) -> None:
    work = path.with_name(f".{path.name}")
    work.write_text(text, "utf8")
    os.replace(work, path)
