"""Reported and measured: the verdicts keep them apart."""

from math import nan

import numpy as np
import pytest

from nohair import claims, decay
from nohair.errors import Refused

CLAIM = claims.Claim("C0", "a claim", 0.2, 0.5)
T = np.arange(1, 257)


def fit(alpha, low, high):
    found = decay.fit(T, T**-1.0, (4, 256))
    return type(found)(**{**found.__dict__, "alpha": alpha, "low": low, "high": high})


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.3, 0.25, 0.45), "inside"),
        ((0.2, 0.2, 0.5), "inside"),
        ((0.1, 0.05, 0.19), "below"),
        ((0.6, 0.51, 0.7), "above"),
        ((0.5, 0.45, 0.55), "partly inside"),
        ((0.3, 0.1, 0.6), "partly inside"),
        ((0.15, 0.1, 0.25), "partly inside"),
        ((0.55, 0.45, 0.6), "partly inside"),
        ((nan, nan, nan), "no decay measurable"),
    ],
)
def test_the_verdict_weighs_the_whole_interval(interval, verdict):
    assert CLAIM.verdict(fit(*interval)) == verdict


def test_a_claim_without_a_number_has_no_verdict():
    with pytest.raises(Refused, match="C1 reports no number"):
        claims.load()["C1"].verdict(fit(0.5, 0.4, 0.6))


def test_the_reported_ranges_are_the_papers():
    # From the design's list of reported claims; our own measurements must never move them.
    reported = {name: claim.reported for name, claim in claims.load().items()}
    assert reported["C2"] == "0.55–0.7"
    assert reported["C3"] == "0.2–0.5"
    assert reported["C5"] == "1"
    assert {reported[name] for name in ("C1", "C4", "C6", "C8", "C9", "C10")} == {"no number"}


def test_the_table_keeps_reported_and_measured_in_columns_of_their_own():
    table = claims.table([(CLAIM, "a net", fit(0.3, 0.25, 0.45))])
    assert list(table.index) == ["C0"]
    assert dict(table.iloc[0]) == {
        "subject": "a net",
        "measured here": "0.30 [0.25, 0.45]",
        "as reported": "0.2–0.5",
        "the interval lies": "inside",
    }
