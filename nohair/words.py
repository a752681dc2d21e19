"""Numbers as a page prints them."""

from __future__ import annotations

from math import floor, log10

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def decimal(value: float, digits: int = 2) -> str:
    """Print a number with so many decimals, and with a minus sign rather than a hyphen."""
    return f"{value:.{digits}f}".replace("-", "−")


def power_of_ten(exponent: float) -> str:
    """Print 10 to a power, which may be far beyond what a float holds: ``10¹⁶⁰⁹⁶``."""
    return "10" + str(round(exponent)).translate(RAISED)


def scientific(value: float, digits: int = 2) -> str:
    """Print a number with so many digits: plainly up to a million, then as ``1.2 × 10¹⁴``."""
    if not value or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.{digits}g}'):,.12g}"
    exponent = floor(log10(abs(value)))
    mantissa = float(f"{value:.{digits}g}") / 10.0**exponent
    if round(abs(mantissa), digits - 1) >= 10:
        mantissa, exponent = mantissa / 10, exponent + 1
    return f"{mantissa:.{digits - 1}f} × {power_of_ten(exponent)}"
