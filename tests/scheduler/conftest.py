from __future__ import annotations

import pytest
from hand_stepped import HandStepped


@pytest.fixture
def make_bench():
    return HandStepped
