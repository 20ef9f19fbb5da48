from __future__ import annotations

import pytest

from megarl.core.choices.credit import Credit
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"statistics": "all"},
        {"scale": "variance"},
        {"combination": "best"},
        {"weigh": "token"},
        {"combination": "unbiased", "scale": "std"},
        {"combination": "unbiased", "statistics": "trained"},
        {"objective": "cubic"},
    ],
)
def test_refusals(options):
    with pytest.raises(ConfigError):
        Credit(**options)
