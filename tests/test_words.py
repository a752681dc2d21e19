"""Numbers as pages print them."""

import pytest

from nohair.words import decimal, power_of_ten, scientific


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (-3.14159, "-3.1"),
        (59874.14, "60,000"),
        (999_999, "1,000,000"),
        (1_000_000, "1.0 × 10⁶"),
        (3.93e12, "3.9 × 10¹²"),
        (9.99e13, "1.0 × 10¹⁴"),
        (0.00012, "1.2 × 10⁻⁴"),
        (-2.5e-9, "-2.5 × 10⁻⁹"),
        (1.5e300, "1.5 × 10³⁰⁰"),
    ],
)
def test_two_digits_plainly_or_with_a_power_of_ten(value: float, printed: str) -> None:
    assert scientific(value) == printed


def test_more_digits_on_request() -> None:
    assert scientific(59874.14, 4) == "59,870"
    assert scientific(1.23456e20, 4) == "1.235 × 10²⁰"


def test_a_power_may_lie_beyond_every_float() -> None:
    assert power_of_ten(16096.2) == "10¹⁶⁰⁹⁶"
    assert power_of_ten(-3) == "10⁻³"


@pytest.mark.parametrize(("value", "printed"), [(-0.114, "−0.11"), (0.5, "0.50"), (12.0, "12.00")])
def test_decimals_have_a_minus_sign(value: float, printed: str) -> None:
    assert decimal(value) == printed
