"""The page of supported models says what the tests check."""

import supported_models


def test_the_page_is_current():
    assert supported_models.PAGE.read_text(encoding="utf-8") == supported_models.document(), (
        "run: python tests/models/supported_models.py"
    )
