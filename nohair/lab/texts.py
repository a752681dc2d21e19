"""Token ids for a measurement: prompts that differ, continuations that all of them share.

Texts are turned into ids one by one and joined as ids; the joined string is never tokenised, so
every prompt is followed by the same continuation ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from nohair.errors import Refused
from nohair.lab.models import Subject
from nohair.places import TEXTS

Kind = Literal["text", "shuffled", "random", "generated"]


@dataclass(frozen=True)
class Texts:
    """Rows of token ids, all of one length.

    Parameters
    ----------
    ids
        Integers of shape (number of texts, tokens).
    names
        One per row.
    kind
        ``prompt``, or the kind of continuation.
    """

    ids: NDArray[np.int64]
    names: tuple[str, ...]
    kind: str

    @property
    def sha256(self) -> str:
        """Hash of the ids: two measurements with the same hash used the same tokens."""
        return hashlib.sha256(np.ascontiguousarray(self.ids, dtype="<i8").tobytes()).hexdigest()


def prompts(
    subject: Subject,
    count: int,
    tokens: int,
    *,
    kind: str = "text",
    seed: int = 0,
    folder: Path = TEXTS,
) -> Texts:
    """Draw prompts.

    Parameters
    ----------
    subject
        Whose tokenizer is used.
    count
        K, at least two: a distance needs a pair.
    tokens
        P, the same for all.
    kind
        ``text``: the first `tokens` ids of `count` of the files in ``folder/prompts``. ``random``:
        ids drawn evenly from the vocabulary, special ones left out.
    seed
        Decides which files, or which ids; a larger `count` adds to those of a smaller one.

    Raises
    ------
    Refused
        Unknown kind; fewer than two prompts, more than there are, or one that is too short.
    """
    if count < 2:
        raise Refused(f"{count} prompt: a distance needs at least 2 prompts")
    if tokens < 1:
        raise Refused(f"prompts of {tokens} tokens: ask for at least 1")
    if kind not in ("text", "random"):
        raise Refused(f"prompt kind {kind!r} is unknown; choose text, random")
    if kind == "random":
        ids = _rng(seed, "prompts").choice(_ordinary(subject), (count, tokens))
        return Texts(ids, _numbered(kind, count), "prompt")
    files = _choose(folder / "prompts", count, seed)
    rows = []
    for file in files:
        ids = _ids(subject, _read(file))
        if len(ids) < tokens:
            raise Refused(
                f"prompt {file.name} has {len(ids)} tokens, {tokens} are asked for; "
                "ask for fewer or lengthen the text"
            )
        rows.append(ids[:tokens])
    return Texts(np.stack(rows), tuple(file.stem for file in files), "prompt")


def continuations(
    subject: Subject,
    count: int,
    tokens: int,
    kind: str = "text",
    *,
    seed: int = 0,
    folder: Path = TEXTS,
    prompt: NDArray[np.int64] | None = None,
    bos: bool = True,
) -> Texts:
    """Draw continuations of `tokens` ids.

    Parameters
    ----------
    subject
        Whose tokenizer is used (and, for ``generated``, whose sampler).
    count
        How many; each starts with another file of ``folder/continuations``.
    tokens
        T; a text that ends earlier goes on with the next file.
    kind
        ``text``: prose as it stands. ``shuffled``: the same ids in random order, which keeps
        how often a token occurs and destroys the rest. ``random``: ids drawn evenly from the
        vocabulary, special ones left out. ``generated``: the model's own, sampled at
        temperature 1 after `prompt`.
    seed
        Of the choice, the shuffling and the sampling.
    prompt, bos
        The ids, shape (P,), from which ``generated`` sets out, and whether the tokenizer's own
        first token, if it has one, precedes them.

    Raises
    ------
    Refused
        Unknown kind, no continuation asked for, more than there are, or a horizon longer than
        all texts together.
    """
    if kind not in get_args(Kind):
        raise Refused(f"continuation kind {kind!r} is unknown; choose {', '.join(get_args(Kind))}")
    if count < 1 or tokens < 1:
        raise Refused(f"{count} continuations of {tokens} tokens: ask for at least 1 of 1")
    rng = _rng(seed)
    if kind == "random":
        return Texts(rng.choice(_ordinary(subject), (count, tokens)), _numbered(kind, count), kind)
    if kind == "generated":
        if prompt is None:
            raise Refused("generated continuations need a prompt to set out from")
        head = [subject.bos] if bos and subject.bos is not None else []
        subject.check_room(len(prompt), tokens, len(head))
        before = np.concatenate([np.array(head, np.int64), prompt])
        rows = [_generate(subject, before, tokens, (seed, c)) for c in range(count)]
        return Texts(np.stack(rows), _numbered(kind, count), kind)
    ids, names = _joined(subject, count, tokens, seed, folder / "continuations")
    if kind == "shuffled":
        ids = rng.permuted(ids, axis=1)
    return Texts(ids, names, kind)


def _choose(folder: Path, count: int, seed: int) -> list[Path]:
    files = sorted(folder.glob("*.txt"))
    if count > len(files):
        raise Refused(f"{count} texts asked for, {folder.name}/ holds {len(files)}; add some")
    order = _rng(seed).permutation(len(files))
    return [files[i] for i in order[:count]]


def _rng(seed: int, use: str = "") -> np.random.Generator:
    """Random numbers of one seed; another `use` of the same seed gets others."""
    if seed < 0:
        raise Refused(f"seed = {seed}: give a whole number of at least 0")
    return np.random.default_rng([seed, *use.encode()])


def _read(file: Path) -> str:
    try:
        return file.read_text("utf8")
    except UnicodeDecodeError as error:
        raise Refused(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _ids(subject: Subject, text: str) -> NDArray[np.int64]:
    return np.array(subject.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int64)


def _joined(
    subject: Subject, count: int, tokens: int, seed: int, folder: Path
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Let each row start with a file of its own and go on, a blank line between, with the next."""
    _choose(folder, count, seed)
    files = _choose(folder, len(list(folder.glob("*.txt"))), seed)
    texts = [_ids(subject, _read(file) + "\n") for file in files]
    if tokens > (total := sum(map(len, texts))):
        raise Refused(
            f"a horizon of {tokens} tokens: the continuations together have {total}; "
            "ask for fewer or add texts"
        )
    rows = [np.concatenate(texts[c:] + texts[:c])[:tokens] for c in range(count)]
    return np.stack(rows), tuple(file.stem for file in files[:count])


def _vocabulary(subject: Subject) -> NDArray[np.int64]:
    return np.arange(min(len(subject.tokenizer), subject.model.config.vocab_size))


def _ordinary(subject: Subject) -> NDArray[np.int64]:
    return np.setdiff1d(_vocabulary(subject), _special(subject))


def _special(subject: Subject) -> list[int]:
    """All of them: `all_special_ids` names only those with a role (begin, end, padding)."""
    tokens = subject.tokenizer.added_tokens_decoder.items()
    return [i for i, token in tokens if token.special]


def _numbered(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}-{c + 1}" for c in range(count))


def _generate(
    subject: Subject, before: NDArray[np.int64], tokens: int, seed: tuple[int, int]
) -> NDArray[np.int64]:
    ids = torch.from_numpy(before[None]).to(subject.device)
    outside = range(len(_vocabulary(subject)), subject.model.config.vocab_size)
    devices = [subject.device] if subject.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        out = subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            suppress_tokens=[*_special(subject), *outside] or None,
            pad_token_id=0,
            # The model's own distribution: whatever its configuration would add is undone.
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
    drawn: NDArray[np.int64] = out[0, ids.shape[1] :].cpu().numpy()
    return drawn
