"""The table of architectures in docs/transformers.md says what is so, and nothing in it is wrong."""

import pytest
import transformers
from architectures import ARCHITECTURES, check, documented

from continuous_attention import register_transformers

register_transformers()
DOCUMENTED = documented()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def test_the_table_has_all_architectures_and_no_wrong_answer() -> None:
    assert set(DOCUMENTED) == set(ARCHITECTURES)
    assert len(DOCUMENTED) >= 20
    assert not any("wrong" in row.values() for row in DOCUMENTED.values() if isinstance(row, dict))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_an_architecture_does_what_the_table_says(name: str) -> None:
    assert check(name) == DOCUMENTED[name]
