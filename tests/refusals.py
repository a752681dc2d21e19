"""What a refusal is, for every test of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nohair.errors import Refused


def refusal(ask: Callable[..., Any], **options: Any) -> str:
    """The one line in which something is refused."""
    with pytest.raises(Refused) as refused:
        ask(**options)
    message = str(refused.value)
    assert "\n" not in message
    return message
