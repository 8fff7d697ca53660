import pytest


@pytest.fixture(autouse=True)
def _few_test_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handwriting is measured on a tenth of its test writers: most of a short run's time goes there."""
    monkeypatch.setattr("clipline.tasks.handwriting.TEST_WRITERS", 100)
