"""Labelled results on disk: an `xarray.Dataset` as NetCDF, a JSON summary beside it."""

from __future__ import annotations

import difflib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import xarray as xr

from nohair.errors import Failed, Refused
from nohair.places import RECORDS, ROOT

SCHEMA = 1
VERSIONS = ("nohair", "torch", "transformers", "numpy", "scipy", "xarray")


def save(record: xr.Dataset, path: str | Path, summary: dict[str, Any] | None = None) -> Path:
    """Write a record, and its summary beside it, each complete or not at all.

    Parameters
    ----------
    record
        Its ``attrs`` may hold anything that JSON can: they are kept as one JSON text, the plain
        ones also as NetCDF attributes of their own.
    path
        Where to; the ending ``.nc`` is added when missing, the summary gets ``.json``.
    summary
        The few numbers that people quote; without it, the record's ``attrs``.

    Returns
    -------
    pathlib.Path
        Of the NetCDF file.

    Raises
    ------
    Refused
        The folder cannot be written.
    Failed
        Writing stopped midway, for instance on a full disk; an earlier record is as it was.
    """
    path = writable(path)
    plain = {k: v for k, v in record.attrs.items() if isinstance(v, str | int | float)}
    plain = {k: int(v) if isinstance(v, bool) else v for k, v in plain.items()}
    stamped = record.drop_attrs(deep=False).assign_attrs(
        plain, nohair_schema=SCHEMA, provenance=json.dumps(record.attrs)
    )
    packing = {name: {"zlib": True, "complevel": 4} for name in record.data_vars}
    text = json.dumps(summary or record.attrs, indent=2) + "\n"
    try:
        with _beside(path) as work:
            stamped.to_netcdf(work / path.name, engine="netcdf4", encoding=packing)
            (work / path.with_suffix(".json").name).write_text(text, "utf8")
    except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as the latter
        reason = str(error).splitlines()[0]
        raise Failed(f"{path} could not be written ({reason}); nothing was published") from None
    return path


def writable(path: str | Path) -> Path:
    """Complete the path of a record to be, and see that its folder takes files.

    Parameters
    ----------
    path
        The ending ``.nc`` is added when missing.

    Raises
    ------
    Refused
        The folder cannot be made or written, or one of the files would replace a folder.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise Refused(f"{path} is a folder; name a file for the record")
        path = path if path.suffix == ".nc" else path.with_name(path.name + ".nc")
        for file in (path, path.with_suffix(".json"), path.with_suffix(".svg")):
            if file.is_dir():
                raise Refused(f"{file} is a folder and would be replaced; choose another name")
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        TemporaryDirectory(dir=nearest, prefix=".writing-").cleanup()
    except OSError as error:
        raise Refused(f"cannot write {path} ({error.strerror}); choose another") from None
    return path


def load(name: str | Path) -> xr.Dataset:
    """Read a record.

    Parameters
    ----------
    name
        A path, or the name of a reference record in ``data/records``.

    Raises
    ------
    Refused
        No such record (the nearest name is shown), or a file that is no record.
    """
    path = Path(name)
    if not path.exists():
        path = RECORDS / f"{name}.nc"
    if not path.is_file():
        known = references()
        near = difflib.get_close_matches(str(name), known, 1) or known
        raise Refused(
            f"record {str(name)!r} is neither a file nor a reference record; "
            f"nearest: {', '.join(near) or 'none'}"
        )
    try:
        with xr.open_dataset(path, engine="netcdf4") as file:
            record = file.load()
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"{path} is no record ({str(error).splitlines()[0]}); measure anew") from None
    schema = record.attrs.get("nohair_schema")
    if schema != SCHEMA:
        found = "no schema" if schema is None else f"schema {schema}"
        raise Refused(f"{path} is no record of this version: {found}, {SCHEMA} is read here")
    try:
        return record.drop_attrs(deep=False).assign_attrs(json.loads(record.attrs["provenance"]))
    except (KeyError, TypeError, ValueError):
        raise Refused(f"{path} has lost its provenance; measure anew") from None


def provenance(record: xr.Dataset) -> dict[str, str]:
    """Say where a record comes from, one readable line per thing; what is not known is left out."""
    return {
        key.replace("_", " "): ", ".join(f"{k}: {v}" for k, v in value.items())
        if isinstance(value, dict)
        else str(value)
        for key, value in record.attrs.items()
        if value not in (None, "", {})
    }


def references() -> list[str]:
    """Name the records that come with the project, in ``data/records``."""
    return sorted(path.stem for path in RECORDS.glob("*.nc"))


def thin(record: xr.Dataset, points: int = 96) -> xr.Dataset:
    """Keep log-spaced positions only: a record small enough to be shared.

    What is kept is as measured. A fit of a thinned record sees fewer positions, so its exponent
    scatters a little about that of the whole one (by 0.01 on SmolLM2); the summary beside a
    reference record has the exponents of the whole.

    Parameters
    ----------
    record
        Any record with a coordinate ``t``.
    points
        About how many positions stay; where they would fall between two, fewer.
    """
    t = record.t.to_numpy()
    wanted = np.unique(np.geomspace(t[0], t[-1], points).round().astype(int))
    nearest = np.abs(t - wanted[:, None]).argmin(axis=1)
    return record.isel(t=np.unique(nearest))


def surroundings() -> dict[str, Any]:
    """Collect what a measurement was made with: versions, commit, machine, peak memory, date."""
    return {
        "versions": {name: version(name) for name in VERSIONS},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "commit_of_nohair": _commit(),
        "peak_mib": round(peak_mib(), 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak_mib() -> float:
    """Largest memory this process has held so far, in MiB."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource  # not there on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Give a folder beside `path`; rename what it holds into place when the block has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".writing-") as work:
        yield Path(work)
        for file in sorted(Path(work).iterdir()):
            file.replace(path.with_name(file.name))
