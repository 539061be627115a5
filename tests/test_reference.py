"""The pages of docs/reference/ that come from the code say what the code says."""

import pytest

from tests.reference import FOLDER, PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_code_says(page: str) -> None:
    assert (FOLDER / page).read_text() == PAGES[page](), "run `make reference`"
