"""Records come back as they were saved; what is none is refused; nothing is half written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from nohair import records
from nohair.errors import Refused

ATTRS: dict[str, Any] = {
    "model": "smoke",
    "revision": None,
    "weights_sha256": {"a.safetensors": "00ff", "b.safetensors": "11ee"},
    "window": [16, 1024],
    "bos": True,
    "shuffled": False,
    "seed": 0,
    "seconds": 1.5,
    "note": "",
    "text": "naïve „Text“\nin two lines",
}


def record(seed: int = 0, horizon: int = 7) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    return xr.Dataset(
        {
            "distance": (
                ("layer", "continuation", "pair", "t"),
                rng.random((2, 1, 3, horizon), np.float32),
            ),
            "floor": (("layer",), np.array([np.nan, 1e-6])),
        },
        coords={
            "layer": [1, 2],
            "site": ("layer", ["block", "final"]),
            "continuation": ["1_story"],
            "pair": ["a | b", "a | c", "b | c"],
            "t": np.arange(1, horizon + 1),
        },
        attrs=ATTRS,
    )


def refusal_of(path: Path | str) -> str:
    with pytest.raises(Refused) as refusal:
        records.load(path)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = record()
    found = records.load(records.save(saved, tmp_path / "one.nc"))
    xr.testing.assert_identical(found, saved)
    for name in saved.variables:
        assert found[name].dtype.kind == saved[name].dtype.kind or name in {"site", "pair"}
    assert found.distance.dtype == np.float32
    assert found.attrs == ATTRS
    assert {k: type(v) for k, v in found.attrs.items()} == {k: type(v) for k, v in ATTRS.items()}


def test_saving_leaves_the_given_record_alone(tmp_path: Path) -> None:
    saved = record()
    records.save(saved, tmp_path / "one.nc")
    xr.testing.assert_identical(saved, record())


def test_others_can_read_the_plain_attributes(tmp_path: Path) -> None:
    path = records.save(record(), tmp_path / "one.nc")
    with xr.open_dataset(path) as file:
        assert file.attrs["model"] == "smoke"
        assert file.attrs["seconds"] == 1.5
        assert json.loads(file.attrs["provenance"]) == ATTRS


def test_ending_is_added_and_the_summary_lies_beside(tmp_path: Path) -> None:
    path = records.save(record(), tmp_path / "new" / "smollm2.v1", {"alpha": 0.6, "low": None})
    assert path == tmp_path / "new" / "smollm2.v1.nc"
    assert json.loads((path.parent / "smollm2.v1.json").read_text()) == {"alpha": 0.6, "low": None}
    assert sorted(p.name for p in path.parent.iterdir()) == ["smollm2.v1.json", "smollm2.v1.nc"]


def test_reference_record_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    records.save(record(), tmp_path / "smollm2-long.nc")
    xr.testing.assert_identical(records.load("smollm2-long"), record())
    assert records.references() == ["smollm2-long"]
    assert "smollm2-long" in refusal_of("smolm2-long")


def test_every_reference_record_loads() -> None:
    for name in records.references():
        assert records.load(name).sizes, name


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path / "none.nc") in refusal_of(tmp_path / "none.nc")


@pytest.mark.parametrize("kept", [0, 1, 7, 100, 0.5, 0.9, 0.999])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = records.save(record(horizon=2000), tmp_path / "one.nc")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    assert str(path) in refusal_of(path)


def test_damage_within_the_data_is_refused(tmp_path: Path) -> None:
    path = records.save(record(horizon=20000), tmp_path / "one.nc")
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 2000] = bytes(2000)
    path.write_bytes(whole)
    assert str(path) in refusal_of(path)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.nc"
    xr.Dataset({"temperature": ("t", [1.0, 2.0])}).to_netcdf(foreign)
    assert "no schema" in refusal_of(foreign)
    text = tmp_path / "summary.nc"
    text.write_text('{"alpha": 0.6}')
    assert str(text) in refusal_of(text)
    assert str(tmp_path) in refusal_of(tmp_path)


def test_record_of_another_schema_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "SCHEMA", records.SCHEMA + 1)
    path = records.save(record(), tmp_path / "later.nc")
    monkeypatch.undo()
    found = refusal_of(path)
    assert str(path) in found
    assert re.search(r"schema 2, 1 is read", found)


@pytest.mark.parametrize("provenance", [None, "", '{"model": ', "[1, 2]", 3])
def test_record_without_readable_provenance_is_refused(
    tmp_path: Path, provenance: str | int | None
) -> None:
    path = tmp_path / "foreign.nc"
    attrs = {"nohair_schema": records.SCHEMA, "provenance": provenance}
    kept = {name: value for name, value in attrs.items() if value is not None}
    record().drop_attrs().assign_attrs(kept).to_netcdf(path)
    assert str(path) in refusal_of(path)


def test_folder_that_is_a_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(Refused, match=r"cannot write .*file"):
        records.save(record(), tmp_path / "file" / "one.nc")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write into any folder"
)
def test_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(Refused, match="cannot write"):
        records.save(record(), locked / "one.nc")
    assert not list(locked.iterdir())


def test_folder_in_the_place_of_the_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.nc").mkdir()
    with pytest.raises(Refused, match="is a folder"):
        records.save(record(), tmp_path / "one.nc")
    assert [p.name for p in tmp_path.iterdir()] == ["one.nc"]


@pytest.mark.parametrize("when", ["at once", "half written", "at the summary"])
def test_failure_midway_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = records.save(record(), tmp_path / "one.nc", {"alpha": 0.5})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def broken(self: xr.Dataset, to: Path, **options: Any) -> None:
        if when == "half written":
            Path(to).write_bytes(b"\x89HDF")
        raise KeyboardInterrupt

    if when != "at the summary":
        monkeypatch.setattr(xr.Dataset, "to_netcdf", broken)
    summary = {"alpha": object()} if when == "at the summary" else {"alpha": 0.9}
    with pytest.raises((KeyboardInterrupt, TypeError)):
        records.save(record(seed=1), path, summary)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_new_record_replaces_the_old_one(tmp_path: Path) -> None:
    path = records.save(record(), tmp_path / "one.nc", {"alpha": 0.5})
    records.save(record(seed=1), path, {"alpha": 0.9})
    xr.testing.assert_identical(records.load(path), record(seed=1))
    assert json.loads(path.with_suffix(".json").read_text()) == {"alpha": 0.9}


def test_thin_record_keeps_log_spaced_positions_as_they_are() -> None:
    whole = record(horizon=4096)
    small = records.thin(whole, points=40)
    t = small.t.to_numpy()
    assert (t[0], t[-1]) == (1, 4096)
    assert 25 <= len(t) <= 40
    assert len(set(t)) == len(t)
    late = np.diff(np.log(t[t > 100]))
    np.testing.assert_allclose(late, np.log(4096) / 39, rtol=0.01)  # positions are whole numbers
    xr.testing.assert_identical(small, whole.sel(t=t))


def test_thin_record_can_be_thinned_again() -> None:
    once = records.thin(record(horizon=4096), points=24)
    again = records.thin(once, points=200)
    assert again.t.to_index().is_unique
    assert set(again.t.to_numpy()) <= set(once.t.to_numpy())


def test_surroundings_say_what_a_measurement_was_made_with() -> None:
    found = records.surroundings()
    assert set(found["versions"]) == set(records.VERSIONS)
    assert found["peak_mib"] > 10
    assert json.loads(json.dumps(found)) == found
