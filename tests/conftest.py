"""What every test starts from: no network, one thread, loaders that are waited for once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read by the libraries when they are imported

import pytest
import torch

from nohair.lab import models
from nohair.lab.models import Subject

torch.set_num_threads(1)  # tiny matrices gain nothing from a second and wait for it


@pytest.fixture(scope="session")
def smoke() -> Subject:
    """The smallest preset: SmolLM2's tokenizer (reading it takes seconds), random weights."""
    return models.load("smoke", device="cpu")


@pytest.fixture(scope="session")
def smollm2() -> Subject:
    """The trained model that comes with the project; use it sparingly, it takes a while."""
    return models.load("smollm2-135m", device="cpu")
