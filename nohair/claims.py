"""What the paper reports, and how a measurement stands to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

import pandas as pd
import yaml

from nohair.decay import Fit
from nohair.errors import Refused
from nohair.places import DATA


@dataclass(frozen=True)
class Claim:
    """One claim as reported, in this project's words; `low` to `high` where it has a number."""

    name: str
    text: str
    low: float | None = None
    high: float | None = None

    @property
    def reported(self) -> str:
        """The reported range as it is printed."""
        if self.low is None or self.high is None:
            return "no number"
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}–{self.high:g}"

    def verdict(self, fit: Fit) -> str:
        """Say where a measured exponent lies, its interval taken into account.

        ``inside``, ``below`` or ``above`` the reported range where the whole interval is;
        ``partly inside`` where the two share a part.

        Raises
        ------
        Refused
            The claim has no number to compare with.
        """
        if self.low is None or self.high is None:
            raise Refused(f"claim {self.name} reports no number; compare with C2, C3 or C5")
        if isnan(fit.alpha):
            return "no decay measurable"
        if fit.high < self.low:
            return "below"
        if fit.low > self.high:
            return "above"
        return "inside" if self.low <= fit.low and fit.high <= self.high else "partly inside"


def load() -> dict[str, Claim]:
    """Read the claims from ``data/claims.yml``, by their names in the design (C1, C2, …)."""
    entries = yaml.safe_load((DATA / "claims.yml").read_text("utf8"))
    return {name: Claim(name, e["text"], *e.get("range", ())) for name, e in entries.items()}


def table(measured: Iterable[tuple[Claim, str, Fit]]) -> pd.DataFrame:
    """Set claims beside measurements, one row each, given as (claim, what was measured, fit)."""
    rows = [
        (claim.name, what, str(fit), claim.reported, claim.verdict(fit))
        for claim, what, fit in measured
    ]
    columns = ["claim", "subject", "measured here", "as reported", "the interval lies"]
    return pd.DataFrame(rows, columns=columns).set_index("claim").rename_axis(None)
